"""How sweeps use memory changes no bit: rounds in registers or in tiles, prefetch distances, stores past the caches."""

import os
import re
import subprocess
import sys
from functools import partial
from itertools import product

import numpy as np
import pytest

from afflux import _engine, codecs, ops
from conftest import ISAS, THREADS, bits, check_error
from pairwise import pairwise
from processes import run_python
from test_stages import CACHES, KINDS, Round, same, step_of
from test_types import buffer

pytestmark = pytest.mark.usefixtures("policy_after")
TILED = "prefetch=2048,stream=never,stages=tiled,rows=copied"
#: Each setting alone and with others; stream=0 writes every sweep past the caches.
POLICIES = (
    "prefetch=0,stream=never,stages=fused,rows=copied",
    "prefetch=256,stream=0,stages=fused,rows=direct",
    "prefetch=65536,stream=0,stages=fused,rows=copied",
    "prefetch=0,stream=0,stages=tiled,rows=direct",
    "prefetch=64,stream=never,stages=tiled,rows=copied",
)


def under(policy, run, *args, **kwargs):
    ops.choose_policy(policy)
    assert ops.policy() == policy
    return run(*args, **kwargs)


@pairwise(
    "isa, updates_type, cache, arrivals",
    ISAS,
    ["float32", "bfloat16"],
    list(CACHES),
    [0, 1, 6, 16, 24, 48],  # of 24, 20 have a weight, and of 48 40: more than are fused, with rows and without
    indirect=["isa"],
)
def test_rounds_in_registers_have_the_bits_of_tiles(isa, rng, updates_type, cache, arrivals):
    """Every step, and sizes around what a pack, a tile and a piece hold."""
    for size, kind in product((1, 31, 32, 33, 1024 + 63, 5 * 4096 + 7), KINDS):
        given = Round(rng, size, "float32", updates_type, arrivals)
        tiled = under(TILED, given.run, cache, kind, "none")
        for policy in POLICIES[:3]:
            fused = under(policy, given.run, cache, kind, "none")
            assert same(tiled, fused), (policy, size, kind)


@pairwise(
    "isa, updates_type, arrivals, memory",
    ISAS,
    ["float32", "bfloat16"],
    [0, 1, 6, 32, 33],
    ["read", "renewed", "unread", "stays", "NaN"],
    indirect=["isa"],
)
def test_rounds_with_a_rule_vector_in_registers_have_the_bits_of_tiles(isa, rng, updates_type, arrivals, memory):
    """And the oracle's. What has no weight in the direction, or none in the next rule vector, may hold NaN."""
    for size in (1, 31, 33, 1024 + 63, 5 * 4096 + 7):
        given = Round(rng, size, "float32", updates_type, arrivals, held=1)
        given.weights = np.resize([0.5, 0.0, -0.25, 1.5, 0.0], arrivals)
        given.next = rng.standard_normal((1, 1 + arrivals)) if memory != "stays" else np.eye(1, 1 + arrivals)
        given.next[0, 3::3] = 0.0
        if memory in ("unread", "NaN"):
            given.memory_weights[:] = 0.0
        if memory == "NaN":
            given.next[0, 0] = 0.0
            given.rule_vectors[0][:] = np.nan
        kind = "read" if memory == "read" else "renewed"
        tiled = under(TILED, given.run, "none", "sgd", kind)
        assert same(tiled, given.expected("none", "sgd", kind))
        for policy in POLICIES[:3]:
            assert same(tiled, under(policy, given.run, "none", "sgd", kind)), (policy, size)


@pytest.mark.parametrize("apart", [False, True])
def test_a_rule_vector_goes_where_it_is_wanted(isa, rng, apart):
    """In place or apart, past the caches or not; one that is not sound is found."""
    size = 4096 + 64  # whole packs: nothing is left to tiles
    params, update, vector = (rng.standard_normal(size).astype(np.float32) for _ in range(3))

    def run(weight, most=np.inf):
        held = off(vector, 0)
        to, out, done = off(np.zeros_like(vector), 0) if apart else held, off(np.zeros_like(params), 0), []
        vectors = ops.RuleVectors([held], np.array([0.5]), np.array([[1.5, weight]]), [to] if apart else ())
        combine = ops.Combine([update], np.array([0.7]))
        ops.apply(ops.Pass(params, out, combine, step=ops.Step("sgd", 0.1), rule_vectors=vectors, most=most), done=done)
        return bits(out), bits(to), bits(held) == bits(vector), done

    for weight, most in ((0.25, np.inf), (1e39, np.inf), (-2.0, 4.0)):
        expected = under(TILED, run, weight, most)
        assert expected[2:] == (apart, [weight == 0.25])
        for policy in POLICIES:
            assert under(policy, run, weight, most) == expected, (policy, weight)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("params_type", ["float32", "float64"])
