"""A GPU gives the CPU's bits; where there is none, the kernels' bodies do, run on the host (emulated.py)."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import permutations

import numpy as np
import pytest

import builds
from afflux import UnavailableError, _engine, ops
from afflux.ops import codecs
from afflux.ops.codecs import ROUNDING
from afflux.rules import RULES
from afflux.selftest import digest
from builds import run
from conftest import ROOT, bits, check_error, found
from device import BACKEND, emulated, get, needs_device, on_host, put
from pairwise import soak, soak_all

GOLDEN = digest.golden()
#: Test files that are run with every server on the emulated device, by the library of its params. Servers in processes
#: of their own, which crashes.py and faults.py end, are not among them: their arrays do not come from here, and their
#: commits are the same.
SUITES = [("cupy", "server store_commits noise_rules --deselect=test_noise_rules.py::test_no_nonce_comes_twice")]
MORE_SUITES = [
    ("torch", "passes store_commits"),
    ("cupy", "log coded_rounds store --deselect=test_coded_rounds.py::test_the_sum_keeps_its_promise"),
    ("torch", "server streaming store_errors store_layout"),
]
#: With rows in pinned memory of the host.
ON_HOST = [("cupy", "log")]
MORE_ON_HOST = [("torch", "coded_rounds --deselect=test_coded_rounds.py::test_the_sum_keeps_its_promise")]
# Ends of blocks and superblocks of the order, and of what a thread, a warp and a block of threads take.
SIZES = [1, 3, 130, 1024, 2047, 2049, 65536, 65537, 140_003]
#: The kernels of `inner` are for up to 4, 10, 16 vectors of one type, and for more.
INNER = [
    (1, "float64"),
    (4, "bfloat16"),
    (7, "float32"),
    (10, "float64"),
    (16, "float32"),
    (17, "bfloat16"),
    (35, "float32"),
]
STORED = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


def made(rng, size, dtype="float32", shift=0):
    """Values of many sizes, at an address that is `shift` elements off a multiple of 64."""
    wide = rng.standard_normal(size) * np.exp2(rng.integers(-20, 12, size))
    kind = STORED[dtype]
    item = np.dtype(kind).itemsize
    room = np.empty(size * item + 192, np.uint8)
    begin = -room.ctypes.data % 64 + shift * item
    out = room[begin : begin + size * item].view(kind)
    out[:] = (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else wide
    return out


def host(array, dtype):
    """It, or for bfloat16, which NumPy lacks, a copy."""
    if dtype != "bfloat16":
        return array
    buffer = _engine.Buffer(_engine.Pool(array.size, "bfloat16", 1))
    np.asarray(buffer)[:] = array
    return buffer


@needs_device
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("to", ["float32", "float64", "bfloat16"])
def test_ingest(size, to, shift):
    rng = np.random.default_rng(size)
    for kind in STORED:
        update, slot = made(rng, size, kind, shift), made(rng, size, to, shift)
        if size > 3:
            update[size // 3] = 0x7F80 if kind == "bfloat16" else np.inf
        mine, theirs = host(slot, to), put(slot, to)
        with on_host():
            expected = ops.ingest(host(update, kind), mine)
        assert ops.ingest(put(update, kind), theirs) == expected
        assert bits(get(theirs, slot.dtype)) == bits(np.asarray(mine))


@needs_device
def test_ingest_of_parts():
    rng = np.random.default_rng(0)
    sizes, kinds = [1, 70_001, 0, 4096, 63, 66_000], ["float32", "float64", "float16", "bfloat16", "float32", "float32"]
    parts = [made(rng, size, kind) for size, kind in zip(sizes, kinds, strict=True)]
    slot = np.empty(sum(sizes), np.float32)
    theirs = put(slot)
    with on_host():
        expected = ops.ingest([host(part, kind) for part, kind in zip(parts, kinds, strict=True)], slot)
    assert ops.ingest([put(part, kind) for part, kind in zip(parts, kinds, strict=True)], theirs) == expected
    assert bits(get(theirs, np.float32)) == bits(slot)


#: Elements of float32 that go through four pieces of memory (engine/cuda/pieces.hpp), more than a call has.
PIECES = 4 * 2**19 + 70_001


def from_host(parts, slot, to, conversion=None):
    """Parts on the host into a slot on the GPU: what the same gives on the CPU."""
    mine, theirs = host(slot, to), put(slot, to)
    base = None if conversion is None else conversion.base
    with on_host():
        expected = ops.ingest(parts, mine, conversion=conversion)
        moved = None if base is None else conversion._replace(base=put(base))
        assert ops.ingest(parts, theirs, num_threads=2, conversion=moved or conversion) == expected
    assert bits(get(theirs, slot.dtype)) == bits(np.asarray(mine))
    return expected


@needs_device
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("to", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2049, 140_003])
def test_ingest_from_the_host(size, to, kind):
    """Memory that the GPU reads itself, as the emulated one does at some addresses, and other memory."""
    rng = np.random.default_rng(size)
    item = np.dtype(STORED[kind]).itemsize
    for shift in (0, 1, 64 // item, 128 // item):
        update = made(rng, size, kind, shift)
        if shift > 1:
            update[size // 3] = 0x7F80 if kind == "bfloat16" else np.inf
        from_host(host(update, kind), made(rng, size, to, shift % 2), to)


@needs_device
def test_ingest_from_the_host_in_pieces():
    """Pieces are used again when the GPU has read them; the first value that is not finite is in the fourth."""
    rng = np.random.default_rng(0)
    update = np.empty(PIECES + 48, np.float32)
    for line in range(3):  # one of them begins where the emulated GPU reads itself
        part = update[16 * line :][:PIECES]
        part[:] = rng.standard_normal(PIECES)
        assert from_host(part, np.empty(PIECES, np.float32), "float32").first_nonfinite is None
    part[PIECES - 5] = -np.inf
    assert from_host(part, np.empty(PIECES, np.float32), "float32").first_nonfinite == PIECES - 5


@needs_device
def test_ingest_from_the_host_of_parts():
    """Neighbours of one type become one part; 60,000 parts of two types, and their list, are more than a piece."""
    rng = np.random.default_rng(0)
    kinds = ["float32", "float64", "float16", "bfloat16", "float32", "float32"]
    parts = [made(rng, size, kind) for size, kind in zip([1, 70_001, 0, 4096, 63, 66_000], kinds, strict=True)]
    many = [np.full(1, i, ("float32", "float64")[i % 2]) for i in range(60_000)]
    for some, others in (([], []), ([], many), ([made(rng, 700_000)], many)):
        laid = [*some, *(host(part, kind) for part, kind in zip(parts, kinds, strict=True)), *others]
        slot = np.empty(sum(np.asarray(part).size for part in laid), np.float32)
        from_host(laid, slot, "float32")


@needs_device
@pytest.mark.parametrize("base", ["float32", "float64"])
def test_ingest_from_the_host_with_a_conversion(base):
    """The base is on the GPU."""
    rng = np.random.default_rng(1)
    sizes, kinds = [100_000, 30_000, 10_003], ["float32", "bfloat16", "float64"]
    parts = [host(made(rng, size, kind), kind) for size, kind in zip(sizes, kinds, strict=True)]
    params = rng.standard_normal(sum(sizes)).astype(base)
    for given, wanted in permutations(("update", "gradient", "model"), 2):
        for to in ("float32", "float64", "bfloat16"):
            from_host(parts, made(rng, sum(sizes), to), to, ops.Conversion(given, wanted, params, 0.3))


@needs_device
def test_ingest_from_the_host_by_many_threads():
    """More calls than there are pieces for: some have fewer, or wait."""
    rng = np.random.default_rng(2)
    updates = [rng.standard_normal(PIECES).astype(np.float32) for _ in range(3)]
    slots = [put(np.zeros(PIECES, np.float32)) for _ in range(9)]
    with on_host(), ThreadPoolExecutor(9) as pool:
        facts = list(pool.map(ops.ingest, updates * 3, slots))
        assert facts == [ops.ingest(update, np.empty_like(update)) for update in updates] * 3
    for update, slot in zip(updates * 3, slots, strict=True):
        assert bits(get(slot, np.float32)) == bits(update)


@needs_device
def test_parts_on_a_gpu_are_refused():
    parts = ops.Parts([put(np.ones(2, np.float32))], np.array([0, 2]))
    check_error(r"vectors\[0\] is in parts on cuda:\d+: on a GPU, ingest", ops.gram, [parts], error=UnavailableError)


@needs_device
def test_the_limit_of_updates_is_for_rounds_that_replace_nothing():
    vector, out, update, held = (put(np.ones(3, np.float32)) for _ in range(4))
    combine, vectors = ops.Combine([update], np.ones(1), most=1.0), ops.RuleVectors([held], np.ones(1))
    text = r"\[apply\] combine.most on a GPU is for rounds without cached rows and"
    round = ops.Pass(vector, out, combine, rule_vectors=vectors)
    check_error(text, ops.apply, round, error=UnavailableError)


@needs_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("base", ["float32", "float64"])
@pytest.mark.parametrize("to", ["float32", "float64", "bfloat16"])
def test_ingest_with_a_conversion(size, base, to):
    """Every conversion of parts of every dtype, cut so that some columns lie in one part and some in two."""
    rng = np.random.default_rng(size)
    cuts = sorted({0, size // 3, size // 3 * 2 + 1, size} & set(range(size + 1)))
    params = rng.standard_normal(size).astype(base)
    for first, kind in enumerate(STORED):
        kinds = [kind, "float32", list(STORED)[first - 1]]
        parts = [(made(rng, e - b, k), k) for b, e, k in zip(cuts, cuts[1:], kinds, strict=False)]
        for given, wanted in permutations(("update", "gradient", "model"), 2):
            slot = made(rng, size, to)
            mine, theirs = host(slot, to), put(slot, to)
            with on_host():
                how = ops.Conversion(given, wanted, params, 0.3)
                expected = ops.ingest([host(part, k) for part, k in parts], mine, conversion=how)
            how = ops.Conversion(given, wanted, put(params), 0.3)
            assert ops.ingest([put(part, k) for part, k in parts], theirs, conversion=how) == expected
            assert bits(get(theirs, slot.dtype)) == bits(np.asarray(mine))


@needs_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kinds", [["float32"] * 7, ["float64"] * 2, ["bfloat16"] * 4, [*STORED][::3] * 3], ids=len)
def test_gram(size, kinds):
    rng = np.random.default_rng(size)
    vectors = [made(rng, size, kind, 1) for kind in kinds]
    with on_host():
        expected = ops.gram([host(vector, kind) for vector, kind in zip(vectors, kinds, strict=True)])
    assert bits(ops.gram([put(vector, kind) for vector, kind in zip(vectors, kinds, strict=True)])) == bits(expected)


@needs_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kinds",
    [*([kind] * n for n, kind in INNER), [*STORED][::3] * 3],
    ids=len,
)
def test_inner(size, kinds):
    rng = np.random.default_rng(size)
    vectors = [made(rng, size, kind, 1) for kind in kinds]
    mine = [host(vector, kind) for vector, kind in zip(vectors, kinds, strict=True)]
    theirs = [put(vector, kind) for vector, kind in zip(vectors, kinds, strict=True)]
    memory, weights = made(rng, size, kinds[0]), rng.standard_normal(len(kinds))
    weights[-1] = 0.0
    for some, shift, own in [(weights, 0.3, 0.0), (weights, 0.0, -1.5), (None, 0.7, 0.0), (weights, 0.1, 0.2)]:
        with on_host():
            expected = ops.inner(mine, some, memory=host(memory, kinds[0]), shift=shift, memory_weight=own)
        found = ops.inner(theirs, some, memory=put(memory, kinds[0]), shift=shift, memory_weight=own)
        assert [bits(np.asarray(value)) for value in found] == [bits(np.asarray(value)) for value in expected]


@needs_device
def test_gram_of_more_than_a_panel():
    vectors = [made(np.random.default_rng(k), 500) for k in range(67)]
    with on_host():
        expected = ops.gram(vectors)
    assert bits(ops.gram([put(vector) for vector in vectors])) == bits(expected)


@needs_device
@pytest.mark.parametrize("codec", [codecs.float32, *ROUNDING], ids=lambda codec: codec.name)
@pytest.mark.parametrize("size", SIZES)
def test_encode_and_decode(size, codec):
    x = made(np.random.default_rng(size), size, shift=size % 3)
    facts = ops.RowFacts(size, float(x.min()), float(x.max()))
    row, out = np.full(codec.row_bytes(size), 0xA5, np.uint8), np.empty_like(x)
    their_row, their_out = put(row), put(out)
    with on_host():
        ops.encode(x, row, codec=codec, facts=facts)
        ops.decode(row, out, codec=codec)
    ops.encode(put(x), their_row, codec=codec, facts=facts)
    ops.decode(their_row, their_out, codec=codec)
    assert bits(get(their_row, np.uint8)) == bits(row)
    assert bits(get(their_out, np.float32)) == bits(out)


@needs_device
@pytest.mark.parametrize("codec", [codecs.float16, codecs.bfloat16], ids=lambda codec: codec.name)
def test_every_half_and_every_border_of_rounding(codec):
    """A GPU converts by instructions of its own."""
    halves, widened = np.arange(2**16, dtype=np.uint16).view(np.uint8), np.empty(2**16, np.float32)
    their_widened = put(widened)
    with on_host():
        ops.decode(halves, widened, codec=codec)
    ops.decode(put(halves), their_widened, codec=codec)
    assert bits(get(their_widened, np.float32)) == bits(widened)
    #: The bits of a float32 between two float16 or bfloat16, and beside it.
    offsets = [near + beside for near in (0, 0x1000, 0x8000) for beside in (-1, 0, 1)]
    every = widened.view(np.int32).astype(np.int64)
    assert_encodes_alike(
        codec, np.concatenate([(every + offset).astype(np.uint32) for offset in offsets]).view(np.float32)
    )


@needs_device
@pytest.mark.parametrize("codec", [codec for codec in ROUNDING if codec.name.startswith("affine")], ids=repr)
def test_grids_of_every_size(codec):
    """The reciprocal of a step on a GPU is that of the CPU for any exponent and any fraction."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4096, 128)).astype(np.float32)
    assert_encodes_alike(codec, np.ldexp(x, rng.integers(-140, 124, (4096, 1))).astype(np.float32).ravel())


