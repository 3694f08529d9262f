"""The checksums that a sweep takes of what it writes are those of the bytes that are there."""

import numpy as np
import pytest

from afflux import ops
from afflux.ops import codecs
from afflux.store.checksums import crc, row_crc
from conftest import THREADS, bits, check_error
from order import SIZES
from pairwise import pairwise

CODECS = ["float32", *(codec.name for codec in codecs.ROUNDING)]
M = 5


def made(rng, size, codec, dtype="float32"):
    """A round that writes whatever a round can: all places apart, the second arrival's row kept."""
    kind = codecs.named(codec)

    def vectors(count, how=dtype):
        return [rng.standard_normal(size).astype(how) for _ in range(count)]

    updates = vectors(M, "float32")
    facts = [ops.RowFacts(i, float(u.min(initial=0)), float(u.max(initial=0))) for i, u in enumerate(updates)]
    old = [np.empty(kind.row_size(size), kind.row_dtype) for _ in range(M)]
    for row, update, one in zip(old, updates, facts, strict=True):
        ops.encode(update, row, codec=kind, facts=one)
    new = [None if i == 1 else np.full_like(row, 85) for i, row in enumerate(old)]
    total, out = vectors(1, "float64")[0], np.empty_like(vectors(1, "float64")[0])
    mean = ops.CachedMean(total, 9, old, new, kind, facts if kind.keyed else [], sum_out=out)
    rule_vectors = ops.RuleVectors(vectors(2), np.array([0.5, 0.0]), rng.standard_normal((2, 2 + M)), vectors(2))
    mix, step = ops.Combine(updates, rng.standard_normal(M)), ops.Step("amsgrad", 0.1, 0.9, 0.9, 1e-3)
    states = [np.abs(state) for state in vectors(3)]
    params, to = vectors(2)
    return ops.Pass(params, to, mix, mean, step, states, rule_vectors, vectors(3))


@pairwise("size, codec, threads", [size for size in SIZES if size] + [8192, 65536 + 8193], CODECS, THREADS)
def test_they_are_those_of_the_bytes(rng, size, codec, threads):
    sweep, sums, done = made(rng, size, codec), [], []
    ops.apply(sweep, num_threads=threads, done=done, checksums=sums)
    ((out, total, rows, states, rule_vectors),) = sums
    assert done == [True]
    assert out == crc(sweep.out, 1)
    assert total == crc(sweep.calibrate.sum_out, 1)
    expected = [b"" if row is None else row_crc(row, codecs.named(codec)) for row in sweep.calibrate.new_rows]
    assert rows == expected
    assert states == [crc(state, 1) for state in sweep.states_out]
    assert rule_vectors == [crc(memory, 1) for memory in sweep.rule_vectors.outs]


@pytest.mark.parametrize("codec", ["float32", "affine-4", "rotated-4"])
def test_nothing_else_changes(isa, codec):
    one, other = (made(np.random.default_rng(7), 2 * 65536 + 4099, codec) for _ in range(2))
    ops.apply(one)
    ops.apply(other, checksums=[])
    for name in ("out", "states_out"):
        assert bits(getattr(one, name)) == bits(getattr(other, name))
    assert bits(one.calibrate.sum_out) == bits(other.calibrate.sum_out)
    for ours, theirs in zip(one.calibrate.new_rows, other.calibrate.new_rows, strict=True):
        assert ours is theirs or bits(ours) == bits(theirs)


def test_in_place_and_without_a_cache(rng):
    params, state = rng.standard_normal((2, 70_001)).astype(np.float32)
    sums = []
    mix = ops.Combine([np.ones_like(params)], np.ones(1))
    rule_vectors = ops.RuleVectors([rng.standard_normal(70_001).astype(np.float32)], np.ones(1))
    ops.apply(
        ops.Pass(params, params, mix, step=ops.Step("momentum", 0.1, 0.9), states=[state], rule_vectors=rule_vectors),
        checksums=sums,
    )
    assert sums == [(crc(params, 1), b"", [], [crc(state, 1)], [])]


def test_what_is_refused_has_none(rng):
    sweep, sums = ops.Pass(np.zeros(5), np.zeros(6), ops.Combine([], np.array([]))), []
    check_error("out has 6 elements", ops.apply, sweep, checksums=sums)
    assert sums == []
