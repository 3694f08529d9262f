"""Arrays that no caller should hand in: odd shapes, types and memory, and objects that only look like arrays.

Every entry of `ARRAYS` is a function that makes a new object, because a call may change what it is given.
"""

import array
import ctypes
from functools import partial

import numpy as np
import torch

from hostile import ERRORS, D, Index, Raises, each, itself, or_raise

FLOAT32 = np.dtype("float32")


class Array:
    """Looks like an array: any shape and dtype, and methods that give or raise whatever."""

    def __init__(self, shape=(D,), dtype=FLOAT32, **given):
        self._shape, self._dtype, self._given = shape, dtype, given

    @property
    def shape(self):
        return or_raise(self._shape)

    @property
    def dtype(self):
        return or_raise(self._dtype)

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._given:
            raise AttributeError(name)
        return or_raise(self._given[name])


class ToNumpy(Array):
    """With `__array__`."""

    def __array__(self, dtype=None, copy=None):
        return or_raise(self._given["array"])


class Dlpack(Array):
    """With DLPack."""

    def __dlpack_device__(self):
        return or_raise(self._given.get("device", (1, 0)))

    def __dlpack__(self, **options):
        return or_raise(self._given["capsule"])


class Subclass(np.ndarray):
    """NumPy's, with methods that raise."""

    def __array_finalize__(self, other):
        pass

    def __array_function__(self, *args, **kwargs):
        raise RuntimeError("hostile function")

    def __array_ufunc__(self, *args, **kwargs):
        raise RuntimeError("hostile ufunc")


class Tensor(torch.Tensor):
    """torch's, with functions that raise."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("hostile torch function")


def _values(size=D, dtype="float32"):
    return np.linspace(-1, 1, size).astype(dtype)


def _unaligned():
    return np.frombuffer(bytearray(4 * D + 1), np.uint8)[1:].view(np.float32)


def _read_only():
    array = _values()
    array.flags.writeable = False
    return array


def _ones(kind):
    return torch.ones(D, dtype=kind)


def _matrix():
    return _values(4).reshape(2, 2)


ARRAYS = [
    *each(partial(np.ones, D), "f2", "f4", "f8", "i1", "u8", "c8", "?", "S3", "U2", ">f4", "g", "O", "M8[s]"),
    *each(_values, 0, 1, D - 1, D + 1, 2 * D, 1000),
    *each(lambda bad: np.array([0, 1, bad, 2, 3, 4], "f4"), np.nan, np.inf, -np.inf, 3e38, 1e-44),
    *each(partial(np.full, D), 1e308, 1e150, 1e39, np.nan, 5e-324),
    *(lambda: _values(2 * D)[::2], lambda: _values()[::-1], lambda: _values().reshape(D, 1)[:, 0]),
    *each(lambda shape: _values().reshape(shape), (2, 3), (1, 2, 3)),
    lambda: np.broadcast_to(np.float32(1), (D,)),
    *(lambda: np.float32(3), lambda: np.array(3.0), lambda: np.matrix(_values()), _unaligned, _read_only),
    lambda: np.ma.masked_array(_values(), np.arange(D) == 2),
    lambda: np.zeros(D, [("a", "f4")]),
    lambda: _values().view(Subclass),
    *each(np.array, [[], []], [None, "a"]),
    lambda: np.array([itself(list), 1], object),
    lambda: np.recarray((D,), [("a", "f4")]),
    lambda: np.broadcast_to(np.float32(1), (2**40,)),
    *each(lambda shape: memoryview(_values().reshape(shape)), D, (2, 3)),
    lambda: memoryview(_values())[::2],
    *(lambda: bytes(24), lambda: array.array("f", [1.0] * D), lambda: [1.0] * D),
    *(lambda: (ctypes.c_float * D)(), lambda: (ctypes.c_float * 3 * 2)()),
    *each(_ones, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64),
    *each(_ones, torch.float8_e4m3fn),
    *each(lambda kind: torch.ones(D, dtype=kind, requires_grad=True), torch.float32, torch.float64),
    lambda: torch.ones(D, requires_grad=True) * 2,
    *(lambda: torch.ones(2 * D)[::2], lambda: torch.ones(1).expand(D), lambda: torch.ones(2, 3).t()),
    *(lambda: torch.ones(D, device="meta"), lambda: torch.ones(D).to_sparse()),
    *each(torch.ones, (), 0, (D, 1)),
    lambda: torch.complex(torch.ones(D), torch.ones(D)).conj().imag,
    lambda: torch._neg_view(torch.ones(D)),
    lambda: torch.quantize_per_tensor(torch.ones(D), 0.1, 0, torch.qint8),
    *each(lambda kind: torch.nn.Parameter(_ones(kind)), torch.float32, torch.float64),
    lambda: torch.ones(D).as_subclass(Tensor),
    lambda: torch.empty(D).as_strided((D,), (0,)),
    *(lambda: torch.nn.Linear(2, 2), lambda: torch.nn.BatchNorm1d(2)),
    lambda: torch.full((D,), float("nan")),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: _ones(torch.float64).expand(1, D),
    *each(Array, None, "abc", (), (-5,), ("x",), (2**70,), (D, None), 3, [D], (1.5,), (Index(TypeError),)),
    *each(Array, RuntimeError, TypeError, ValueError, AttributeError),
    *each(partial(Array, (D,)), None, "float32", 3, "x", [], Raises(), np.float32),
    *each(partial(Array, (D,)), RuntimeError, TypeError, AttributeError),
    *each(lambda dtype: Array((2, 3), dtype, array=_values()), "float32", "int8"),
    *each(lambda value: ToNumpy(array=value), None, "x", 3, *ERRORS),
    *each(lambda dtype: ToNumpy(dtype=dtype, array=_values()), None, "float32", "bfloat16", RuntimeError),
    lambda: ToNumpy((D,), "int8", array=_values(3)),
    lambda: ToNumpy((D,), "int8", array=np.array([None] * D)),
    lambda: ToNumpy((D,), "bfloat16", array=RuntimeError),
    *each(lambda device: Dlpack(device=device, capsule=None), None, 3, (1,), (1, "x"), (99, 0), (2, 0), (2, 10**10)),
    *each(lambda device: Dlpack(device=device, capsule=None), (1, 2, 3), *ERRORS),
    *each(lambda capsule: Dlpack(capsule=capsule), None, "x", 3, *ERRORS),
    *each(lambda kind: Dlpack(capsule=np.ones(D, kind).__dlpack__()), "f4", "i4"),
    lambda: Dlpack((D,), "bfloat16", capsule=RuntimeError),
    lambda: Dlpack((3,), "float32", capsule=np.ones(D, "f4").__dlpack__()),
    lambda: Dlpack(capsule=np.ones((2, 3), "f4").__dlpack__()),
    *(lambda: {"w": _matrix(), "n": 5, "b": "x"}, lambda: {"w": Array((2, 2))}),
    *(lambda: [_values(2), itself(list)], lambda: {"w": _matrix(), "b": _values(2)}),
    lambda: {"a.b": _values(2), "a": {"b": _values(2)}},
    lambda: {"w": torch.ones(2, 2, requires_grad=True), "b": torch.ones(2), "running_mean": np.ones(2)},
]
