"""ingest with a conversion: what a client sends becomes what a rule takes, with the bits of doing it in NumPy first."""

import numpy as np
import pytest

import oracle
from afflux import _engine, ops
from conftest import THREADS, awkward, bits, check_error
from pairwise import pairwise
from test_types import buffer, empty, rounded, values

KINDS = ("update", "gradient", "model")
PAIRS = [(given, wanted) for given in KINDS for wanted in KINDS if given != wanted]
SENT = ("float16", "bfloat16", "float32", "float64")
SIZES = (1, 31, 1024, 1025, 70_001)
SCALE = 0.3


def as_client_saw(base, dtype):
    """The base after a client has stored it in this dtype; through float32 to the types of 16 bits."""
    if dtype == "float64":
        return base
    seen = base.astype(np.float32)
    if dtype == "bfloat16":
        seen = oracle.bfloat16(seen)
    elif dtype == "float16":
        seen = seen.astype(np.float16)
    return seen.astype(base.dtype)


def converted(given, wanted, sent, dtype, base):
    """The paper's formulas in float64, in NumPy. `sent` holds values of `dtype`, exactly."""
    update = sent.astype(np.float64)
    if given == "model":
        update = update - as_client_saw(base, dtype)
    elif given == "gradient":
        update = -update * SCALE
    if wanted == "gradient":
        return -update / SCALE
    if wanted == "model":
        return base + update
    return update


def sent_by(rng, dtype, size):
    """A client's array, as the engine reads it, and its values."""
    whole = awkward(rng, size).astype(np.float32)
    whole[~(np.abs(whole) < 6e4)] = 1.5  # within float16
    if dtype == "bfloat16":
        array = buffer(dtype, whole)
        return array, values(array)
    array = whole.astype(dtype)
    if dtype == "float64":
        array += rng.standard_normal(size) * 1e-9  # more bits than float32 has
    return array, array


@pairwise(
    ("pair", "dtype", "base_dtype", "slot_dtype"),
    PAIRS,
    SENT,
    ("float32", "float64"),
    ("float32", "float64", "bfloat16"),
)
@pytest.mark.parametrize("size", SIZES)
def test_the_bits_of_converting_first(isa, pair, dtype, base_dtype, slot_dtype, size):
    rng = np.random.default_rng(size)
    base = awkward(rng, size).astype(base_dtype)
    array, sent = sent_by(rng, dtype, size)
    with np.errstate(all="ignore"):
        expected = rounded(converted(*pair, sent, dtype, base), slot_dtype)
    for threads in THREADS:
        slot = empty(slot_dtype, size)
        facts = ops.ingest(array, slot, num_threads=threads, conversion=ops.Conversion(*pair, base, SCALE))
        assert bits(values(slot)) == bits(expected)
        plain = empty(slot_dtype, size)
        assert facts == ops.ingest(expected, plain)


@pytest.mark.parametrize(("given", "wanted"), [("model", "update"), ("update", "model")])
def test_a_difference_of_float32_is_that_of_numpy(isa, rng, given, wanted):
    """Rounding the float64 result is float32 arithmetic, also where exponents differ by more than float64 can hold."""
    sent, base = (np.ldexp(1 + rng.random(4096), rng.integers(-149, 127, 4096)).astype(np.float32) for _ in range(2))
    sent[::2] = base[::2] * np.float32(1 + 2**-22)
    sent[1::4] *= np.float32(-1)
    slot = np.empty(4096, np.float32)
    ops.ingest(sent, slot, conversion=ops.Conversion(given, wanted, base))
    assert bits(slot) == bits(sent - base if wanted == "update" else base + sent)
    wide = np.empty(4096)
    ops.ingest(sent, wide, conversion=ops.Conversion(given, wanted, base))  # a float64 slot has the float64 result
    assert bits(wide) == bits(sent - base.astype(np.float64) if wanted == "update" else base + sent.astype(np.float64))


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_of_many_types_lie_apart(isa, pair):
    """Each part meets the piece of the base that belongs to it, rounded to the part's own dtype."""
    rng = np.random.default_rng(5)
    sizes = (3, 1, 2000, 0, 517, 4096)
    base = awkward(rng, sum(sizes)).astype(np.float32)
    arrays, expected, begin = [], [], 0
    for at, size in enumerate(sizes):
        dtype = SENT[at % len(SENT)]
        array, sent = sent_by(rng, dtype, size)
        arrays.append(array)
        with np.errstate(all="ignore"):
            piece = converted(*pair, sent, dtype, base[begin : begin + size])
            expected.append(rounded(piece, "float32"))
        begin += size
    slot = np.empty(begin, np.float32)
    ops.ingest(arrays, slot, conversion=ops.Conversion(*pair, base, SCALE))
    assert bits(slot) == bits(np.concatenate(expected))


