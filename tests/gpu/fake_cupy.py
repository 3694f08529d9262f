"""What afflux uses of CuPy, over the emulated device (emulated.py), whose memory is the host's: for processes that have
neither. `install` makes it their `cupy`.
"""

import mmap
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

import fake_cuda
from emulated import OnCuda


class ndarray(mmap.mmap):
    """Closed, it has a buffer protocol that fails, as CuPy's arrays have since version 14."""

    def __new__(cls, *_):
        closed = super().__new__(cls, -1, 1)
        closed.close()
        return closed

    def __init__(self, host, base=None):
        self.host = host
        self.base = base
        self.data = SimpleNamespace(ptr=host.ctypes.data)
        self.shape, self.dtype, self.size, self.nbytes = host.shape, host.dtype, host.size, host.nbytes
        self.strides, self.itemsize = host.strides, host.itemsize
        self._exported = OnCuda(host, host.dtype.name) if host.dtype.kind in "fu" else None

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.data.ptr, False), "shape": self.shape}

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream, max_version=None):
        return self._exported.__dlpack__(stream=stream, max_version=max_version)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self):
        return len(self.host)

    def __getitem__(self, key):
        return ndarray(self.host[key], self if self.base is None else self.base)

    def __setitem__(self, key, value):
        assert isinstance(value, ndarray)
        np.copyto(self.host[key], value.host, casting="unsafe")

    def reshape(self, *shape):
        return ndarray(self.host.reshape(*shape), self if self.base is None else self.base)

    def astype(self, dtype, order="K", copy=True):
        return ndarray(self.host.astype(dtype, order=order)) if copy or self.dtype != dtype else self

    def get(self, out=None):
        if out is None:
            return self.host.copy()
        assert (out.dtype, out.shape) == (self.dtype, self.shape)
        out[...] = self.host
        return out

    def set(self, values, stream=None):
        assert values.dtype == self.dtype
        if stream is None:
            self.host[...] = values
        else:
            stream.give(lambda: np.copyto(self.host, values))

    def copy(self):
        return _moved(self.host)


ndarray.__module__ = "cupy"


def empty(shape, dtype="float64"):
    """Garbage, on a cache line."""
    room = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, 0xA5, np.uint8)
    start = -room.ctypes.data % 64
    return ndarray(room[start : start + room.size - 64].view(dtype).reshape(shape))


def _moved(host):
    array = empty(host.shape, host.dtype)
    array.host[...] = host
    return array


def full(shape, value, dtype="float64"):
    array = empty(shape, dtype)
    array.host[...] = value
    return array


def asarray(array):
    return array if isinstance(array, ndarray) else _moved(np.asarray(array))


STREAM = SimpleNamespace(ptr=0, synchronize=lambda: None)
# zarr's plugin of pytest queries the runtime, and must find no device.
RUNTIME = SimpleNamespace(getDeviceCount=lambda: 0, CUDARuntimeError=RuntimeError)
cuda = SimpleNamespace(
    Device=lambda index: nullcontext(),
    Stream=fake_cuda.Stream,
    alloc_pinned_memory=bytearray,
    get_current_stream=lambda device=-1: STREAM,
    runtime=RUNTIME,
)


def install():
    sys.modules["cupy"] = sys.modules[__name__]