def test_no_policy_changes_a_bit(isa, rng, cache, params_type):
    """Also of what is never fused: float64, and rule vectors."""
    given = Round(rng, 70_001, params_type, "float32")
    for memory in ("none", "renewed"):
        tiled = under(TILED, given.run, cache, "amsgrad", memory, threads=1)
        for policy, threads in product(POLICIES, THREADS):
            assert same(tiled, under(policy, given.run, cache, "amsgrad", memory, threads=threads))


def off(vector, elements):
    """A copy of the vector that begins this number of elements after the start of a cache line."""
    room = np.zeros(vector.size + 64, vector.dtype)
    first = -room.ctypes.data // room.itemsize % (64 // room.itemsize) + elements
    room[first : first + vector.size] = vector
    return room[first : first + vector.size]


@pytest.mark.parametrize("rows", [None, 1.0, 0.3])
@pytest.mark.parametrize("at", [0, 1, 8])
def test_outputs_elsewhere_and_in_place(isa, rng, at, rows):
    """Aligned or not, in place or apart: only what is aligned, apart and without rows goes past the caches."""
    size = 4096 + 40
    params, update, row = (rng.standard_normal(size).astype(np.float32) for _ in range(3))
    states = [np.abs(rng.standard_normal(size)).astype(np.float32) for _ in range(3)]
    total = rng.standard_normal(size)

    def run(apart):
        p, u, h, s = off(params, at), off(update, at), off(row, at), off(total, at)
        held = [off(state, at) for state in states]
        elsewhere = [off(np.zeros_like(state), at) for state in states] if apart else ()
        out, row_out, sum_out = (off(np.zeros_like(v), at) if apart else v for v in (p, h, s))
        kept = {"sum_out": sum_out if apart else None, "factor": rows}
        cache = ops.CachedDifference(s, 5, [h], [row_out], **kept) if rows else None
        step = step_of("amsgrad")
        combine = ops.Combine([u], np.array([0.7]), 0.5)
        ops.apply(ops.Pass(p, out, combine, cache, step, held, states_out=elsewhere))
        return [bits(a) for a in (out, *((row_out, sum_out) if rows else ()), *(elsewhere or held))]

    expected = under(TILED, run, False)
    for policy, apart in product((TILED, *POLICIES), (False, True)):
        assert under(policy, run, apart) == expected, (policy, apart)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3.4e38, -5.0])
def test_what_is_not_sound_is_found_wherever_it_is(isa, kind, wrong):
    """In each lane of a pack and in what is left over: by the limit of updates, which cancel here, and by that of what
    is written."""
    size = 4 * 32 + 11
    step = step_of(kind)

    def sound(at, most, update_most):
        update = np.zeros(size)
        update[at] = wrong
        updates = [update.astype(np.float32)]
        updates += [-updates[0]] if update_most < np.inf else []
        combine = ops.Combine(updates, np.ones(len(updates)), most=update_most)
        params, states = np.zeros(size, np.float32), [np.zeros(size, np.float32) for _ in range(KINDS[kind])]
        done = []
        ops.apply(ops.Pass(params, params, combine, step=step, states=states, most=most), done=done)
        assert update_most < np.inf or done == [all((np.abs(v) <= min(most, 3.4e38)).all() for v in (params, *states))]
        return done

    for at, (most, update_most) in product(range(size), ((1e-6, np.inf), (np.inf, 4.0), (np.inf, np.inf))):
        expected = under(TILED, sound, at, most, update_most)
        assert under(POLICIES[0], sound, at, most, update_most) == expected
        if update_most == 4.0:
            assert expected == [False]
    assert under(POLICIES[0], sound, 0, np.inf, 6.0) == [wrong == -5.0]


