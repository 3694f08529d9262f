"""Vectors in parts: the bits of flat ones, and what is refused."""

from itertools import pairwise as neighbours

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import AffluxError, _engine, ops
from afflux.ops import codecs
from conftest import ISAS, awkward, bits, check_error, ready
from order import SIZES
from pairwise import soak_all
from test_types import buffer
from variants import VARIANTS, push, serve, trace

D = 65536 + 2 * 2048 + 777
#: Borders between 0 and D: none; empty parts and parts of one element; long and short parts in turn; those of 1,000
#: arrays; borders of blocks and superblocks.
CUTS = {
    "whole": [],
    "tiny": [0, 0, 1, 2, 2, 5, 2046, 2047, 2048, 2049, D - 1, D, D],
    "mixed": [100, 4000, 4100, 4200, 9000, 65530, 65540, 65541, 70_000],
    "many": sorted(np.random.default_rng(5).integers(0, D, 999).tolist()),
    "blocks": [2048, 4096, 65536, 65536 + 2048],
}
PLACES = ["apart", "odd", "page"]
POLICIES = ["stages=fused", "stages=tiled", "prefetch=0,stream=0", "rows=direct"]
THREADS = [1, 2]


def borders_of(cut, size=D):
    return np.array([0, *CUTS[cut], size], np.int64)


def array_at(values, offset):
    """A copy of the values that begins `offset` elements after a multiple of a page."""
    memory = np.empty(values.nbytes + 8192, np.uint8)
    begin = -memory.ctypes.data % 4096 + offset * values.itemsize
    array = memory[begin : begin + values.nbytes].view(values.dtype)
    array[:] = values
    return array


def copied(piece, place, number):
    """A copy where NumPy puts it, at an odd address, or at the beginning of a page."""
    return piece.copy() if place == "apart" else array_at(piece, number % 7 if place == "odd" else 0)


def halves(piece):
    """A buffer of bfloat16 with these bits, which NumPy has no type for."""
    held = _engine.Buffer(_engine.Pool(len(piece), "bfloat16", 1))
    np.asarray(held)[:] = piece
    return held


def parts(vector, borders, place="apart", **options):
    """A copy of a flat vector, in parts."""
    pieces = [np.asarray(vector)[begin:end] for begin, end in neighbours(borders)]
    if isinstance(vector, _engine.Buffer) and vector.dtype == "bfloat16":
        return ops.Parts([halves(piece) for piece in pieces], borders, **options)
    return ops.Parts([copied(piece, place, i) for i, piece in enumerate(pieces)], borders, **options)


def joined(vector):
    """The elements of a vector that may be in parts."""
    if not isinstance(vector, ops.Parts):
        return np.asarray(vector)
    return np.concatenate([np.asarray(array).ravel() for array in vector.arrays])


class Cut:
    """Copies of vectors in parts or, with `some_flat`, every second one flat."""

    def __init__(self, borders, place="apart", some_flat=False):
        self.borders, self.place, self.some_flat, self.count = borders, place, some_flat, 0

    def __call__(self, vector):
        self.count += 1
        flat = self.some_flat and self.count % 2 == 0 and isinstance(vector, np.ndarray)
        return vector.copy() if flat else parts(vector, self.borders, self.place)


class Drawn:
    """Vectors cut from one pool of values at odd distances: cheaper than to draw each."""

    def __init__(self, rng, size):
        self.pool, self.size, self.count = awkward(rng, size + 40 * 97), size, 0

    def __call__(self, dtype):
        self.count += 97
        values = self.pool[self.count : self.count + self.size]
        return buffer("bfloat16", values) if dtype == "bfloat16" else values.astype(dtype)


STEPS = {kind: (ops.Step(kind, 0.1, 0.9, 0.99, 1e-3), states) for kind, states in _engine.STEP_KINDS.items()}
CACHES = {
    "none": None,
    "plain": (ops.CachedDifference, None),
    "mean": (ops.CachedMean, None),
    "affine": (ops.CachedDifference, codecs.affine(4)),
    "rotated": (ops.CachedMean, codecs.rotated(2)),
}
ARRIVALS = 5


