"""Rounds over encoded rows: direction, sum and every byte of the rows are those of plain float64 arithmetic with the
reference's rows (rows.py).
"""

from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import pytest

import oracle
import rows
from afflux import AffluxError, Server, ops
from afflux.aggregation.cache.table import row_key
from afflux.ops import codecs
from afflux.ops.codecs import ROUNDING
from afflux.rules import RULES, afa_cs, ca2fl, mf_ca2fl
from conftest import THREADS, bits, check_error, push_all
from pairwise import soak_all
from test_types import buffer, values

CODINGS = [list(group) for _, group in groupby(ROUNDING, lambda codec: codec.coding)]
#: The widest and the narrowest of each coding, and one between.
ENDS = list(dict.fromkeys(codec for group in CODINGS for codec in (group[0], group[-1])))
OF_EACH_KIND = [codecs.float32, codecs.float64, *(group[len(group) // 2] for group in CODINGS)]
each = pytest.mark.parametrize("codec", ENDS, ids=repr)
FACTOR = 0.3
SCALED = partial(ops.CachedDifference, factor=FACTOR)
STAGES = {"difference": ops.CachedDifference, "a factor": SCALED, "mean": ops.CachedMean}
N = 7


class Given:
    """Six arrivals, one of weight 0 and two whose rows stay; the third client has no row."""

    def __init__(self, rng, codec, size, kind):
        self.codec, self.size, arrivals = codec, size, 6
        self.params = rng.standard_normal(size).astype(np.float32)
        self.updates = [buffer(kind, rng.standard_normal(size).astype(kind if kind == "float64" else np.float32))
                        for _ in range(arrivals)]  # fmt: skip
        self.plain = [values(update) for update in self.updates]
        self.weights = np.array([0.5, 0.0, -0.25, 1.5, 0.3, 1e-3])
        self.facts = [self._facts(u, 1000 + i) for i, u in enumerate(self.plain)]
        olds = [rng.standard_normal(size).astype(np.float32) for _ in range(arrivals)]
        self.rows = [rows.encode(codec.name, u, *self._facts(u, i)) if i != 2 else None for i, u in enumerate(olds)]
        self.replaced = [i not in (1, 4) for i in range(arrivals)]
        self.sum = rng.standard_normal(size)

    def _facts(self, x, key):
        return ops.RowFacts(key, float(x.min(initial=0)), float(x.max(initial=0)))

    def stage(self, kind, old, new, total, quantize=False):
        return STAGES[kind](total, N, old, new, self.codec, self.facts, quantize)

    def run(self, kind, threads=2, quantize=False, in_place=False):
        old = [None if row is None else np.frombuffer(bytearray(row), np.uint8) for row in self.rows]
        new = [None if not replaced else row if in_place and row is not None
               else np.full(self.codec.row_bytes(self.size), 0x55, np.uint8)
               for row, replaced in zip(old, self.replaced, strict=True)]  # fmt: skip
        total, out = self.sum.copy(), np.empty_like(self.params)
        stage = self.stage(kind, old, new, total, quantize)
        mix = ops.Combine(self.updates, self.weights, 0.25)
        ops.apply(ops.Pass(self.params, out, mix, stage, ops.Step("sgd", -0.5)), num_threads=threads)
        return bits(out), bits(total), [None if row is None else row.tobytes() for row in new]

    def expected(self, kind, quantize=False):
        name = self.codec.name
        made = [rows.encode(name, u, *facts) for u, facts in zip(self.plain, self.facts, strict=True)]
        quantized = [rows.decode(name, row, self.size) for row in made]
        old = [None if row is None else rows.decode(name, row, self.size) for row in self.rows]
        # The rows' part of the sum is that of what is stored; the direction's that of what came.
        cache = (kind, self.sum, N, old, self.replaced, FACTOR if kind == "a factor" else 1.0)
        stored, total = oracle.direction(self.params, quantized, self.weights, 0.25, cache=cache)
        v = stored
        if kind != "mean" and not quantize:
            v, _ = oracle.direction(self.params, self.plain, self.weights, 0.25, cache=cache)
        out = oracle.step("sgd", self.params, v, [], -0.5)[0]
        return (
            bits(out),
            bits(total),
            [row if replaced else None for row, replaced in zip(made, self.replaced, strict=True)],
        )


@pytest.mark.parametrize(
    ("codec", "kind"),
    [*((codec, "float32") for codec in ROUNDING), *((codec, k) for codec in ENDS for k in ("bfloat16", "float64"))],
    ids=repr,
)
def test_a_round(isa, rng, codec, kind):
    for size in (1, 129, 2048 + 300, 4100):
        given = Given(rng, codec, size, kind)
        for stage in STAGES:
            assert given.run(stage) == given.expected(stage), (stage, size)
        for stage in ("difference", "a factor"):
            assert given.run(stage, quantize=True) == given.expected(stage, quantize=True), size


@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
def test_in_place_and_on_many_threads(rng, codec):
    given = Given(rng, codec, 2 * 65536 + 4099, "float32")
    for stage in STAGES:
        once = given.run(stage, 1)
        for threads in THREADS:
            assert given.run(stage, threads) == given.run(stage, threads, in_place=True) == once


@each
def test_many_arrivals(rng, codec):
    """More than are encoded side by side."""
    given = Given(rng, codec, 3000, "float32")
    for name in ("updates", "plain", "rows", "replaced"):
        setattr(given, name, getattr(given, name) * 12)
    given.weights = np.tile(given.weights, 12)
    given.facts = [given._facts(u, i) for i, u in enumerate(given.plain)]
    assert given.run("difference") == given.expected("difference")


@each
def test_who_is_rejected_is_not_read(rng, codec):
    given = Given(rng, codec, 3000, "float32")
    clean = given.run("difference"), given.run("mean")
    given.plain[1][:] = np.nan
    assert (given.run("difference"), given.run("mean")) == clean


@each
def test_a_client_twice_in_a_buffer(rng, codec):
    """Both enter against the same old row; row and sum take the last one."""
    given = Given(rng, codec, 3000, "float32")
    row = np.frombuffer(bytearray(given.rows[0]), np.uint8)
    old = np.empty(3000, np.float32)
    ops.decode(row, old, codec=codec)
    given.updates, given.weights, given.facts = given.updates[:2], np.array([0.5, 0.25]), given.facts[:2]
    total, out = given.sum.copy(), np.empty_like(given.params)
    stage = given.stage("difference", [row, row], [None, row], total)
    ops.apply(ops.Pass(given.params, out, ops.Combine(given.updates, given.weights), stage, ops.Step("sgd")))
    made = rows.encode(codec.name, given.plain[1], *given.facts[1])
    assert row.tobytes() == made
    new = rows.decode(codec.name, made, 3000)
    assert bits(total) == bits(given.sum + (new.astype(float) - old))
    v, _ = oracle.direction(
        given.params, given.plain[:2], given.weights, cache=("difference", given.sum, N, [old, old], [0, 0], 1.0)
    )
    assert bits(out) == bits(oracle.step("sgd", given.params, v, [], 1.0)[0])


@each
def test_memories_are_replaced_in_the_same_sweep(rng, codec):
    """Rotations come in longer tiles than the rule vectors have room for."""
    given = Given(rng, codec, 2 * 2048 + 1500, "float32")
    held = [rng.standard_normal(given.size).astype(np.float32) for _ in range(4)]
    after, coefficients, zeros = [m.copy() for m in held], rng.standard_normal((4, 10)), np.zeros(4)
    new = [np.empty(codec.row_bytes(given.size), np.uint8) for _ in range(6)]
    old = [None if row is None else np.frombuffer(row, np.uint8) for row in given.rows]
    stage, mix = given.stage("mean", old, new, given.sum.copy()), ops.Combine(given.updates, given.weights)
    out = np.empty_like(given.params)
    ops.apply(ops.Pass(given.params, out, mix, stage, rule_vectors=ops.RuleVectors(after, zeros, coefficients)))
    expected = oracle.next_memories(held, given.plain, coefficients)
    assert [bits(m) for m in after] == [bits(m) for m in expected]
    assert [row.tobytes() for row in new] == [
        rows.encode(codec.name, u, *facts) for u, facts in zip(given.plain, given.facts, strict=True)
    ]


def test_what_is_refused(rng):
    given = Given(rng, codecs.affine(4), 300, "float32")
    old = [None if row is None else np.frombuffer(bytearray(row), np.uint8) for row in given.rows]
    total, out = given.sum.copy(), given.params.copy()

    def apply(codec=given.codec, facts=given.facts, old=old, quantize=False, stage=ops.CachedDifference, **more):
        stage = stage(total, N, old, [None] * 6, codec, facts, quantize, **more)
        ops.apply(ops.Pass(given.params, out, ops.Combine(given.updates, given.weights), stage))

    for factor in (-0.1, 1.5, np.nan):
        check_error(r"\[apply\] factor is .*, must be from 0 to 1", apply, factor=factor)
    check_error(r"\[apply\] factor is 0.5.*; of a mean it is 1", apply, stage=ops.CachedMean, factor=0.5)
    check_error(r"\[apply\] facts has 5 entries, updates has 6", apply, facts=given.facts[:5])
    with pytest.raises(AffluxError, match=r"\[apply\] rows\[0\] was encoded by affine-4, expected affine-vector-4"):
        apply(codec=codecs.affine(4, scope="vector"), old=[old[0][:256], *[None] * 5])
    check_error(r"quantize_direction needs a codec that", apply, codec=codecs.float32, old=[None] * 6, quantize=True)
    check_error(r"\[apply\] codec float64 cannot hold float32 updates", apply, codec=codecs.float64, old=[None] * 6)
    damaged = old[3].copy()
    damaged[9] ^= 1
    check_error(r"\[apply\] rows\[3\] holds 44 elements, expected 300", apply, old=[*old[:3], damaged, *old[4:]])
    assert bits(total) == bits(given.sum)
    assert bits(out) == bits(given.params)


# ---- servers -------------------------------------------------------------------------------------------------------


def serve(codec, size=40, clients=5, **options):
    return Server(ca2fl(buffer_size=2, codec=codec), np.zeros(size), num_clients=clients, **options)


LATER = soak_all(("ca2fl", codec) for codec in ROUNDING if codec not in OF_EACH_KIND)


@pytest.mark.parametrize(
    ("name", "codec"), [("afa_cs", codecs.float32), *(("ca2fl", codec) for codec in OF_EACH_KIND), *LATER], ids=repr
)
def test_the_sum_keeps_its_promise_over_ten_thousand_rounds(rng, name, codec):
    """Within 1e-12 of the recomputed mean, relative to the largest row so far; updates of eight orders of magnitude."""
    dtype = "float64" if codec == codecs.float64 else "float32"
    server, largest = Server(RULES[name](buffer_size=2, codec=codec), np.zeros(300), num_clients=6, dtype=dtype), 0.0
    pool = (rng.standard_normal((9, 300)) * 10.0 ** np.arange(-4, 5)[:, None]).astype(dtype)
    for i in range(20_000):
        client, vector = 3 * (i % 2) + i * i // 7 % 3, pool[i * i % 31 % 9]
        server.push(client=client, **{server.rule.kind: vector}, version=server.version)
        if i % 500 == 0:
            kept = [server.rows.row(client) for client in server.rows.client_ids]
            largest = max([largest, *(float(np.linalg.norm(row)) for row in kept)])
    assert server.version == 10_000
    mean = sum(server.rows.row(client).astype(np.float64) for client in server.rows.client_ids) / 6
    assert np.linalg.norm(server.rows.sum / 6 - mean) <= 1e-12 * largest


@each
def test_rows_are_keyed_by_seed_version_and_client(rng, codec):
    x = rng.standard_normal(40).astype(np.float32)
    found = {}
    for seed in (0, 7):
        server = serve(codec, seed=seed)
        for version, clients in enumerate([("ann", "bob"), ("ann", "eve")]):
            push_all(server, clients, x)
            for client in clients:
                facts = row_key(seed, version + 1, client), float(x.min()), float(x.max())
                expected = rows.encode(codec.name, x, *facts)
                assert bits(server.rows.encoded(client)) == expected
                found[seed, version, client] = expected
    assert len(set(found.values())) == (len(found) if codec.keyed else 1)


@each
def test_a_saved_state_goes_on_with_the_same_bits(rng, codec):
    pool = rng.standard_normal((9, 40)).astype(np.float32)
    straight, first, second = (serve(codec, seed=3) for _ in range(3))
    for i, x in enumerate(pool):
        straight.push(client=i % 4, update=x, version=straight.version)
        if i < 5:
            first.push(client=i % 4, update=x, version=first.version)
    state = first.state_dict()
    second.load_state_dict(state)
    for i, x in enumerate(pool[5:], 5):
        second.push(client=i % 4, update=x, version=second.version)
    assert bits(second.params) == bits(straight.params)
    assert bits(second.rows.sum) == bits(straight.rows.sum)
    assert all(bits(second.rows.encoded(c)) == bits(straight.rows.encoded(c)) for c in straight.rows.client_ids)
    for other in (serve(codecs.affine(2, scope="vector"), seed=3), serve(None)):
        check_error(r"\[load_state_dict\] ", other.load_state_dict, state)
    if codec.keyed:
        state["arrays"]["rows"][0, 0] ^= 1
        check_error(r"\[decode\] row does not begin with the head of a row", second.load_state_dict, state)
        check_error(r"\[load_state_dict\] seed is 3 in the state, 0 here", serve(codec).load_state_dict, state)


def test_options():
    assert mf_ca2fl().calibrate == ca2fl(codec="affine-8").calibrate
    assert replace(mf_ca2fl(bits=4), name="ca2fl") == ca2fl(codec="affine-4")
    assert mf_ca2fl(bits=2, codec="rotated").calibrate.codec == afa_cs(codec=codecs.rotated(2)).calibrate.codec
    for call, message in [
        (lambda: mf_ca2fl(codec="int8"), r"\[mf_ca2fl\] codec is 'int8', must be 'affine', "),
        (lambda: mf_ca2fl(bits=3), r"\[affine\] bits is 3, must be one of 8, 4, 2, 1"),
        (lambda: ca2fl(codec=8), r"\[codec\] codec is 8, must be one of afflux.codecs"),
        (lambda: serve(codecs.float64), r"\[Server\] ca2fl keeps rows as float64, but those of float32 slots need"),
    ]:
        check_error(message, call)