@pytest.mark.parametrize("updates_type", ["float32", "float64", "bfloat16"])
def test_the_limit_of_updates_is_that_of_each_element(isa, rng, updates_type):
    """Of any number of updates, whatever their weights and the direction; one without a weight is not read."""
    size, wrong = 2048 + 45, np.zeros(2048 + 45)
    wrong[[5, 2090]] = 5.0, -5.0
    for count, index in ((1, 0), (10, 3), (33, 32), (65, 20)):
        updates = [buffer(updates_type, np.zeros(size)) for _ in range(count)]
        weights = np.full(count, 1e-300)
        for value, weight, most in product((wrong, np.where(wrong, np.nan, 0)), (1e-300, 0.0), (5.0, 4.9)):
            updates[index], weights[index] = buffer(updates_type, value), weight
            combine = ops.Combine(updates, weights, most=most)
            params = np.ones(size, np.float32)
            for policy in (TILED, *POLICIES[:2]):
                done = []
                sweep = ops.Pass(params, np.empty_like(params), combine, step=ops.Step("sgd"))
                under(policy, partial(ops.apply, sweep, done=done))
                assert done == [weight == 0 or (most == 5.0 and value is wrong)], (policy, count)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("at", [0, 1])
def test_ingest_past_the_caches(isa, rng, dtype, at):
    """One part or many, of the slot's type or of others; statistics and bytes are those of ordinary stores."""
    size = 3 * 2048 + 77
    values = rng.standard_normal(size)
    values[5000] = np.nan
    single = values.astype(np.float32)
    parts = [single[:2048], single[2048:2060].astype(np.float64), single[2060:]]

    def run(update):
        slot = off(np.zeros(size, dtype), at)
        found = ops.ingest(update, slot)
        return slot.tobytes(), repr(found)

    for update in (single, values, parts):
        expected = under(TILED, run, update)
        for policy in POLICIES:
            assert under(policy, run, update) == expected


@pytest.mark.parametrize("infinite", [False, True])
def test_ingest_of_bfloat16_past_the_caches(isa, rng, infinite):
    """From a bfloat16 vector as it is, and from float32; the slot has the bytes of the source."""
    size = 3 * 2048 + 77
    halves, slot = (_engine.Buffer(_engine.Pool(size, "bfloat16", 1)) for _ in range(2))
    values = rng.standard_normal(size).astype(np.float32)
    if infinite:
        values[5000] = np.inf
    under(TILED, ops.ingest, values, halves)

    def run(update):
        np.asarray(slot)[:] = 0
        found = ops.ingest(update, slot)
        return np.asarray(slot).tobytes(), repr(found)

    for update in (values, halves):
        expected = under(TILED, run, update)
        assert expected[0] == np.asarray(halves).tobytes()
        for policy in POLICIES:
            assert under(policy, run, update) == expected


@pytest.mark.parametrize(
    "codec", [codecs.affine(8), codecs.affine(4), codecs.affine(8, scope="vector"), codecs.bfloat16]
)
@pytest.mark.parametrize("updates_type", ["float32", "float64"])
def test_encoded_rows(isa, rng, codec, updates_type):
    """Encoded where the updates lie or from copies: rows of some arrivals kept, some new, some replaced; long tails."""
    size, arrivals = 3 * 4096 + 130, 20  # more than are encoded together
    updates = [rng.standard_normal(size).astype(updates_type) for _ in range(arrivals)]
    params = rng.standard_normal(size).astype(np.float32)
    old = [None if k % 5 == 0 else np.empty(ops.row_bytes(size, codec=codec), np.uint8) for k in range(arrivals)]
    facts = [ops.RowFacts(k + 1, -5.0, 5.0) if codec.keyed else ops.RowFacts() for k in range(arrivals)]
    for k, row in enumerate(old):
        if row is not None:
            ops.encode(updates[k - 1].astype(np.float32), row, codec=codec, facts=facts[k - 1])

    def run(quantized, threads):
        rows = [None if row is None else row.copy() for row in old]
        renewed = [
            None if k % 7 == 3 else np.empty(ops.row_bytes(size, codec=codec), np.uint8) if row is None else row
            for k, row in enumerate(rows)
        ]
        total, out = np.ones(size), np.empty_like(params)
        cache = ops.CachedDifference(total, 30, rows, renewed, codec, facts, quantized)
        weights = np.resize([0.25, 0.0, -0.5], arrivals)
        ops.apply(
            ops.Pass(params, out, ops.Combine(updates, weights), cache, ops.Step("sgd", 0.1)), num_threads=threads
        )
        return [bits(out), bits(total), *(row.tobytes() for row in renewed if row is not None)]

    for quantized in (False, True):
        expected = under(TILED, run, quantized, 1)
        for policy in POLICIES:
            assert under(policy, run, quantized, 2) == expected, (policy, quantized)