@needs_device
@pytest.mark.parametrize("codec", [codecs.affine(bits) for bits in (8, 4, 2, 1)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("size", [3, 130])
def test_a_short_run_beyond_the_first_point_of_its_grid(codec, size):
    """The least element follows a short run. Its code is not 0 if it is above 2^126, the largest first point."""
    assert_encodes_alike(codec, np.linspace(1.5e38, 2e38, size, dtype=np.float32))


def assert_encodes_alike(codec, x):
    row = np.full(codec.row_bytes(x.size), 0xA5, np.uint8)
    their_row, facts = put(row), ops.RowFacts(11, -1.0, 2.0)
    with on_host():
        ops.encode(x, row, codec=codec, facts=facts)
    ops.encode(put(x), their_row, codec=codec, facts=facts)
    assert bits(get(their_row, np.uint8)) == bits(row)


def drawn_round(rng, codec):
    """Arrays by name and a function that makes the round of them: any combination of stages."""
    size, shift = int(rng.choice(SIZES)), int(rng.integers(0, 2))
    wide, kind = rng.choice(["float32", "float64"]), rng.choice(["float32", "float64", "bfloat16"])
    if codec is codecs.float32 and kind == "float64":
        codec = codecs.float64
    count, held = int(rng.integers(0, 7)), int(rng.integers(0, 5))
    arrays = {"params": (made(rng, size, wide, shift), wide), "out": (made(rng, size, wide, shift), wide)}
    arrays |= {f"update{i}": (made(rng, size, kind, shift), kind) for i in range(count)}
    arrays |= {f"held{i}": (made(rng, size, wide, shift), wide) for i in range(held)}
    arrays |= {f"state{i}": (np.abs(made(rng, size, wide, shift)), wide) for i in range(3)}
    arrays |= {f"more{i}": (made(rng, size, wide, shift), wide) for i in range(7)}
    arrays |= {name: (made(rng, size, "float64", shift), "float64") for name in ("sum", "sum_out")}
    if codec is not None:
        for i in range(2 * count):
            row = made(rng, size, codec.name, shift).view(np.uint8) if codec.name in STORED else None
            row = np.empty(codec.row_bytes(size), np.uint8) if row is None else row
            x = made(rng, size, "float64" if codec is codecs.float64 else "float32")
            with on_host():
                ops.encode(x, row, codec=codec, facts=ops.RowFacts(i, float(x.min()), float(x.max())))
            arrays[f"row{i}"] = (row, "uint8")
    weights = rng.standard_normal(count) * (rng.random(count) < 0.8)
    following = rng.standard_normal((held, held + count)) * (rng.random((held, held + count)) < 0.7)
    if held:
        following[-1] = np.eye(held, held + count, held - 1)[0] if rng.random() < 0.5 else following[-1]
    memory = rng.standard_normal(held), following if rng.random() < 0.7 else None, rng.random() < 0.5
    kind, states = list(_engine.STEP_KINDS.items())[rng.integers(0, len(_engine.STEP_KINDS))]
    step = ops.Step(kind, 0.1, 0.9, 0.99, 1e-3, 1.25)
    elsewhere, params_weight = rng.random() < 0.5, float(rng.choice([0.0, -0.7]))
    kept, missing = rng.random(count) < 0.7, rng.random(count) < 0.3
    cache, quantize = rng.choice([0, 1]), bool(codec is not None and not codec.exact and rng.random() < 0.5)

    def make(a):
        updates = [a[f"update{i}"] for i in range(count)]
        vectors = [a[f"held{i}"] for i in range(held)]
        weigh, follow, apart = memory
        outs = [a[f"more{i}"] for i in range(held)] if apart and follow is not None else ()
        stage = None
        if codec is not None:
            facts = [ops.RowFacts(100 + i, -1.0, 2.0) for i in range(count)]
            rows = [None if missing[i] else a[f"row{i}"] for i in range(count)]
            new_rows = [(a[f"row{i}"] if i % 2 else a[f"row{count + i}"]) if kept[i] else None for i in range(count)]
            kind_of = ops.CachedMean if cache else ops.CachedDifference
            total = a["sum_out"] if elsewhere else None
            stage = kind_of(a["sum"], 11, rows, new_rows, codec, facts, quantize and not cache, total)
        olds = [a[f"state{i}"] for i in range(states)]
        news = [a[f"more{4 + i}"] for i in range(states)] if elsewhere else ()
        mix = ops.Combine(updates, weights, params_weight)
        return ops.Pass(
            a["params"], a["out"], mix, stage, step, olds, ops.RuleVectors(vectors, weigh, follow, outs), news
        )

    return arrays, make


@needs_device
@pytest.mark.parametrize("codec", [None, codecs.float32, *ROUNDING], ids=lambda codec: codec and codec.name)
def test_apply(codec):
    rng = np.random.default_rng(ROUNDING.index(codec) if codec in ROUNDING else 99)
    for _ in range((12 if codec in ROUNDING else 60) // (1 if emulated is None else 3)):
        assert_applies_alike(*drawn_round(rng, codec))


def assert_applies_alike(arrays, make):
    mine = {name: host(array, kind) for name, (array, kind) in arrays.items()}
    theirs = {name: put(array, kind) for name, (array, kind) in arrays.items()}  # before any is overwritten
    with on_host():
        ops.apply(make(mine))
    ops.apply(make(theirs))
    for name, (array, _) in arrays.items():
        assert bits(get(theirs[name], array.dtype)) == bits(np.asarray(mine[name])), name


@needs_device
def test_an_update_without_weight_is_not_in_the_direction():
    """Not even by a value that is not finite, though its row is replaced."""
    arrays = {name: (np.full(2048, x, np.float32), "float32") for name, x in (("params", 1), ("out", 0), ("u", np.inf))}
    arrays |= {"sum": (np.ones(2048), "float64"), "row": (np.zeros(4096, np.uint8), "uint8")}

    def make(a):
        stage = ops.CachedDifference(a["sum"], 11, [None], [a["row"]], codecs.float16, [ops.RowFacts(0)], False, None)
        return ops.Pass(a["params"], a["out"], ops.Combine([a["u"]], np.zeros(1)), stage, ops.Step("assign"))

    assert_applies_alike(arrays, make)


@needs_device
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 3, 15, 70, 80])
def test_apply_of_any_step_to_a_sum(count, kind):
    """Each step has a kernel for up to 64 vectors whose weights are not 0; longer lists are in the GPU's memory."""
    rng = np.random.default_rng(count)
    for at, (name, states) in enumerate(_engine.STEP_KINDS.items()):
        size, wide, shift = SIZES[1 + at % 5], ("float32", "float64")[at % 2], at // 2 % 2
        arrays = {name: (np.abs(made(rng, size, wide, shift)), wide) for name in ("params", "out", "m", "v", "v_hat")}
        arrays |= {f"update{k}": (made(rng, size, kind, shift), kind) for k in range(count)}
        weights = rng.standard_normal(count) * (np.arange(count) % 8 != 5) if count > 64 or at % 2 else np.ones(count)
        mine = {name: host(array, type) for name, (array, type) in arrays.items()}
        theirs = {name: put(array, type) for name, (array, type) in arrays.items()}
        for memory, place in ((mine, on_host), (theirs, nullcontext)):
            combine = ops.Combine([memory[f"update{k}"] for k in range(count)], weights, 0.7 * (at % 2))
            held = [memory[name] for name in ("m", "v", "v_hat")[:states]]
            with place():
                step = ops.Step(name, 0.1, 0.9, 0.99, 1e-3, 1.25)
                ops.apply(ops.Pass(memory["params"], memory["out"], combine, step=step, states=held))
        for name, (array, _) in arrays.items():
            assert bits(get(theirs[name], array.dtype)) == bits(np.asarray(mine[name])), name


@needs_device
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("becomes", ["nothing", "itself", "a copy", "a sum in place", "a sum elsewhere"])
@pytest.mark.parametrize("count", [0, 9, 70])
def test_apply_with_one_rule_vector(count, becomes, kind):
    """A step without states has a kernel for it, up to 64 updates that have a weight in the direction or in its sum."""
    rng = np.random.default_rng(count)
    for at, step in enumerate(("sgd", "assign", "momentum")):
        size, wide, shift = SIZES[1 + at], ("float32", "float64")[at % 2], at // 2
        arrays = {name: (made(rng, size, wide, shift), wide) for name in ("params", "out", "held", "other", "m")}
        arrays |= {f"update{k}": (made(rng, size, kind, shift), kind) for k in range(count)}
        weights, follow = (rng.standard_normal(count) * (np.arange(count) % 3 != left) for left in (0, 1))
        follow = np.array([[0.5 * (at != 1), *follow]]) if "sum" in becomes else np.eye(1, 1 + count)
        mine = {name: host(array, type) for name, (array, type) in arrays.items()}
        theirs = {name: put(array, type) for name, (array, type) in arrays.items()}
        for memory, place in ((mine, on_host), (theirs, nullcontext)):
            combine = ops.Combine([memory[f"update{k}"] for k in range(count)], weights, 0.7 * (at % 2))
            outs = [memory["other"]] if becomes in ("a copy", "a sum elsewhere") else ()
            given = None if becomes == "nothing" else follow
            vector = ops.RuleVectors([memory["held"]], np.array([-0.3 * (at != 2)]), given, outs)
            states = [memory["m"]] * (step == "momentum")
            with place():
                kind_of = ops.Step(step, 0.1, 0.9)
                ops.apply(ops.Pass(memory["params"], memory["out"], combine, None, kind_of, states, vector))
        for name, (array, _) in arrays.items():
            assert bits(get(theirs[name], array.dtype)) == bits(np.asarray(mine[name])), name


@needs_device
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 10, 70])
def test_apply_of_a_trimmed_mean(count, kind):
    """With and without rule vectors, whose new values are untrimmed; many values are equal."""
    rng = np.random.default_rng(count)
    for at, (step, states) in enumerate((("sgd", 0), ("momentum", 1), ("adam", 2), ("assign", 0))):
        size, wide, shift = SIZES[1 + at], ("float32", "float64")[at % 2], at // 2
        arrays = {name: (np.abs(made(rng, size, wide, shift)), wide) for name in ("params", "out", "held", "m", "v")}
        arrays |= {f"update{k}": (np.round(made(rng, size, kind, shift), k % 3), kind) for k in range(count)}
        weights = rng.integers(0, 4, count) / 5 if at % 2 else np.ones(count)
        mine = {name: host(array, type) for name, (array, type) in arrays.items()}
        theirs = {name: put(array, type) for name, (array, type) in arrays.items()}
        for memory, place in ((mine, on_host), (theirs, nullcontext)):
            updates, held = [memory[f"update{k}"] for k in range(count)], None
            if at > 1:
                held = ops.RuleVectors([memory["held"]], np.array([0.3]), np.full((1, 1 + count), 0.1))
            kind_of, kept = ops.Step(step, 0.1, 0.9, 0.99, 1e-3), [memory[name] for name in ("m", "v")[:states]]
            combine = ops.Combine(updates, weights, 0.7 * (at % 2), trim=(0.2, 0.5, 0.1, 1 / 7)[at])
            with place():
                ops.apply(ops.Pass(memory["params"], memory["out"], combine, None, kind_of, kept, held))
        for name, (array, _) in arrays.items():
            assert bits(get(theirs[name], array.dtype)) == bits(np.asarray(mine[name])), name


