"""Every element type in every place that takes it: conversions, updates in many parts, params in float64."""

import numpy as np
import pytest

import oracle
from afflux import _engine, ops
from conftest import ISAS, THREADS, awkward, bits
from order import SIZES
from pairwise import pairwise

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's casts of signalling NaN
SLOTS = ["float32", "float64", "bfloat16"]


def buffer(dtype, values):
    """A buffer of the engine's, filled by way of its integer view: nothing here is converted by the engine."""
    filled = _engine.Buffer(_engine.Pool(len(values), dtype, 1))
    np.asarray(filled)[:] = upper_half(oracle.bfloat16(values)) if dtype == "bfloat16" else values
    return filled


def empty(dtype, size):
    return buffer(dtype, np.full(size, np.nan))


def upper_half(values):
    """The bits of float32 values that bfloat16 holds."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_upper_half(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def values(filled):
    """What a buffer holds, as float32 or float64."""
    array = np.asarray(filled)
    return from_upper_half(array) if filled.dtype == "bfloat16" else array


def rounded(array, dtype):
    """The oracle's conversion."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return oracle.bfloat16(np.asarray(array).astype(np.float32))
        return np.asarray(array).astype(dtype)


def same(left, right):
    """Equal bits, where any NaN equals any other."""
    left, right = np.asarray(left), np.asarray(right)
    both = np.isnan(left) & np.isnan(right)
    return left.dtype == right.dtype and bits(left[~both]) == bits(right[~both])


def specials():
    """Float32 around every rounding border of bfloat16: ties to even and odd, overflow, subnormals, infinities, NaN."""
    halves = np.arange(0x10000, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (halves[:, None] | low).ravel().view(np.float32)


def test_all_of_float16(isa):
    update = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    for dtype in SLOTS:
        slot = empty(dtype, update.size)
        facts = ops.ingest(update, slot)
        assert same(values(slot), rounded(update, dtype))
        assert facts.first_nonfinite == 0x7C00


def test_all_of_bfloat16(isa):
    update = np.arange(0x10000, dtype=np.uint16)
    source = _engine.Buffer(_engine.Pool(update.size, "bfloat16", 1))
    np.asarray(source)[:] = update
    for dtype in SLOTS:
        slot = empty(dtype, update.size)
        ops.ingest(source, slot)
        assert same(values(slot), from_upper_half(update).astype("float64" if dtype == "float64" else "float32"))


def test_rounding_to_bfloat16(isa):
    import torch

    update = specials()
    slot = empty("bfloat16", update.size)
    ops.ingest(update, slot)
    assert same(values(slot), torch.from_numpy(update).bfloat16().float().numpy())
    assert same(values(slot), oracle.bfloat16(update))


def test_float64_is_rounded_to_float32_first(isa):
    """Half a unit of bfloat16 and a little, which float32 cannot hold: a tie after the first rounding."""
    slot = empty("bfloat16", 2)
    ops.ingest(np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 + 2.0**-20]), slot)
    assert values(slot).tolist() == [1.0, 1 + 2.0**-7]


@pytest.mark.parametrize("bad", [1e39, -1e300, np.inf, np.nan])
def test_out_of_a_slots_range_counts_as_nonfinite(isa, bad):
    for dtype in SLOTS:
        update = np.ones(5000)
        update[4321] = bad
        fits = dtype == "float64" and np.isfinite(bad)
        assert ops.ingest(update, empty(dtype, 5000)).first_nonfinite == (None if fits else 4321)


def test_a_float64_slots_sum_may_overflow_while_its_values_are_finite(isa):
    update = np.full(70_000, 1e200)
    facts = ops.ingest(update, np.empty(70_000))
    assert (facts.first_nonfinite, facts.sum_of_squares, facts.min, facts.max) == (None, np.inf, 1e200, 1e200)
    update[69_999] = np.nan
    assert ops.ingest(update, np.empty(70_000)).first_nonfinite == 69_999


@pytest.mark.parametrize("dtype", SLOTS)
@pytest.mark.parametrize("size", SIZES)
def test_ingest(rng, dtype, size):
    for kind in ("float16", "float32", "float64", "bfloat16"):
        wide = rng.standard_normal(size) * 2.0 ** rng.integers(-20, 10, size)
        update = buffer(kind, wide) if kind == "bfloat16" else wide.astype(kind)
        slot = empty(dtype, size)
        facts = ops.ingest(update, slot, num_threads=2)
        expected = rounded(values(update) if kind == "bfloat16" else update, dtype)
        assert bits(values(slot)) == bits(expected)
        squares = oracle.f64(expected) ** 2
        assert abs(facts.sum_of_squares - squares.sum()) <= oracle.sum_bound(squares.sum(), size)
        assert (facts.min, facts.max) == (expected.min(initial=np.inf), expected.max(initial=-np.inf))


def cut(rng, update, kinds):
    """The update in parts of random sizes, empty ones too, of these types in turn and of 0 to 3 dimensions."""
    borders = np.sort(rng.integers(0, update.size + 1, 40))
    parts = []
    for i, part in enumerate(np.split(update, borders)):
        kind = kinds[i % len(kinds)]
        typed = buffer(kind, part) if kind == "bfloat16" else part.astype(kind)
        shapes = [(-1,), (1, -1), (-1, 1, 1)]
        if part.size == 1:
            shapes.append(())
        shape = shapes[i % len(shapes)]
        parts.append(typed if kind == "bfloat16" or part.size == 0 else typed.reshape(shape))
    return parts


