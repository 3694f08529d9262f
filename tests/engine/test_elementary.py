"""exp, log and pow: within half an ulp and a little of 60-digit decimals, and C99's special values. golden.json
pins the bits of 10^5 results, which test_bits.py computes on every instruction set and without CPU features."""

import math
from decimal import Context, Decimal

import numpy as np
import pytest

import afflux
from conftest import check_error
from surroundings import flushed_subnormals

EXACT = Context(prec=60, Emin=-(10**6), Emax=10**6)
INF, NAN, TINY, HUGE = math.inf, math.nan, 5e-324, 1.7976931348623157e308


def ulps(result, exact):
    """The error of a finite result in units of its last place."""
    return float(abs(EXACT.subtract(Decimal(result), exact)) / Decimal(math.ulp(result)))


def bound(result):
    """A subnormal result is rounded twice."""
    return 0.501 if result >= 2.0**-1022 else 1.0


def positive(rng, count):
    """Numbers of all sizes, near 1 and subnormal ones too."""
    yield from (math.ldexp(m, int(k)) for m, k in zip(rng.random(count), rng.integers(-1074, 1024, count), strict=True))
    yield from (
        1 + s * 2.0 ** -int(k) for s, k in zip(rng.uniform(-1, 1, count), rng.integers(1, 53, count), strict=True)
    )
    yield from rng.uniform(0.5, 3, count).tolist()


def test_exp_is_accurate(rng):
    for x in [*rng.uniform(-745, 709.7, 3000).tolist(), *rng.uniform(-1, 1, 1000).tolist(), 709.78, -708.5, 1e-300]:
        result = afflux.exp(x)
        assert ulps(result, Decimal(x).exp(EXACT)) <= bound(result), x


def test_log_is_accurate(rng):
    for x in positive(rng, 1500):
        if x not in (0.0, 1.0):
            assert ulps(afflux.log(x), Decimal(x).ln(EXACT)) <= 0.501, x


def test_pow_is_accurate(rng):
    for x in positive(rng, 1000):
        if x in (0.0, 1.0):
            continue
        log_x = Decimal(x).ln(EXACT)
        for y in (float(Decimal(float(rng.uniform(-744, 709))) / log_x), float(rng.uniform(-0.9, 0.9)), -0.5):
            result = afflux.pow(x, y)
            exact = EXACT.exp(EXACT.multiply(Decimal(y), log_x))
            assert result not in (0.0, INF), (x, y)
            assert ulps(result, exact) <= bound(result), (x, y)


@pytest.mark.parametrize(
    ("x", "result"),
    [(0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (NAN, NAN), (710.0, INF), (HUGE, INF), (-745.2, 0.0),
     (-745.1, TINY), (-HUGE, 0.0), (TINY, 1.0), (1e-17, 1.0)],
)  # fmt: skip
def test_exp_of_special_values(x, result):
    assert same(afflux.exp(x), result)


@pytest.mark.parametrize(
    ("x", "result"),
    [(1.0, 0.0), (0.0, -INF), (-0.0, -INF), (-1.0, NAN), (-INF, NAN), (-TINY, NAN), (INF, INF), (NAN, NAN)],
)  # fmt: skip
def test_log_of_special_values(x, result):
    assert same(afflux.log(x), result)


@pytest.mark.parametrize(
    ("x", "y", "result"),
    [
        *[(x, y, 1.0) for x in (0.0, -0.0, 1.0, -3.0, INF, -INF, NAN) for y in (0.0, -0.0)],
        *[(1.0, y, 1.0) for y in (5.5, INF, -INF, NAN)],
        (-1.0, INF, 1.0), (-1.0, -INF, 1.0), (-1.0, 3.0, -1.0), (-1.0, 2.0**53, 1.0), (NAN, 1.0, NAN), (2.0, NAN, NAN),
        (-2.0, 3.0, -8.0), (-2.0, 2.0, 4.0), (-2.0, -1.0, -0.5), (-2.0, 0.5, NAN), (-TINY, 0.5, NAN),
        (0.0, 3.0, 0.0), (-0.0, 3.0, -0.0), (-0.0, 2.0, 0.0), (-0.0, 2.5, 0.0), (-0.0, INF, 0.0),
        (0.0, -3.0, INF), (-0.0, -3.0, -INF), (-0.0, -2.0, INF), (-0.0, -2.5, INF), (-0.0, -INF, INF),
        (INF, 2.0, INF), (INF, -2.0, 0.0), (-INF, 3.0, -INF), (-INF, 2.0, INF), (-INF, 0.5, INF),
        (-INF, -3.0, -0.0), (-INF, -2.0, 0.0), (-INF, -0.5, 0.0),
        (2.0, INF, INF), (2.0, -INF, 0.0), (0.5, INF, 0.0), (0.5, -INF, INF), (-2.0, INF, INF), (-0.5, INF, 0.0),
        (2.0, 1024.0, INF), (-2.0, 1025.0, -INF), (2.0, -1074.0, TINY), (2.0, -1076.0, 0.0), (-2.0, -1077.0, -0.0),
        (1 + 2.0**-52, HUGE, INF), (1 - 2.0**-53, HUGE, 0.0), (1 - 2.0**-53, -HUGE, INF), (HUGE, HUGE, INF),
        (2.0, 10.0, 1024.0), (10.0, 22.0, 1e22), (3.0, 33.0, 3.0**33), (4.0, 0.5, 2.0), (TINY, 1.0, TINY),
        (HUGE, 1.0, HUGE), (HUGE, -1.0, 2.0**-1024), (2.0, TINY, 1.0),
    ],
)  # fmt: skip
def test_pow_of_special_values(x, y, result):
    assert same(afflux.pow(x, y), result)


def same(left, right):
    """Equal, zeros by sign too; NaN equals NaN."""
    if math.isnan(right):
        return math.isnan(left)
    return left == right and math.copysign(1, left) == math.copysign(1, right)


def test_the_callers_floating_point_mode_does_not_matter():
    calls = [(afflux.exp, -740.3), (afflux.log, 3e-310), (afflux.pow, 0.1, 310.5)]
    before = [function(*arguments) for function, *arguments in calls]
    with flushed_subnormals():
        after = [function(*arguments) for function, *arguments in calls]
    assert after == before


def test_numpys_numbers_are_floats_too():
    assert afflux.exp(np.float64(1.0)) == afflux.exp(1.0) == afflux.exp(1)
    check_error(r"x is .*, must be a number", afflux.exp, "1")
