"""Arrays that no caller should hand in: odd shapes, types and memory, and objects that only look like arrays.

Every entry of `ARRAYS` is a function that makes a new object, because a call may change what it is given.
"""

import array
import ctypes

import numpy as np
import torch

from hostile import ERRORS, D, Index, Raises, itself, or_raise

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


ARRAYS = [
    *(
        lambda kind=kind: np.ones(D, kind)
        for kind in ("f2", "f4", "f8", "i1", "u8", "c8", "?", "S3", "U2", ">f4", "g", "O", "M8[s]")
    ),
    *(lambda size=size: _values(size) for size in (0, 1, D - 1, D + 1, 2 * D, 1000)),
    *(lambda bad=bad: np.array([0, 1, bad, 2, 3, 4], "f4") for bad in (np.nan, np.inf, -np.inf, 3e38, 1e-44)),
    *(lambda bad=bad: np.full(D, bad) for bad in (1e308, 1e150, 1e39, np.nan, 5e-324)),
    lambda: _values(2 * D)[::2],
    lambda: _values()[::-1],
    lambda: _values().reshape(2, 3),
    lambda: _values().reshape(1, 2, 3),
    lambda: _values().reshape(D, 1)[:, 0],
    lambda: np.broadcast_to(np.float32(1), (D,)),
    lambda: np.float32(3),
    lambda: np.array(3.0),
    lambda: np.ma.masked_array(_values(), np.arange(D) == 2),
    lambda: np.matrix(_values()),
    _unaligned,
    _read_only,
    lambda: np.zeros(D, [("a", "f4")]),
    lambda: _values().view(Subclass),
    lambda: np.array([[], []]),
    lambda: np.array([None, "a"]),
    lambda: np.array([itself(list), 1], object),
    lambda: np.recarray((D,), [("a", "f4")]),
    lambda: np.broadcast_to(np.float32(1), (2**40,)),
    lambda: memoryview(_values()),
    lambda: memoryview(_values().reshape(2, 3)),
    lambda: memoryview(_values())[::2],
    lambda: bytes(24),
    lambda: array.array("f", [1.0] * D),
    lambda: (ctypes.c_float * D)(),
    lambda: (ctypes.c_float * 3 * 2)(),
    lambda: [1.0] * D,
    *(
        lambda kind=kind: torch.ones(D, dtype=kind)
        for kind in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int32,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    ),
    lambda: torch.ones(D, requires_grad=True),
    lambda: torch.ones(D, dtype=torch.float64, requires_grad=True),
    lambda: torch.ones(D, requires_grad=True) * 2,
    lambda: torch.ones(2 * D)[::2],
    lambda: torch.ones(1).expand(D),
    lambda: torch.ones(D, device="meta"),
    lambda: torch.ones(D).to_sparse(),
    lambda: torch.ones(2, 3).t(),
    lambda: torch.ones(()),
    lambda: torch.ones(0),
    lambda: torch.complex(torch.ones(D), torch.ones(D)).conj().imag,
    lambda: torch._neg_view(torch.ones(D)),
    lambda: torch.quantize_per_tensor(torch.ones(D), 0.1, 0, torch.qint8),
    lambda: torch.nn.Parameter(torch.ones(D)),
    lambda: torch.ones(D).as_subclass(Tensor),
    lambda: torch.empty(D).as_strided((D,), (0,)),
    lambda: torch.ones(D, 1),
    lambda: torch.nn.Linear(2, 2),
    lambda: torch.nn.BatchNorm1d(2),
    lambda: torch.full((D,), float("nan")),
    lambda: torch.nn.Parameter(torch.ones(D, dtype=torch.float64)),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.ones(D, dtype=torch.float64).expand(1, D),
    *(
        lambda shape=shape: Array(shape)
        for shape in (
            None,
            "abc",
            (),
            (-5,),
            ("x",),
            (2**70,),
            (D, None),
            3,
            [D],
            (1.5,),
            (Index(TypeError),),
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
        )
    ),
    *(
        lambda dtype=dtype: Array((D,), dtype)
        for dtype in (None, "float32", 3, "x", [], Raises(), np.float32, RuntimeError, TypeError, AttributeError)
    ),
    *(lambda dtype=dtype: Array((2, 3), dtype, array=_values()) for dtype in ("float32", "int8")),
    *(lambda value=value: ToNumpy(array=value) for value in (None, "x", 3, *ERRORS)),
    *(
        lambda value=value: ToNumpy(dtype=value, array=_values())
        for value in (None, "float32", "bfloat16", RuntimeError)
    ),
    lambda: ToNumpy((D,), "int8", array=_values(3)),
    lambda: ToNumpy((D,), "int8", array=np.array([None] * D)),
    lambda: ToNumpy((D,), "bfloat16", array=RuntimeError),
    *(
        lambda value=value: Dlpack(device=value, capsule=None)
        for value in (None, 3, (1,), (1, "x"), (99, 0), (2, 0), (2, 10**10), (1, 2, 3), *ERRORS)
    ),
    *(lambda value=value: Dlpack(capsule=value) for value in (None, "x", 3, *ERRORS)),
    lambda: Dlpack(capsule=np.ones(D, "f4").__dlpack__()),
    lambda: Dlpack(capsule=np.ones(D, "i4").__dlpack__()),
    lambda: Dlpack((D,), "bfloat16", capsule=RuntimeError),
    lambda: Dlpack((3,), "float32", capsule=np.ones(D, "f4").__dlpack__()),
    lambda: Dlpack(capsule=np.ones((2, 3), "f4").__dlpack__()),
    lambda: {"w": _values(4).reshape(2, 2), "n": 5, "b": "x"},
    lambda: {"w": Array((2, 2))},
    lambda: [_values(2), itself(list)],
    lambda: {"w": _values(4).reshape(2, 2), "b": _values(2)},
    lambda: {"a.b": _values(2), "a": {"b": _values(2)}},
    lambda: {"w": torch.ones(2, 2, requires_grad=True), "b": torch.ones(2), "running_mean": np.ones(2)},
]
