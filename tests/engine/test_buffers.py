"""Pooled buffers: what they export, when their memory is used again, and what a checked pool notices."""

import sys

import numpy as np
import pytest

from afflux import AffluxError, _engine, ops
from afflux.arrays.pools import Versions
from conftest import bits, check_error

D = 8


def make(dtype="float32", size=D, **options):
    return _engine.Buffer(_engine.Pool(size, dtype, 0, **options))


@pytest.mark.parametrize(("dtype", "array"), [("float32", "f4"), ("float64", "f8"), ("bfloat16", "u2")])
def test_a_buffer_exports_its_memory(dtype, array):
    buffer = make(dtype)
    view = np.asarray(buffer)
    assert (buffer.dtype, buffer.size, view.dtype, view.shape) == (dtype, D, np.dtype(array), (D,))
    view[:] = 3
    buffer.freeze()
    frozen = np.asarray(buffer)
    assert frozen.tolist() == [3] * D
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        frozen.flags.writeable = True


def test_buffers_are_arguments_like_any_array():
    update, slot, params, out = np.arange(D, dtype=np.float32), make(), make(), make()
    ops.ingest(update, slot)
    ops.ingest([slot], params)
    row = make()
    stage = ops.CachedDifference(np.zeros(D), 2, [slot], [row])
    ops.apply(ops.Pass(params, out, ops.Combine([slot], np.ones(1)), stage))
    assert bits(np.asarray(row)) == bits(np.asarray(out)) == bits(update)
    assert ops.gram([slot, update])[0, 1] == float((update * update).sum())


def test_frozen_buffers_are_not_written():
    frozen = make()
    ops.ingest(np.zeros(D), frozen)
    frozen.freeze()
    check_error(r"\[ingest\] slot is read-only, but is written", ops.ingest, np.ones(D), frozen)
    one = ops.Combine([np.ones(D, np.float32)], np.ones(1))
    check_error(r"\[apply\] out is read-only, but is written", ops.apply, ops.Pass(make(), frozen, one))
    with pytest.raises(AffluxError, match=r"\[apply\] new_rows\[0\] is read-only, but is written"):
        ops.apply(ops.Pass(make(), make(), one, ops.CachedDifference(np.zeros(D), 1, [None], [frozen])))
    assert np.asarray(frozen).tolist() == [0.0] * D


def test_an_argument_keeps_a_buffer_alive_and_lets_it_go():
    pool = _engine.Pool(D, "float32", 2)
    ops.ingest(np.ones(D), _engine.Buffer(pool))
    assert (pool.held, pool.allocated) == (0, 1)
    buffer = _engine.Buffer(pool)
    view = np.asarray(buffer)
    del buffer
    assert (pool.held, pool.allocated) == (1, 1)
    del view
    assert pool.held == 0


def test_the_limit():
    pool = _engine.Pool(D, "bfloat16", 2)
    held = [_engine.Buffer(pool) for _ in range(2)]
    check_error("all 2 buffers of max_buffers are held", _engine.Buffer, pool)
    held.pop()
    assert _engine.Buffer(pool).size == D


@pytest.mark.parametrize("dtype", ["float16", "f4", ""])
def test_unknown_types(dtype):
    check_error(f"dtype is '{dtype}', must be float32, float64 or bfloat16", _engine.Pool, D, dtype, 0)
    check_error("must not be negative", _engine.Pool, -1, "float32", 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_versions(dtype):
    versions = Versions(D, 2, dtype=dtype)
    draft = versions.take()
    np.asarray(draft)[:] = 1
    published = versions.finished(draft)
    other = versions.take()
    check_error(r"all 2 versions of max_versions are held: release pulled params", versions.take)
    del other
    assert (versions.held, versions.allocated) == (1, 2)
    del published, draft
    assert versions.held == 0


def test_a_pool_lends_out_memory_that_it_was_lent():
    pool, own = _engine.Pool(D, "float32", 0), np.zeros(2 * D, np.float32)
    pool.lend(own[D:])
    view = np.asarray(_engine.Buffer(pool))
    view[:] = 7
    assert own.tolist() == [0.0] * D + [7.0] * D
    assert (pool.held, pool.allocated) == (1, 1)
    other = np.asarray(_engine.Buffer(pool))  # none is free: its own
    assert not np.shares_memory(other, own)
    place = view.ctypes.data
    del view
    assert np.asarray(_engine.Buffer(pool)).ctypes.data == place


def test_lent_memory_lives_as_long_as_its_pool():
    own = np.zeros(D, np.float32)
    pool = _engine.Pool(D, "float32", 0)
    pool.lend(own)
    references = sys.getrefcount(own)
    buffer = _engine.Buffer(pool)
    del pool
    assert sys.getrefcount(own) == references
    del buffer
    assert sys.getrefcount(own) == references - 1


def test_memory_that_does_not_fit_is_not_lent():
    pool = _engine.Pool(D, "float32", 0)
    for bad in (np.zeros(D - 1, np.float32), np.zeros(2 * D, np.float32)[::2], np.zeros((2, D), np.float32)):
        check_error(r"\[lend\] memory must be", pool.lend, bad)
    assert pool.allocated == 0
