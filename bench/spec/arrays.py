"""The memory of a run's arrays: NumPy's on the host, torch's on a GPU, for the same formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

Shape = int | tuple[int, ...]
#: NumPy's on the host, torch's on a GPU.
Vector = Any


class Host:
    """NumPy arrays that begin at a cache line, and torch tensors over their memory."""

    def empty(self, shape: Shape, dtype: npt.DTypeLike = np.float32) -> Vector:
        """Return memory that begins at a cache line, as a server's slots and torch's tensors do.

        NumPy's large arrays begin 16 bytes later, which makes every sweep a fifth slower.
        """
        amount = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = np.empty(amount + 64, np.uint8)
        first = -memory.ctypes.data % 64
        return memory[first : first + amount].view(dtype).reshape(shape)

    def filled(self, shape: Shape, value: float, dtype: npt.DTypeLike = np.float32) -> Vector:
        """Return memory with this value, all of whose pages were written."""
        array = self.empty(shape, dtype)
        array[...] = value
        return array

    def copied(self, array: Vector) -> Vector:
        """Return a copy of an array."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    @contextmanager
    def written(self, vector: Vector) -> Iterator[npt.NDArray[Any]]:
        """Yield a NumPy array; at the end of the block, the vector gets its values."""
        yield vector

    def array(self, array: Vector) -> npt.NDArray[Any]:
        """Return a NumPy array over the same memory."""
        return np.asarray(array)

    def tensor(self, array: Vector) -> Any:
        """Return a torch tensor over the same memory; for small arrays on the host (weights), a copy on the GPU."""
        import torch

        return torch.from_numpy(array)

    def cupy(self, array: Vector) -> Any:
        """Return a CuPy array, in the same way."""
        raise TypeError("CuPy's arrays are on a GPU")


class Gpu(Host):
    """torch tensors on a GPU, on the device of the tensors that `put` makes."""

    def __init__(self, put: Callable[[npt.NDArray[Any]], Any]) -> None:
        self._put = put

    @contextmanager
    def written(self, vector: Vector) -> Iterator[npt.NDArray[Any]]:
        import torch

        values = np.empty(vector.shape, str(vector.dtype).removeprefix("torch."))
        yield values
        vector.copy_(torch.from_numpy(values))

    def empty(self, shape: Shape, dtype: npt.DTypeLike = np.float32) -> Vector:
        import torch

        return self._put(np.empty(0)).new_empty(shape, dtype=getattr(torch, np.dtype(dtype).name))

    def copied(self, array: Vector) -> Vector:
        return array.clone()

    def array(self, array: Vector) -> Vector:
        """Return the tensor itself, because NumPy cannot read a GPU's memory."""
        return array

    def tensor(self, array: Vector) -> Any:
        return self._put(array) if isinstance(array, np.ndarray) else array

    def cupy(self, array: Vector) -> Any:
        import cupy

        return cupy.from_dlpack(self.tensor(array))


HOST = Host()


#: Converts an array for a library; one of the functions below.
Conversion = Callable[[Host, Vector], Any]


def as_numpy(place: Host, array: Vector) -> Any:
    return place.array(array)


def as_tensor(place: Host, array: Vector) -> Any:
    return place.tensor(array)


def as_cupy(place: Host, array: Vector) -> Any:
    return place.cupy(array)