def a_stage(drawn, rng, cache, row):
    """Cached rows and their sum: arrival 0 has no row, arrival 3 keeps its own."""
    if CACHES[cache] is None:
        return None
    kind, codec = CACHES[cache]
    old = [drawn(row) for _ in range(ARRIVALS)]
    if codec is not None:
        bytes_of, old_values, old = codec.row_bytes(drawn.size), old, []
        for i, vector in enumerate(old_values):
            old.append(np.empty(bytes_of, np.uint8))
            ops.encode(vector.astype(np.float32), old[-1], codec=codec, facts=ops.RowFacts(i, -9.0, 9.0))
    rows = [None, *old[1:]]
    new = [None if i == 3 else np.zeros_like(row) for i, row in enumerate(old)]
    facts = [ops.RowFacts(7 + i, -9.0, 9.0) for i in range(ARRIVALS)] if codec else ()
    return kind(rng.standard_normal(drawn.size), 7, rows, new, codec, facts)


def a_round(rng, step, cache, held, params_type, updates_type, size=D):
    """A round of flat vectors with `held` rule vectors: of one, or three, the last stays; two are only read."""
    drawn = Drawn(rng, size)
    updates = [drawn(updates_type) for _ in range(ARRIVALS)]
    optimizer, states = STEPS[step]
    vectors = None
    if held:
        coefficients = None if held == 2 else rng.standard_normal((held, held + ARRIVALS))
        if held == 3:
            coefficients[-1] = np.eye(held + ARRIVALS)[held - 1]
        vectors = ops.RuleVectors([drawn(params_type) for _ in range(held)], np.linspace(1, 2, held), coefficients)
    return ops.Pass(
        drawn(params_type),
        np.full(size, np.nan, params_type),
        ops.Combine(updates, np.array([0.5, 0.0, -0.25, 1.5, 0.3]), 0.25),
        a_stage(drawn, rng, cache, "float64" if updates_type == "float64" else "float32"),
        optimizer,
        [np.abs(drawn(params_type)) for _ in range(states)],
        vectors,
    )


def in_parts(flat, cut):
    """The round with copies of its vectors in parts; copies of rows and their sum are flat."""
    stage, held = flat.calibrate, flat.rule_vectors

    def flat_copy(array):
        return None if array is None else np.asarray(array).copy()

    rows, new_rows = (list(map(flat_copy, rows)) for rows in ((stage.rows, stage.new_rows) if stage else ((), ())))
    return replace(
        flat,
        params=cut(flat.params),
        out=cut(flat.out),
        combine=replace(flat.combine, updates=[cut(update) for update in flat.combine.updates]),
        calibrate=stage
        and replace(stage, sum=flat_copy(stage.sum), rows=rows, new_rows=new_rows, sum_out=flat_copy(stage.sum_out)),
        states=[cut(state) for state in flat.states],
        states_out=[cut(state) for state in flat.states_out],
        rule_vectors=held and replace(held, vectors=[cut(v) for v in held.vectors], outs=[cut(v) for v in held.outs]),
    )


def results(round):
    """The bits of all that a sweep may write."""
    stage, held = round.calibrate, round.rule_vectors
    vectors = [round.out, *round.states, *round.states_out, *((*held.vectors, *held.outs) if held else ())]
    rows = [row for row in (stage.sum, stage.sum_out, *stage.new_rows) if row is not None] if stage else []
    return [bits(joined(vector)) for vector in vectors] + [bits(row) for row in rows]


def run(round, threads=1):
    """What a sweep writes, and whether it is valid."""
    sound = []
    ops.apply(round, num_threads=threads, done=sound)
    return results(round), sound