#: Sizes, and the index of element 0 in the whole vector. A block of threads draws 1 or 2 groups of 512 normals.
NOISY = [(1, 0), (3, 510), (511, 1), (513, 512), (2047, 512 * 7 + 4), (5001, 2**32 // 48 * 512 - 5001), (65_537, 1022)]


@needs_device
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("trim", [0.0, 0.2])
@pytest.mark.parametrize("count", [0, 1, 10, 70])
def test_apply_with_noise(count, trim, kind):
    """The first group of a vector, and the four elements of a thread, may begin before element 0."""
    rng = np.random.default_rng(count)
    for at, (size, first) in enumerate(NOISY[: 6 if trim and count == 70 else 7]):
        wide, shift, held = ("float32", "float64")[at % 2], at // 4, at % 3
        kind_of, states = list(_engine.STEP_KINDS.items())[at]
        arrays = {name: (np.abs(made(rng, size, wide, shift)), wide) for name in ("params", "out", "0", "1", "2")}
        arrays |= {f"held{s}": (made(rng, size, wide, shift), wide) for s in range(held)}
        arrays |= {f"update{k}": (made(rng, size, kind, shift), kind) for k in range(count)}
        step = ops.Step(kind_of, 0.1, 0.9, 0.99, 1e-3)
        numbers = rng.random(count), rng.random(held), rng.standard_normal((held, held + count))
        if held == 2:
            numbers[2][0] = np.eye(1, held + count)  # it is 1 at the vector itself
        noise = ops.Noise(0.3 * (at != 1), rng.bytes(32), rng.bytes(12), first, rng.standard_normal(held))
        assert_applies_alike(arrays, partial(noisy_round, step, [*"012"[:states]], noise, trim, *numbers))


def noisy_round(step, states, noise, trim, weights, coefficients, following, arrays):
    updates = [arrays[f"update{k}"] for k in range(len(weights))]
    vectors = [arrays[f"held{s}"] for s in range(len(coefficients))]
    combine = ops.Combine(updates, weights, 0.7, trim=trim, noise=noise)
    held = ops.RuleVectors(vectors, coefficients, following)
    states = [arrays[name] for name in states]
    return ops.Pass(arrays["params"], arrays["out"], combine, None, step, states, held)


@needs_device
@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_apply_tells_whether_the_direction_was_finite(value):
    update, done = np.ones(5000, np.float32), []
    update[4999] = value
    params = np.zeros(5000, np.float32)
    ops.apply(ops.Pass(put(params), put(params), ops.Combine([put(update)], np.ones(1))), done=done)
    assert done == [bool(np.isfinite(value))]


@needs_device
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_apply_tells_whether_the_updates_are_within_their_limit(kind):
    """Each element, though the direction is 0; not those of an update without a weight."""
    values = np.zeros(5000, np.float32)
    values[[7, 4999]] = 5.0, -5.0
    raw = [(v.view(np.uint32) >> 16 if kind == "bfloat16" else v).astype(STORED[kind]) for v in (values, -values)]
    pair = [put(array, kind) for array in raw]
    params = put(np.zeros(5000, np.float32))
    for weight, most in ((0.5, 5.0), (0.5, 4.0), (0.0, 4.0)):
        done = []
        combine = ops.Combine(pair, np.full(2, weight), most=most)
        ops.apply(ops.Pass(params, params, combine), done=done)
        assert done == [weight == 0 or most == 5.0]


@needs_device
def test_what_lies_elsewhere_is_refused():
    x = np.ones(5, np.float32)
    with on_host():
        check_error(r"updates\[0\] is on the CPU", ops.apply, ops.Pass(put(x), put(x), ops.Combine([x], np.ones(1))))
        with pytest.raises(UnavailableError, match=r"\[apply\] weights is on cuda:0, expected the CPU"):
            ops.apply(ops.Pass(put(x), put(x), ops.Combine([put(x)], put(np.ones(1)))))
        check_error(r"\[ingest\] slot is on the CPU, update is on cuda:0", ops.ingest, put(x), x)
        slot, base = put(np.ones(10, np.float32)), np.ones(10, np.float32)
        check_error(r"\[ingest\] update\[1\] is on cuda:0, expected the CPU", ops.ingest, [x, put(x)], slot)
        check_error(r"\[ingest\] update\[1\] is on the CPU, update\[0\] is on cuda:0", ops.ingest, [put(x), x], slot)
        how = ops.Conversion("model", "update", base)
        check_error(r"\[ingest\] slot is on cuda:0, base is on the CPU", ops.ingest, [x, x], slot, conversion=how)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of processes in which the device is emulated."""
    if builds.CMAKE is None:
        pytest.skip("cmake is not installed")
    (engine,) = builds.engine(tmp_path_factory).glob("csrc/_engine_emulated*.so")
    modules = {found(name).parent for name in ("emulated.py", "crashes.py", "conftest.py", "pairwise.py")}
    outer = os.environ.get("PYTHONPATH", "")
    paths = filter(None, (str(ROOT / "python"), *map(str, sorted(modules)), outer))
    return {"AFFLUX_EMULATED": str(engine), "PYTHONPATH": os.pathsep.join(paths)}


def suites(env, plugin, selection):
    """Runs test files, by their names without test_; "--deselect=FILE::TEST" leaves one out."""

    def argument(name):
        if not name.startswith("--deselect="):
            return str(found(f"test_{name}.py"))
        file, _, test = name.removeprefix("--deselect=").partition("::")
        return f"--deselect={found(file).relative_to(ROOT)}::{test}"

    options = ["-q", f"--rootdir={ROOT}", "-p", plugin, "-p", "no:cacheprovider"]
    return run(sys.executable, "-m", "pytest", *options, *map(argument, selection.split()), **env)


@pytest.mark.skipif(emulated is not None, reason="within an emulated process")
class TestEmulated:
    def test_every_operation_gives_the_bits_of_the_cpu(self, environment):
        told = json.loads(run(sys.executable, found("emulated.py"), **environment))
        apart = ["statistics", *RULES]  # statistics are on the host
        assert told == {name: value for name, value in GOLDEN.items() if name not in apart}

    @pytest.mark.parametrize("arrays", ["cupy", *soak("torch")])
    def test_every_rule_does(self, environment, arrays):
        told = json.loads(run(sys.executable, found("gpu_servers.py"), **environment, AFFLUX_ARRAYS=arrays))
        assert told == {name: GOLDEN[name] for name in RULES}

    @pytest.mark.parametrize("selection", ["cuda gpu_server gpu_rows", *soak("bench_cuda")])
    def test_every_size_and_combination_does(self, environment, selection):
        assert "passed" in suites(environment, "emulated", selection)

    @pytest.mark.parametrize(("arrays", "selection"), [*SUITES, *soak_all(MORE_SUITES)])
    def test_the_suites_of_servers_and_of_the_store_pass_there(self, environment, arrays, selection):
        assert "passed" in suites(environment | {"AFFLUX_ARRAYS": arrays}, "gpu_servers", selection)

    @pytest.mark.parametrize(("arrays", "selection"), [*ON_HOST, *soak_all(MORE_ON_HOST)])
    def test_so_they_do_with_rows_on_the_host(self, environment, arrays, selection):
        apart = {"AFFLUX_ARRAYS": arrays, "AFFLUX_ROWS_ON": "host"}
        assert "passed" in suites(environment | apart, "gpu_servers", selection)


def test_the_backend_is_listed():
    """It serves the vectors that are on a GPU, so no call chooses it."""
    assert (BACKEND.device, BACKEND.chosen) == ("cuda", False)
    assert BACKEND.runs == (BACKEND.why_not == "")
    assert BACKEND.compiled or BACKEND.why_not == "this build has no CUDA kernels"