@pairwise("isa, dtype, size", ISAS, SLOTS, [1, 33, 2049, 65536, 3 * 65536 + 5], indirect=["isa"])
def test_parts_give_the_bits_of_the_concatenation(isa, rng, dtype, size):
    update = rng.integers(-128, 128, size) * 2.0 ** rng.integers(-4, 8, size)  # the same value in every type
    whole = empty(dtype, size)
    expected = ops.ingest(update, whole)
    for kinds in (["float32"], ["float64", "float16", "bfloat16", "float32"]):
        for threads in THREADS:
            slot = empty(dtype, size)
            assert ops.ingest(cut(rng, update, kinds), slot, num_threads=threads) == expected
            assert bits(np.asarray(slot)) == bits(np.asarray(whole))


def test_awkward_parts_give_the_bits_of_the_concatenation(isa, rng):
    update = awkward(rng, 140_001)
    whole, slot = np.empty_like(update), np.empty_like(update)
    expected = ops.ingest(update, whole)
    assert ops.ingest(tuple(cut(rng, update, ["float32", "float64"])), slot, num_threads=3) == expected
    assert bits(slot) == bits(whole)


def test_thousands_of_tiny_parts_and_none(isa):
    update = np.arange(50_000, dtype=np.float32)
    slot = np.empty_like(update)
    assert ops.ingest(np.split(update, 5000), slot, num_threads=2) == ops.ingest(update, slot.copy())
    assert bits(slot) == bits(update)
    assert ops.ingest([], np.empty(0, np.float32)) == ops.ingest(np.empty(0), np.empty(0, np.float32))


def test_the_first_nonfinite_value_is_counted_over_all_parts(isa):
    parts = [np.ones(3, np.float16), np.ones((2, 2)), np.ones(70_000, np.float32), np.ones(5)]
    slot = np.empty(70_012, np.float32)
    parts[3][1] = np.inf
    assert ops.ingest(parts, slot).first_nonfinite == 70_008
    parts[2][65_000] = np.nan
    assert ops.ingest(parts, slot, num_threads=2).first_nonfinite == 65_007
    parts[1][1, 0] = 1e39
    assert ops.ingest(parts, slot).first_nonfinite == 5


@pytest.mark.parametrize("size", [1, 33, 2049, 140_001])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gram_of_float64(rng, size, count):
    vectors = [rng.standard_normal(size) for _ in range(count)]
    matrix = np.array(vectors)
    bound = oracle.sum_bound(np.abs(matrix) @ np.abs(matrix).T, size)
    assert np.all(np.abs(ops.gram(vectors, num_threads=2) - matrix @ matrix.T) <= bound)


@pytest.mark.parametrize("size", [1, 33, 2049, 140_001])
def test_gram_of_bfloat16_is_that_of_the_same_values(isa, rng, size):
    vectors = [buffer("bfloat16", rng.standard_normal(size)) for _ in range(5)]
    assert bits(ops.gram(vectors, num_threads=2)) == bits(ops.gram([values(v) for v in vectors]))


@pairwise("isa, params_type, size", ISAS, ["float32", "float64"], [1, 33, 1025, 4097, 70_001], indirect=["isa"])
def test_the_same_values_in_other_types_give_the_same_bits(isa, rng, params_type, size):
    """Updates in bfloat16, float32 and float64, with and without cached rows, few and many of them."""
    params = rng.standard_normal(size).astype(params_type)
    for count in (3, 70):
        brain = [buffer("bfloat16", rng.standard_normal(size)) for _ in range(count)]
        old = [rng.standard_normal(size).astype(np.float32) if i % 3 else None for i in range(count)]
        weights = np.where(rng.random(count) < 0.2, 0.0, rng.standard_normal(count))
        results = []
        for dtype in ("bfloat16", "float32", "float64"):
            updates = brain if dtype == "bfloat16" else [values(b).astype(dtype) for b in brain]
            row_type = np.float64 if dtype == "float64" else np.float32
            plain, out, cache = np.empty_like(params), np.empty_like(params), np.linspace(-1, 1, size)
            combine = ops.Combine(updates, weights, 0.5)
            ops.apply(ops.Pass(params, plain, combine), num_threads=2)
            rows = [None if row is None else row.astype(row_type) for row in old]
            new = [None if i % 4 == 1 else np.empty(size, row_type) for i in range(count)]
            stage = ops.CachedDifference(cache, 7, rows, new)
            ops.apply(ops.Pass(params, out, combine, stage, ops.Step("sgd", 0.3)), num_threads=2)
            kept = [row.astype(np.float32) for row in new if row is not None]
            results.append([bits(array) for array in (plain, out, cache, *kept)])
            for i, row in enumerate(new):
                assert row is None or bits(row) == bits(values(brain[i]).astype(row_type))
        assert results[0] == results[1] == results[2]


def test_codec_float64(rng):
    for size in SIZES:
        vector, row = rng.standard_normal(size), np.empty(ops.row_bytes(size, codec="float64"), np.uint8)
        ops.encode(vector, row, codec="float64", num_threads=2)
        assert row.tobytes() == vector.astype("<f8").tobytes()
        back = np.full(size, np.nan)
        ops.decode(row.view(np.float64), back, codec="float64", num_threads=2)
        assert bits(back) == bits(vector)
