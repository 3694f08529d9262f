"""Trimmed means: the bits of sorted values in plain float64, and what is cut leaves nothing."""

from dataclasses import dataclass
from itertools import pairwise as neighbours

import numpy as np
import pytest

import oracle
from afflux import ops
from conftest import ISAS, THREADS, bits, check_error
from pairwise import pairwise
from test_types import buffer, values

SIZES = [1, 31, 33, 1025, 70_001]
#: Equal weights; shares that a cut divides; some zeros; weights below a unit of 2^-28.
WEIGHTS = {
    "equal": lambda rng, count: np.full(count, 0.75 / count),
    "few": lambda rng, count: rng.integers(1, 4, count) / 7,
    "any": lambda rng, count: rng.random(count) * (rng.random(count) < 0.8),
    "tiny": lambda rng, count: np.where(rng.random(count) < 0.5, 1e-9, 1.0) * rng.random(count),
}


def draw(rng, dtype, size, count):
    """Many are equal, or zeros of either sign."""
    scale = 10.0 ** rng.integers(0, 5, size)
    vectors = np.round(rng.standard_normal((count, size)) * 2 * scale) / scale
    return [buffer(dtype, vector.astype("float64" if dtype == "float64" else "float32")) for vector in vectors]


def trimmed(updates, weights, trim, dtype="float64", threads=1, **options):
    size = len(np.asarray(updates[0]))
    params, out = np.full(size, 0.5, dtype), np.full(size, np.nan, dtype)
    sweep = ops.Pass(params, out, ops.Combine(updates, weights, trim=trim), step=ops.Step("sgd", 0.5), **options)
    ops.apply(sweep, num_threads=threads)
    return out


@pairwise(
    "size, count, weights, trim, updates, dtype",
    SIZES, [1, 2, 3, 5, 8, 10, 13, 17, 32, 33, 64, 65, 90], [*WEIGHTS], [0.5, 0.2, 0.1, 1 / 7, 0.49, 1e-9],
    ["float32", "float64", "bfloat16"], ["float32", "float64"],
)  # fmt: skip
def test_the_bits_are_those_of_sorted_values(rng, size, count, weights, trim, updates, dtype):
    numbers, vectors = WEIGHTS[weights](rng, count), draw(rng, updates, size, count)
    expected = 0.5 + 0.5 * (np.zeros(size) + oracle.trimmed(map(values, vectors), numbers.tolist(), trim))
    chosen = next(backend.name for backend in ops.backends() if backend.chosen)
    try:
        for isa in ISAS:
            ops.choose_isa(isa)
            for threads in THREADS:
                assert bits(trimmed(vectors, numbers, trim, dtype, threads)) == bits(expected.astype(dtype)), isa
    finally:
        ops.choose_isa(chosen)