def test_a_bad_policy_is_found_before_anything_is_written():
    code = """
import numpy as np
from afflux import AffluxError, codecs, ops
codec, vector = codecs.affine(8, scope="vector"), np.linspace(-1, 1, 300, dtype=np.float32)
row = np.zeros(ops.row_bytes(300, codec=codec), np.uint8)
ops.encode(vector, row, codec=codec, facts=ops.RowFacts(1, -1.0, 1.0))
before, total = row.tobytes(), np.zeros(300)
cache = ops.CachedDifference(total, 3, [row], [row], codec, [ops.RowFacts(2, -9.0, 9.0)])
try:
    ops.apply(ops.Pass(vector, np.empty_like(vector), ops.Combine([vector], np.ones(1)), cache, ops.Step("sgd")))
except AffluxError as error:
    print(row.tobytes() == before, not total.any(), error)
"""
    done = run_python("-c", code, AFFLUX_POLICY="prefetch=oops")
    assert done.stdout.startswith("True True AFFLUX_POLICY has 'prefetch=oops', expected"), done.stderr


@pytest.mark.parametrize(
    ("text", "item"),
    [
        *((item, item) for item in ("x=1", "fused", "prefetch=", "prefetch= 1", "prefetch=-1", "prefetch=65537")),
        *((item, item) for item in ("stages=registers", "stages=fused;stream=0", "stream=99999999999999999999")),
        (",", ""),
        ("prefetch=0,", ""),
        ("prefetch=0,,stages=fused", ""),
        ("rows=plain", "rows=plain"),
        ("x" * 1000, "x" * 60 + "..."),
        ("stages=\0", "stages=?"),
    ],
)
def test_what_is_no_policy_is_refused(text, item):
    before = ops.policy()
    check_error(re.escape(f"[choose_policy] text has '{item}', expected prefetch=BYTES"), ops.choose_policy, text)
    assert ops.policy() == before


def test_a_policy_is_a_text():
    for text in (None, 3, b"stages=fused", "pr\xe9fetch=1"):
        check_error(r"\[choose_policy\] text is .*, must be a str", ops.choose_policy, text)
    check_error(r"\[choose_policy\] text has stages twice", ops.choose_policy, "stages=fused,prefetch=0,stages=fused")


def backends(**environment):
    return run_python("-m", "afflux", "backends", **environment)


def test_the_environment_chooses_and_the_command_line_shows_it():
    pytest.importorskip("typer")
    done = backends(AFFLUX_POLICY="prefetch=128,rows=copied,stages=tiled,stream=never")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    wanted = "prefetch=128,stream=never,stages=tiled,rows=copied"
    assert last == f"policy    cpu   {wanted} ({ops.processor_family()})"
    done = backends(AFFLUX_POLICY="prefetch=many")
    assert done.returncode == 2
    assert done.stderr.startswith("error: AFFLUX_POLICY has 'prefetch=many', expected prefetch=BYTES (0 to 65536)")
    done = backends(AFFLUX_POLICY=os.fsdecode(b"\xff"))
    assert done.stderr.startswith("error: AFFLUX_POLICY has '?', expected prefetch=BYTES (0 to 65536)")


def test_an_empty_text_is_the_default():
    code = "from afflux import ops; print(ops.policy())"
    run = [sys.executable, "-c", code]
    given = subprocess.run(run, env=os.environ | {"AFFLUX_POLICY": ""}, capture_output=True, text=True).stdout
    environment = {name: value for name, value in os.environ.items() if name != "AFFLUX_POLICY"}
    assert given == subprocess.run(run, env=environment, capture_output=True, text=True).stdout
    assert ",stages=fused," in given
