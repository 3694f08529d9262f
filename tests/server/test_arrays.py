"""Arrays of other libraries and of none: buffer protocol, DLPack, ctypes, torch, JAX, sequences made on the fly."""

import ctypes
from multiprocessing import RawArray

import numpy as np
import pytest

from afflux import AffluxError, Layout, Server, ops
from afflux.rules import fedbuff
from conftest import bits, check_error, read_only
from test_errors import D, f32


class Fresh:
    """A sequence that makes its items when they are read: only the engine refers to them."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return np.full(self.size, i + 1, np.float32)


def test_sequences_that_make_their_items():
    gram = ops.gram(Fresh(7, 3000))
    assert gram.tolist() == [[3000.0 * (i + 1) * (j + 1) for j in range(7)] for i in range(7)]
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert ops.gram(matrix).tolist() == (matrix.astype(np.float64) @ matrix.T).tolist()
    out = f32(4)
    ops.apply(ops.Pass(np.zeros(4, np.float32), out, ops.Combine(matrix, np.array([1.0, 0.0, 2.0]))))
    assert out.tolist() == [16.0, 19.0, 22.0, 25.0]


def test_ctypes_and_shared_memory():
    for make in (ctypes.c_float * D, lambda *values: RawArray("f", values)):
        source, slot = make(*range(D)), make(*[0.0] * D)
        assert ops.ingest(source, slot).max == D - 1
        assert list(slot) == list(range(D))


class Exporter:
    """DLPack only, with a choice of protocol version."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("no such argument")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned):
    memory = np.arange(20, dtype=np.float32)
    slot = np.empty(8, np.float32)
    ops.ingest(Exporter(memory[4:12], versioned), Exporter(slot, versioned))
    assert slot.tolist() == list(range(4, 12))
    check_error("update is strided", ops.ingest, Exporter(memory[::2], versioned), f32(10))
    check_error("update has 2 dimensions", ops.ingest, Exporter(memory.reshape(4, 5), versioned), f32(20))
    check_error("not C-contiguous", ops.ingest, [f32(0), Exporter(memory.reshape(4, 5).T, versioned)], f32(20))
    whole = f32(20)
    ops.ingest([Exporter(memory.reshape(4, 1, 5), versioned)], whole)
    assert bits(whole) == bits(memory)
    check_error(r"slot (is read-only|does not give)", ops.ingest, memory, Exporter(read_only(f32(20)), versioned))


def test_torch_offsets():
    import torch

    slot = f32(4)
    ops.ingest(torch.arange(10, dtype=torch.float32)[3:7], slot)
    assert slot.tolist() == [3, 4, 5, 6]


def test_torch_tensors():
    import torch

    slot = torch.zeros(D)
    assert ops.ingest(torch.full((D,), 2.0, dtype=torch.float64), slot).sum_of_squares == 4.0 * D
    assert slot.tolist() == [2.0] * D
    brains = torch.arange(D).bfloat16()
    assert ops.ingest(brains, slot).max == D - 1
    assert ops.ingest([brains.reshape(2, 1, 4)], slot.bfloat16()).min == 0
    assert ops.gram([brains, brains])[0, 1] == (slot @ slot).item()
    assert ops.ingest([torch.ones(2, 3).half(), torch.ones(()), torch.ones(1, 1).t()], slot).sum_of_squares == D
    check_error("update is strided", ops.ingest, torch.zeros(2 * D)[::2], slot)
    for update in (torch.ones(D, requires_grad=True), [torch.nn.Parameter(torch.ones(D))]):
        assert ops.ingest(update, slot).sum_of_squares == D
    check_error(r"slot requires grad.*detach\(\) it", ops.ingest, slot, torch.zeros(D, requires_grad=True))
    check_error(r"update .*DLPack", ops.ingest, torch.zeros(D, device="meta"), slot)


def test_torch_tensors_that_are_not_what_dlpack_says():
    import torch

    slot = f32(4)
    shrunk = torch.ones(1000)[2:6]
    shrunk.untyped_storage().resize_(8)
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    for given in (shrunk, [shrunk]):
        check_error(r"update(\[0\])? has a storage of 8 bytes, which ends before the tensor", ops.ingest, given, slot)
    check_error("slot has a storage of 8 bytes", ops.ingest, f32(4), shrunk)
    for given in (negative, [negative]):
        check_error(r"update(\[0\])? has torch's negative bit set: resolve_neg\(\) it", ops.ingest, given, f32(1))
    assert Layout.of([np.ones(1)]).flatten([negative]).tolist() == [-2.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays(monkeypatch, dtype):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    import jax.numpy as jnp

    update = jnp.arange(D, dtype=dtype)
    slot = f32()
    for given in (update, [update[:3], update[3:].reshape(5, 1)]):
        ops.ingest(given, slot)
        assert slot.tolist() == list(range(D))
    check_error(r"slot (is read-only|does not give)", ops.ingest, f32(), update)
    if dtype != "float16":
        params = np.ones(D, np.float32)
        ops.apply(ops.Pass(params, params, ops.Combine([update], np.ones(1))))
        assert params.tolist() == list(range(1, D + 1))


def test_an_array_that_gives_its_memory_in_no_way():
    import ml_dtypes

    with pytest.raises(AffluxError, match=r"update does not give its memory through DLPack: DLPack only supports"):
        ops.ingest(np.ones(D, ml_dtypes.float8_e4m3fn), f32())


def test_bfloat16_of_numpy_is_read_and_written_where_it_lies():
    from ml_dtypes import bfloat16

    update, slot = np.arange(D).astype(bfloat16), np.empty(D, bfloat16)
    assert ops.ingest(update, slot).max == D - 1
    assert slot.tolist() == list(range(D))
    params = f32()
    ops.apply(ops.Pass(params, params, ops.Combine([slot], np.ones(1))))
    assert params.tolist() == list(range(1, D + 1))
    check_error("update is strided", ops.ingest, np.zeros(2 * D, bfloat16)[::2], slot)
    slot.setflags(write=False)
    check_error("slot is read-only", ops.ingest, update, slot)


def test_a_sequence_that_says_it_is_endless():
    check_error(r"\[gram\] vectors has 1000000000000 entries, at most 32768 are served", ops.gram, Fresh(10**12, 1))


@pytest.mark.parametrize("dtype", [np.int8, np.int64, bool])
def test_integers_are_refused_in_a_vector_and_in_a_tree_alike(dtype):
    """The codes of a quantized update are no update. A counter is a buffer, whose integers are taken."""
    codes, problem = np.ones(3, dtype), f"is {np.dtype(dtype).name}, expected float32, float64, float16 or bfloat16"
    flat = Server(fedbuff(buffer_size=1), np.zeros(3, np.float32))
    tree = Server(fedbuff(buffer_size=1), {"w": np.zeros(3, np.float32), "steps": np.array(7)})
    check_error(problem, flat.push, client=1, version=0, update=codes)
    for update in ({"w": codes}, {"w": codes[::1].reshape(3), "steps": np.array(8)}):
        with pytest.raises(AffluxError, match=rf"client 1's update: \[layout\] w {problem}"):
            tree.push(client=1, version=0, update=update, buffers={"steps": np.array(8)})
    check_error(rf"\[layout\] w {problem}", tree.push, client=1, version=0, model={"w": codes, "steps": np.array(8)})
    assert tree.push(client=1, version=0, model={"w": np.ones(3), "steps": np.array(8)}).status == "joined"
    for start in (codes, [codes]):
        with pytest.raises(AffluxError, match=problem):
            Server(fedbuff(), start, layout=None if start is codes else Layout.of(start, roles={"*": "trained"}))