@pytest.mark.parametrize("count", [5, 13, 33])
def test_infinite_values_are_the_largest(count):
    vectors = [np.full(3, value, np.float32) for value in [1.0] * (count // 2) + [np.inf] * (count - count // 2)]
    assert trimmed(vectors, np.ones(count), 0.5).tolist() == [np.inf] * 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("hostile", [1, 2, 3])
@pytest.mark.parametrize("value", [-1e15, 1e15])
def test_what_is_cut_leaves_nothing(isa, dtype, hostile, value):
    """Of ten equal arrivals, and of ten with weights whose shares are rounded."""
    honest, bad = np.ones(5, dtype), np.full(5, value, dtype)
    for weights in (np.full(10, 0.1), np.array([3.0, 7.0] * 5) / 50, np.arange(1.0, 11) / 55):
        share = max(weights[i : i + hostile].sum() for i in range(0, 10, hostile)) / weights.sum()
        for first in range(0, 11 - hostile, hostile):
            updates = [bad if first <= i < first + hostile else honest for i in range(10)]
            assert bits(trimmed(updates, weights, share)) == bits(trimmed([honest] * 10, weights, share))
    even = trimmed([bad] * hostile + [honest] * (10 - hostile), np.full(10, 0.1), hostile / 10)
    assert even.tolist() == [0.5 + 0.5 * oracle.ordered_sum([0.1] * 10)] * 5


@pytest.mark.parametrize("count", [1, 2, 9, 10, 64, 65])
def test_a_half_is_the_mean_of_lower_and_upper_median(isa, rng, count):
    updates = rng.standard_normal((count, 100))
    out = trimmed(list(updates), np.full(count, 1.0), 0.5)
    expected = 0.5 + 0.5 * count * np.median(updates, axis=0)
    assert np.all(np.abs(out - expected) <= 4 * oracle.EPS * (1 + np.abs(expected)))


def test_a_share_is_cut_at_each_end(isa, rng):
    """The mean of what is left, for shares that are whole arrivals; of others, a part of two more."""
    updates = np.sort(rng.standard_normal((10, 50)), axis=0)
    mixed = list(updates[rng.permutation(10)])
    for cut in (1, 2, 3.5, 4):
        whole, part = int(np.ceil(cut)), np.ceil(cut) - cut
        total = updates[whole : 10 - whole].sum(axis=0) + part * (updates[whole - 1] + updates[10 - whole])
        expected = 0.5 + 0.5 * total / (10 - 2 * cut)
        assert np.all(np.abs(trimmed(mixed, np.full(10, 0.1), cut / 10) - expected) <= 1e-7)
    mean = 0.5 + 0.5 * updates.mean(axis=0)
    assert np.all(np.abs(trimmed(mixed, np.full(10, 0.1), 1e-12) - mean) <= 1e-7)


@pytest.mark.parametrize("updates", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_with_the_other_stages(isa, rng, updates, kind):
    """Params, rule vectors, whose new values are those of untrimmed updates, and states; trees read in place."""
    size, count = 4099, 7
    vectors, weights = [np.asarray(v) for v in draw(rng, updates, size, count)], rng.random(count)
    params, held = rng.standard_normal(size), [rng.standard_normal(size) for _ in range(2)]
    coefficients = rng.standard_normal((2, 2 + count))
    states = [np.zeros(size), np.zeros(size)] if kind == "adam" else []
    step = ops.Step(kind, 0.3, 0.9, 0.99, 1e-3)
    v, _ = oracle.direction(params, vectors, weights.tolist(), 0.25, (held, [0.7, -1.1]), trim=0.3)
    expected = oracle.step(kind, params, v, states, 0.3, 0.9, 0.99, 1e-3, 1.0)
    renewed = oracle.next_memories(held, vectors, coefficients)
    borders = np.array([0, 5, 5, 700, 4096, size])
    cut = [ops.Parts([v[a:b] for a, b in neighbours(borders)], borders) for v in vectors]
    for given in (vectors, cut):
        out, new_states, memory = np.empty(size), [s.copy() for s in states], [m.copy() for m in held]
        kept = ops.RuleVectors(memory, np.array([0.7, -1.1]), coefficients)
        combine = ops.Combine(given, weights, 0.25, trim=0.3)
        ops.apply(ops.Pass(params, out, combine, None, step, new_states, kept), num_threads=2)
        assert [bits(x) for x in (out, *new_states, *memory)] == [bits(x) for x in (*expected, *renewed)]


def test_updates_that_are_not_checked_before(isa, rng):
    updates, weights, out = [rng.standard_normal(50) for _ in range(5)], np.full(5, 0.2), np.empty(50)

    def sound(weights):
        done = []
        combine = ops.Combine(updates, np.array(weights), most=1e6, trim=0.2)
        ops.apply(ops.Pass(np.zeros(50), out, combine), done=done)
        return done == [True]

    assert sound(weights)
    for value in (1e7, np.nan, -np.inf):
        updates[2][33] = value
        assert not sound(weights)
    assert sound([0.2, 0.2, 0, 0.2, 0.2])
    assert sound(np.zeros(5))
    assert not out.any()


@dataclass
class Case:
    text: str
    trim: object = 0.2
    weights: tuple = (0.5, 0.5)
    cached: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Case("trim is 0.6", 0.6),
        Case("trim is -0.1", -0.1),
        Case("trim is nan", np.nan),
        Case(r"weights\[1\] is negative", weights=(0.5, -0.1)),
        Case("trim does not go with cached rows", cached=True),
    ],
    ids=lambda case: case.text,
)
def test_refused(case):
    params, out = np.zeros(3), np.full(3, 7.0)
    rows = ops.CachedMean(np.zeros(3), 2, [None, None], [None, None]) if case.cached else None
    combine = ops.Combine([np.ones(3)] * 2, np.array(case.weights), trim=case.trim)
    check_error(case.text, ops.apply, ops.Pass(params, out, combine, rows))
    assert out.tolist() == [7.0] * 3