def test_all_of_float16_as_a_client_sees_it(isa):
    """Every border of rounding to float16: what is left of the base is what the client could not see of it."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    up, middle = np.nextafter(halves, np.float32(np.inf)), (halves[:-1] + halves[1:]) / 2
    base = np.concatenate([halves, up, middle, np.nextafter(middle, np.float32(np.inf)), -middle, [65519.0, 7e-8]])
    base = base.astype(np.float32)
    slot = np.empty(base.size, np.float32)
    ops.ingest(np.zeros(base.size, np.float16), slot, conversion=ops.Conversion("model", "update", base))
    assert bits(slot) == bits(np.float32(0) - base.astype(np.float16).astype(np.float32))


def test_a_base_beyond_float16_is_infinite_for_the_client(isa):
    base = np.array([65520.0, 1e30, -7e4], np.float32)
    slot = np.empty(3, np.float32)
    facts = ops.ingest(np.zeros(3, np.float16), slot, conversion=ops.Conversion("model", "update", base))
    assert slot.tolist() == [-np.inf, -np.inf, np.inf]
    assert facts.first_nonfinite == 0


def test_no_conversion_between_equal_kinds(isa):
    slot = np.empty(2, np.float32)
    for kind in KINDS:
        ops.ingest(np.array([1.5, 2.5]), slot, conversion=ops.Conversion(kind, kind))
        assert slot.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        (ops.Conversion("model", "update"), r"base has 0 elements, expected 3"),
        (ops.Conversion("model", "update", np.ones(2, np.float32)), r"base has 2 elements, expected 3"),
        (ops.Conversion("update", "model", np.ones(3, np.float16)), r"base is float16, expected float32 or float64"),
        (ops.Conversion("update", "gradient", scale=0.0), r"scale is 0.0+, must be positive"),
        (ops.Conversion("gradient", "update", scale=-1.0), r"scale is -1.0+, must be positive"),
        (ops.Conversion("gradient", "update", scale=np.nan), r"scale is not finite"),
        (("model", "nothing", None, 1.0), r"conversion names 'nothing', expected update, gradient or model"),
        (("model", "update"), r"conversion is no afflux.ops.Conversion"),
        ("model", r"conversion is no afflux.ops.Conversion"),
    ],
)
def test_errors_leave_the_slot(conversion, message):
    slot = np.full(3, 7.0, np.float32)
    check_error(rf"\[ingest\] {message}", ops.ingest, np.ones(3, np.float32), slot, conversion=conversion)
    assert slot.tolist() == [7.0] * 3


def test_the_slot_is_not_the_base():
    slot = np.full(3, 7.0, np.float32)
    check_error("overlap", ops.ingest, np.ones(3, np.float32), slot, conversion=ops.Conversion("update", "model", slot))


def test_a_buffer_as_the_base():
    """The server's versions are buffers of the engine's."""
    base = _engine.Buffer(_engine.Pool(2, "float32", 1))
    np.asarray(base)[:] = [1.0, 2.0]
    slot = np.empty(2, np.float32)
    ops.ingest(np.array([5.0, 5.0]), slot, conversion=ops.Conversion("model", "update", base))
    assert slot.tolist() == [4.0, 3.0]