TYPES = [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64"), ("float64", "float32")]


def seeds(now, later):
    """Numbers of cases: these always, and others in `make soak`."""
    return pytest.mark.parametrize("seed", [*range(now), *soak_all((seed,) for seed in range(now, later))])


@pytest.fixture
def drawn_settings(isa_after, policy_after):
    """Chooses an instruction set and a policy by a generator, and puts back those from before."""

    def choose(rng):
        ops.choose_isa(rng.choice(ISAS))
        ops.choose_policy(rng.choice(POLICIES))

    return choose


@seeds(len(STEPS) * len(CACHES), 4000)
def test_a_round_has_the_bits_of_flat_vectors(seed, drawn_settings):
    """Every step with every kind of rows; all else is drawn."""
    rng = np.random.default_rng(seed)
    drawn_settings(rng)
    step, cache = list(STEPS)[seed % len(STEPS)], list(CACHES)[seed // len(STEPS) % len(CACHES)]
    cut, place, types = rng.choice(list(CUTS)), rng.choice(PLACES), TYPES[rng.integers(len(TYPES))]
    flat = a_round(rng, step, cache, rng.integers(4), *types)
    apart = in_parts(flat, Cut(borders_of(cut), place, some_flat=rng.random() < 0.5))
    threads = int(rng.choice(THREADS))
    assert run(apart, threads) == run(flat, threads), (step, cache, cut, place, types)


#: The vectors of gram and inner: of one type, and in other orders of types.
KINDS = [["float32"] * 5, ["bfloat16"] * 4, ["float32", "float64", "bfloat16", "bfloat16", "float64", "float32"]]


@seeds(12, 600)
def test_sums_have_the_bits_of_flat_vectors(seed, drawn_settings):
    """Over blocks across borders, and superblocks of many parts."""
    rng = np.random.default_rng(seed)
    drawn_settings(rng)
    kinds, threads = KINDS[seed % len(KINDS)], int(rng.choice(THREADS))
    drawn = Drawn(rng, D)
    vectors, memory = [drawn(kind) for kind in kinds], drawn("float32")
    cut = Cut(borders_of(rng.choice(list(CUTS))), rng.choice(PLACES), some_flat=rng.random() < 0.5)
    weights = None if rng.random() < 0.2 else rng.standard_normal(len(kinds))
    factors = dict(shift=rng.choice([0.0, 0.3]), memory_weight=0.0 if weights is None else rng.choice([0.0, -1.5]))
    apart = [cut(vector) for vector in vectors]
    assert bits(ops.gram(apart, num_threads=threads)) == bits(ops.gram(vectors, num_threads=threads))
    flat = ops.inner(vectors, weights, memory=memory, num_threads=threads, **factors)
    cut_up = ops.inner(apart, weights, memory=cut(memory), num_threads=threads, **factors)
    assert [bits(np.array(x)) for x in cut_up if x is not None] == [bits(np.array(x)) for x in flat if x is not None]


def test_gram_in_panels():
    """65 vectors are two panels, whose products with each other are of two lists of views."""
    drawn = Drawn(np.random.default_rng(1), 5000)
    vectors = [drawn("float32") for _ in range(30)] * 3
    cut = Cut(np.array([0, 100, 2100, 5000]))
    assert bits(ops.gram([cut(vector) for vector in vectors[:66]])) == bits(ops.gram(vectors[:66]))
    assert bits(ops.gram([*vectors[:64], cut(vectors[64])])) == bits(ops.gram(vectors[:65]))  # a panel is flat


def converted(vector, slot, conversion=None):
    """What `ingest` writes of a vector in parts into a slot of this type."""
    written = np.empty(vector.borders[-1], slot)
    ops.ingest(list(vector.arrays), written, conversion=conversion)
    return written


CONVERSIONS = [
    None,
    ("model", "update"),
    ("update", "gradient"),
    ("gradient", "update"),
    ("model", "gradient"),
    ("update", "model"),
]
SENT = ["float32", "float64", "float16"]


@seeds(12, 600)
def test_converted_parts_have_the_bits_of_ingest(seed, drawn_settings):
    """Parts of several types, replies in float16, models for a rule of updates: as if `ingest` had written slots."""
    rng = np.random.default_rng(seed)
    drawn_settings(rng)
    kinds, slot = CONVERSIONS[seed % len(CONVERSIONS)], rng.choice(["float32", "float64"])
    borders = borders_of(rng.choice(list(CUTS)))
    base = rng.standard_normal(D).astype(rng.choice(["float32", "float64"]))
    updates, slots = [], []
    for i in range(3):
        dtypes = rng.choice(SENT, len(borders) - 1) if i else ["float32"] * (len(borders) - 1)
        values = rng.standard_normal(D)
        pieces = [values[a:b].astype(t) for (a, b), t in zip(neighbours(borders), dtypes, strict=True)]
        cut_base = parts(base, borders, "odd") if rng.random() < 0.5 else base
        conversion = ops.Conversion(*kinds, cut_base, 0.25) if kinds and i != 1 else None
        updates.append(ops.Parts(pieces, borders, conversion, slot))
        flat = conversion and conversion._replace(base=base)
        slots.append(converted(updates[-1], slot, flat))
    threads, params = int(rng.choice(THREADS)), rng.standard_normal(D).astype(slot)
    weights = np.array([0.5, -0.25, 1.0])
    outs = []
    for vectors, cut in ((slots, np.copy), (updates, Cut(borders))):
        out = cut(np.full(D, np.nan, slot))
        ops.apply(ops.Pass(cut(params), out, ops.Combine(vectors, weights)), num_threads=threads)
        outs.append([bits(joined(out)), bits(ops.gram(vectors)), bits(ops.inner(vectors, weights).products)])
    assert outs[0] == outs[1]


def test_a_model_is_averaged_in_place_of_its_base(rng):
    """FedAsync of a host: params are the base of the model, and are overwritten."""
    base, model = rng.standard_normal((2, 9000)).astype(np.float32)
    borders = np.array([0, 10, 4000, 4000, 9000])
    want = base + np.float32(0.5) * (model - base).astype(np.float64)
    params = parts(base, borders)
    update = parts(model, borders, conversion=ops.Conversion("model", "update", params))
    ops.apply(ops.Pass(params, params, ops.Combine([update], np.array([0.5]))))
    assert bits(joined(params)) == bits(want.astype(np.float32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_place", [True, False])
def test_sizes_and_outs(isa, rng, size, in_place):
    """No element, one, and borders of tiles; new states and rule vectors in place or in memory of their own."""
    flat = a_round(rng, "amsgrad", "none", 3, "float32", "float32", size)
    if not in_place:
        held = flat.rule_vectors
        states_out = [np.full_like(state, np.nan) for state in flat.states]
        outs = [np.full_like(vector, np.nan) for vector in held.vectors]
        flat = replace(flat, states_out=states_out, rule_vectors=replace(held, outs=outs))
    borders = np.array([0, 0, size // 3, size // 2, size, size], np.int64)
    apart = in_parts(flat, Cut(borders))
    assert run(apart) == run(flat)


def test_no_parts_at_all():
    none = ops.Parts([], np.zeros(1, np.int64))
    ops.apply(ops.Pass(none, none, ops.Combine([none], np.ones(1))))
    assert ops.gram([none, none]).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("at", [0, 5, 2500, 5999])
def test_a_bad_value_is_seen_in_each_part(at):
    updates = np.ones(6000, np.float32)
    updates[at] = 4.0
    cut = Cut(np.array([0, 3, 10, 5990, 6000]))
    for most, sound in ((3.0, [False]), (4.0, [True])):
        out = cut(np.zeros(6000, np.float32))
        round = ops.Pass(out, out, ops.Combine([cut(updates)], np.ones(1), most=most))
        assert run(round)[1] == sound


def test_checksums_of_flat_results(rng):
    """Updates may be in parts where the written vectors, of which checksums are taken, are flat."""
    flat = a_round(rng, "momentum", "affine", 1, "float32", "float32")
    cut = Cut(borders_of("mixed"))
    apart = in_parts(flat, np.copy)
    updates = [cut(update) for update in flat.combine.updates]
    sums, sums_apart = [], []
    ops.apply(flat, checksums=sums, num_threads=2)
    ops.apply(replace(apart, combine=replace(apart.combine, updates=updates)), checksums=sums_apart, num_threads=2)
    assert sums_apart == sums
    assert results(apart) == results(flat)


BORDERS = np.array([0, 2, 2, 5], np.int64)


def small(**options):
    return parts(np.ones(5, np.float32), BORDERS, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rounds_of_each_rule(variant, monkeypatch):
    """Each sweep of a server is also made of copies in parts, which give the same bits."""
    rounds, apply = [], ops.apply

    def both(round, **options):
        apart, sound = in_parts(round, Cut(np.array([0, 3, 3, 90, 299, 300]))), []
        apply(apart, done=sound)
        apply(round, **options)
        assert results(apart) == results(round)
        assert sound == options["done"]
        rounds.append(round)

    monkeypatch.setattr(ops, "apply", both)
    server = serve(variant)
    for joins in trace(variant, 4, 3):
        push(ready(server, joins[0][-1].astype(np.float32)), joins)
    assert rounds


def refused(match, *, params=None, out=None, updates=(), error=AffluxError, **fields):
    """A round that is refused, and has written nothing."""
    params, out = (small() if vector is None else vector for vector in (params, out))
    before = bits(joined(out))
    round = ops.Pass(params, out, ops.Combine(list(updates), np.ones(len(updates))), **fields)
    check_error(match, ops.apply, round, error=error)
    assert bits(joined(out)) == before


def test_what_does_not_fit_is_refused(rng):
    ones = np.ones(5, np.float32)
    pieces = list(small().arrays)
    refused(r"updates\[0\] is cut at other borders than params", updates=[parts(ones, np.array([0, 2, 3, 5]))])
    refused(r"updates\[0\] is cut at other borders", updates=[parts(ones, np.array([0, 5]))])
    refused(r"updates\[1\]\[2\] has 2 elements", updates=[small(), ops.Parts([*pieces[:2], ones[:2]], BORDERS)])
    refused(r"out has 2 parts, its borders have 3", out=ops.Parts(pieces[:2], BORDERS))
    refused(r"updates\[0\] has 4 elements, expected 5", updates=[parts(ones[:4], np.array([0, 4]))])
    refused(r"params has borders that do not ascend from 0 to 5", params=ops.Parts(pieces, np.array([0, 3, 2, 5])))
    refused(r"out\[0\] is float64, expected", out=ops.Parts([np.ones(2), *pieces[1:]], BORDERS, dtype="float32"))
    refused(r"out is float64, expected float32", out=parts(np.ones(5), BORDERS))
    refused(
        r"states\[0\]\[1\] is float64",
        step=ops.Step("momentum", 0.1, 0.9),
        states=[ops.Parts([pieces[0], np.ones(0), pieces[2]], BORDERS, dtype="float32")],
    )
    refused("give the dtype", updates=[ops.Parts([np.ones(2), *pieces[1:]], BORDERS)])
    refused(r"updates\[0\] is float16, expected", updates=[parts(ones.astype(np.float16), BORDERS)])
    refused("params has a conversion", params=small(conversion=ops.Conversion("model", "update", ones)))
    refused(r"conversion.base\[0\] has 4", updates=[small(conversion=ops.Conversion("model", "update", ones[:4]))])
    refused(r"conversion.scale\[0\] is 0", updates=[small(conversion=ops.Conversion("gradient", "update", None, 0.0))])
    check_error(r"\[ingest\] update\[0\] is in parts, expected a flat vector", ops.ingest, [small()], ones)
    check_error(r"\[gram\] vectors\[1\] is cut at other borders", ops.gram, [small(), parts(ones, np.array([0, 5]))])
    check_error("out is in parts, but", ops.apply, ops.Pass(ones, small(), ops.Combine([], np.ones(0))), checksums=[])


def test_parts_that_overlap_are_refused(rng):
    update, memory = small(), np.ones(8, np.float32)
    out = ops.Parts([memory[:2], memory[2:2], memory[2:5]], BORDERS)
    refused(r"updates.*0\] and out\[2\]", out=out, updates=[ops.Parts([memory[4:6], *update.arrays[1:]], BORDERS)])
    refused(r"out\[0\] and out\[2\] overlap", out=ops.Parts([memory[:2], memory[2:2], memory[1:4]], BORDERS))
    refused(r"params.2. and out.2. overlap", params=ops.Parts([memory[:2], memory[2:2], memory[3:6]], BORDERS), out=out)
    refused(r"params and out\[0\] overlap", params=memory[:5], out=out)


def test_arguments_of_parts_are_refused():
    ones = np.ones(2, np.float32)
    for arrays, borders, match in (
        (ones, BORDERS, r"\[Parts\] arrays is a numpy.ndarray, expected a list or tuple"),
        ([ones], [0, 2], r"\[Parts\] borders is a list, expected a contiguous vector of int64"),
        ([ones], np.array([0.0, 2.0]), r"\[Parts\] borders is no vector of int64"),
        ([ones], np.zeros((1, 2), np.int64), r"\[Parts\] borders is no vector of int64"),
    ):
        check_error(match, ops.Parts, arrays, borders)
    check_error(r"\[Parts\] dtype is none of", ops.Parts, [ones], np.array([0, 2]), dtype="float16")
    read_only = ones.copy()
    read_only.flags.writeable = False
    with pytest.raises(AffluxError, match=r"out\[0\] is read-only"):
        ops.apply(ops.Pass(ones, ops.Parts([read_only], np.array([0, 2])), ops.Combine([], np.ones(0))))
    with pytest.raises(AffluxError, match=r"updates\[0\]\[1\] is a str, expected an array"):
        ops.apply(ops.Pass(ones, ones, ops.Combine([ops.Parts([ones, "x"], np.array([0, 2, 2]))], np.ones(1))))
