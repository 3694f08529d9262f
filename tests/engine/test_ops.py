"""Each operation against the oracle, within the bound that its arithmetic allows; edge values on every instruction set,
whose other bits are compared in test_bits.py.
"""

import numpy as np
import pytest

import oracle
from afflux import ops
from conftest import awkward, bits, check_error
from order import SIZES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ingest(rng, size, dtype):
    update = awkward(rng, size).astype(dtype)
    if dtype is np.float64:
        update *= 1 + 1e-9  # not a float32 value any more
    slot = np.full(size, np.nan, np.float32)
    facts = ops.ingest(update, slot)
    assert bits(slot) == bits(update.astype(np.float32))
    assert facts.first_nonfinite is None
    squares = oracle.f64(slot) ** 2
    assert abs(facts.sum_of_squares - squares.sum()) <= oracle.sum_bound(squares.sum(), size)
    assert facts.min == (slot.min() if size else np.inf)
    assert facts.max == (slot.max() if size else -np.inf)
    assert facts.norm == np.sqrt(facts.sum_of_squares)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("size", "places"), [(1, [0]), (70, [69]), (2049, [2048, 5]), (140_000, [139_999, 65_536, 70_000])]
)
def test_ingest_finds_the_first_nonfinite(isa, rng, bad, size, places):
    update = awkward(rng, size)
    for i in range(len(places)):
        update[places[i]] = bad
        facts = ops.ingest(update, np.empty(size, np.float32), num_threads=2)
        assert facts.first_nonfinite == min(places[: i + 1])


def test_ingest_min_and_max_skip_nan(isa):
    facts = ops.ingest(np.array([np.nan, 2.0, -3.0, np.nan], np.float32), np.empty(4, np.float32))
    assert (facts.min, facts.max, facts.first_nonfinite) == (-3.0, 2.0, 0)


def test_ingest_float64_beyond_float32_counts_as_nonfinite(isa):
    assert ops.ingest(np.array([1.0, 1e300]), np.empty(2, np.float32)).first_nonfinite == 1


@pytest.mark.parametrize("size", [*SIZES, 140_001])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_gram(rng, size, count):
    vectors = [awkward(rng, size) for _ in range(count)]
    matrix = np.array([oracle.f64(v) for v in vectors])
    expected = matrix @ matrix.T
    bound = oracle.sum_bound(np.abs(matrix) @ np.abs(matrix).T, size)
    result = ops.gram(vectors, num_threads=2)
    assert result.shape == (count, count)
    assert np.all(np.abs(result - expected) <= bound)
    assert bits(result) == bits(result.T)


@pytest.mark.parametrize("count", [63, 64, 65, 130])
def test_gram_in_panels(isa, rng, count):
    vectors = [awkward(rng, 100) for _ in range(count)]
    result = ops.gram(vectors)
    picked = [0, 62, count - 1]
    assert bits(result[np.ix_(picked, picked)]) == bits(ops.gram([vectors[i] for i in picked]))


def test_gram_diagonal_is_ingests_sum_of_squares(isa, rng):
    vector = awkward(rng, 140_001)
    squares = ops.ingest(vector, np.empty_like(vector)).sum_of_squares
    assert ops.gram([vector, vector]).tolist() == [[squares, squares], [squares, squares]]


def test_apply_in_place_equals_out_of_place(isa, rng):
    size = 70_000
    params = awkward(rng, size)
    updates, weights = [awkward(rng, size) for _ in range(5)], rng.standard_normal(5)
    out = np.empty_like(params)
    ops.apply(ops.Pass(params, out, ops.Combine(updates, weights, 0.25)))
    ops.apply(ops.Pass(params, params, ops.Combine(updates, weights, 0.25)))
    assert bits(params) == bits(out)


