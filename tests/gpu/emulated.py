"""The CUDA kernels' bodies where there is no GPU: the extension _engine_emulated runs them on the host, block by
block, over host memory that says it is a GPU's. All arrays that go into the engine's operations go in as such,
but within `on_host()`.

    AFFLUX_EMULATED=path/of/_engine.so python tests/gpu/emulated.py     prints digest.py's digests of operations
    AFFLUX_EMULATED=path/of/_engine.so python -m pytest -p emulated ...
"""

import ctypes
import importlib.util
import json
import os
import sys
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace

VERSIONED = b"dltensor_versioned"
FLOAT, BFLOAT, UINT = 2, 4, 1


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class OnCuda:
    """An array's memory as that of device cuda:0."""

    def __init__(self, array, dtype):
        self.array = array  # kept alive
        code = BFLOAT if dtype == "bfloat16" else {"f": FLOAT, "u": UINT}[array.dtype.kind]
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
        pointers = (ctypes.addressof(numbers) for numbers in (self.shape, self.strides))
        address = array.ctypes.data if array.size else None  # as torch's
        tensor = Tensor(address, 2, 0, array.ndim, code, array.itemsize * 8, 1, *pointers, 0)
        self.managed = Managed(1, 0, None, None, 0 if array.flags.writeable else 1, tensor)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream, max_version):
        assert stream == 1  # the default stream
        return new_capsule(ctypes.addressof(self.managed), VERSIONED, None)


moving = True


@contextmanager
def on_host():
    """Arrays stay what they are."""
    global moving
    moving = False
    try:
        yield
    finally:
        moving = True


def on_cuda(value, engine):
    """Arrays as OnCuda, in lists too; everything else as it is."""
    if not moving:
        return value
    if type(value) in (list, tuple):
        return type(value)(on_cuda(item, engine) for item in value)
    if isinstance(value, engine.Buffer):
        return OnCuda(np.asarray(value), value.dtype)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fu" and value.dtype.isnative:
        return OnCuda(value, value.dtype.name)
    return value


def install(path):
    """Makes this the engine of the package, which must not have been imported; its operations run on the device."""
    spec = importlib.util.spec_from_file_location("afflux._engine", path)
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    sys.modules["afflux._engine"] = engine
    ingest, gram, inner, apply = engine.ingest, engine.gram, engine.inner, engine.apply
    encode, decode = engine.encode, engine.decode

    def moved(value):
        return on_cuda(value, engine)

    def apply_moved(round, *rest, **options):
        combine = replace(round.combine, updates=moved(round.combine.updates))
        cache, kept = round.calibrate, round.rule_vectors
        if cache is not None:
            places = {name: moved(getattr(cache, name)) for name in ("sum", "sum_out", "rows", "new_rows")}
            cache = replace(cache, **places)
        if kept is not None:
            kept = replace(kept, vectors=moved(kept.vectors), outs=moved(kept.outs))
        places = {name: moved(getattr(round, name)) for name in ("params", "out", "states", "states_out")}
        apply(replace(round, **places, combine=combine, calibrate=cache, rule_vectors=kept), *rest, **options)

    def ingest_moved(update, slot, threads, conversion=None, beside=None):
        if conversion is not None:
            conversion = (*conversion[:2], moved(conversion[2]), conversion[3])
        return ingest(moved(update), moved(slot), threads, conversion, beside)

    engine.ingest = ingest_moved
    engine.gram = lambda vectors, out, threads: gram(moved(list(vectors)), out, threads)
    engine.inner = lambda vectors, weights, memory, *rest: inner(moved(list(vectors)), weights, moved(memory), *rest)
    engine.apply = apply_moved
    engine.encode = lambda codec, vector, row, *rest: encode(codec, moved(vector), moved(row), *rest)
    engine.decode = lambda codec, row, vector, *rest: decode(codec, moved(row), moved(vector), *rest)


install(os.environ["AFFLUX_EMULATED"])

if __name__ == "__main__":
    from afflux.selftest import digest

    print(json.dumps(digest.operation_parts(1)))