def test_a_missing_row_equals_a_row_of_zeros(isa, rng):
    size = 3000
    params, update = awkward(rng, size), awkward(rng, size)
    results = []
    for row in (None, np.zeros(size, np.float32)):
        cache, out, new = np.full(size, 0.1), np.empty(size, np.float32), np.empty(size, np.float32)
        stage = ops.CachedDifference(cache, 3, [row], [new])
        ops.apply(ops.Pass(params, out, ops.Combine([update], np.array([0.3])), stage))
        results.append((bits(out), bits(cache), bits(new)))
    assert results[0] == results[1]


def test_a_weight_of_zero_is_not_read(isa, rng):
    size = 5000
    params, good = awkward(rng, size), awkward(rng, size)
    poison = np.full(size, np.nan, np.float32)
    alone, mixed = np.empty_like(params), np.empty_like(params)
    ops.apply(ops.Pass(params, alone, ops.Combine([good], np.array([0.5]))))
    ops.apply(ops.Pass(params, mixed, ops.Combine([poison, good, poison], np.array([0.0, 0.5, 0.0]))))
    assert bits(alone) == bits(mixed)

    caches = []
    for updates, weights in (([good], [0.5]), ([poison, good], [0.0, 0.5])):
        cache = np.full(size, 0.25)
        rows: list = [None] * len(updates)
        stage = ops.CachedDifference(cache, 4, rows, [None] * (len(updates) - 1) + [np.empty_like(good)])
        ops.apply(ops.Pass(params, mixed, ops.Combine(updates, np.array(weights)), stage))
        caches.append((bits(cache), bits(mixed)))
    assert caches[0] == caches[1]


def test_a_rejected_nan_does_not_leak_even_when_its_row_is_replaced(isa, rng):
    size = 5000
    params, good, poison = awkward(rng, size), awkward(rng, size), np.full(size, np.nan, np.float32)
    alone, mixed = np.empty_like(params), np.empty_like(params)
    ops.apply(
        ops.Pass(
            params, alone, ops.Combine([good], np.ones(1)), ops.CachedDifference(np.zeros(size), 4, [None], [None])
        )
    )
    stage = ops.CachedDifference(np.zeros(size), 4, [None, None], [np.empty_like(good), None])
    ops.apply(ops.Pass(params, mixed, ops.Combine([poison, good], np.array([0.0, 1.0])), stage))
    assert bits(mixed) == bits(alone)


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
def test_min_and_max_keep_the_first_of_equal_zeros(isa, zeros):
    """By lanes: elements 0 and 32 share one, so that the order within it decides."""
    update = np.full(33, 0.0, np.float32)
    update[0], update[32] = zeros
    update[1:32] = zeros[0]
    facts = ops.ingest(update, np.empty_like(update))
    assert np.signbit([facts.min, facts.max]).tolist() == [np.signbit(zeros[0])] * 2


def test_codec_round_trip(rng):
    for size in SIZES:
        vector = awkward(rng, size)
        row = np.empty(ops.row_bytes(size), np.uint8)
        ops.encode(vector, row, num_threads=2)
        assert row.tobytes() == vector.astype("<f4").tobytes()
        back = np.full(size, np.nan, np.float32)
        ops.decode(row, back, num_threads=2)
        assert bits(back) == bits(vector)


def test_a_checked_round_is_made_as_any(rng):
    params, update = awkward(rng, 3000), awkward(rng, 3000)
    rounds = [ops.Pass(params, np.empty_like(params), ops.Combine([update], np.array([0.5]))) for _ in range(2)]
    checked = ops.check(rounds[0])
    ops.apply(rounds[0], checked=checked)
    ops.apply(rounds[1])
    assert bits(rounds[0].out) == bits(rounds[1].out)
    for wrong, message in ((5, "checked is 5, must be the result of check"), (checked, "checked is not of this round")):
        check_error(message, ops.apply, rounds[1], checked=wrong)
    checked.release()
    check_error("or was released", ops.apply, rounds[0], checked=checked)
