"""Devices of a server's vectors: the host's memory, or a GPU, with arrays of the library of the initial params.

On a GPU that library allocates every vector, and frees the vector when its last reference is dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux._engine import Buffer, Pool
from afflux.arrays.interop import Array


class Device(ABC):
    """The allocation of vectors (d,) on one device, and copies of them.

    A `dtype` is a name; bfloat16 and uint8 are possible. When a method returns, any stream of the GPU may read the
    values that the method has written.
    """

    name: str
    index = -1  #: the index of a GPU
    alone: str | None = None  #: what a forked child cannot use; None: the child has its own copy

    @abstractmethod
    def pool(self, size: int, dtype: str, limit: int, until_read: int = 0) -> Any:
        """Return a pool of vectors, of which at most `limit` are in use at once; 0: any number.

        `until_read` is the approximate number of bytes that pass through the caches between the ingest into a vector
        and the round that reads the vector.

        Raises:
            UnavailableError: the library has no such type.
        """

    @abstractmethod
    def take(self, pool: Any) -> Any:
        """Return the next vector of a pool, for the engine. Raises AffluxError if there is none."""

    @abstractmethod
    def empty(self, size: int, dtype: str) -> Any:
        """Return a new vector that begins on a cache line."""

    @abstractmethod
    def full(self, size: int, value: float, dtype: str) -> Any:
        """Return a new vector of equal elements."""

    @abstractmethod
    def fill(self, vector: Any, values: npt.NDArray[Any]) -> None:
        """Write the values of a NumPy array of the same type (uint16 for bfloat16) into a vector of this device."""

    @abstractmethod
    def copy(self, vector: Any) -> Any:
        """Return a copy of the vector."""

    def owns(self, array: Array) -> bool:
        """Return whether the array's library is that of this device's arrays; on the host always True."""
        return True

    def alias(self, vector: Any) -> Any:
        """Return the vector for a caller: on the host the vector itself, on a GPU a new object with the same memory.
        Changes of the new object (requires_grad_, resize_) do not affect the server's object.
        """
        return vector

    def read_only(self, vector: Any) -> Any:
        """Return a read-only view; a copy if the library has no read-only arrays."""
        return self.copy(vector)

    @abstractmethod
    def wait(self) -> None:
        """Wait until the work that this thread has queued in the library is done."""

    def moved(self, values: npt.NDArray[Any]) -> Any:
        """Return a new vector with the values of a NumPy array."""
        vector = self.empty(values.size, values.dtype.name)
        self.fill(vector, values)
        return vector


#: Bytes of a cache line and of a page. Allocators begin all vectors of _LARGE bytes and more at the same offset in a
#: page.
_LINE, _PAGE, _LARGE = 64, 4096, 1 << 17
_places = count()


def _placed(make: Callable[[int, type[np.uint8]], npt.NDArray[np.uint8]], size: int, dtype: str) -> Any:
    """Return a vector that begins on a cache line. Successive large vectors begin at different lines of their pages.

    Vectors with the same offset in their pages compete for the few ways of one set of the first cache (bench/NOTES.md).
    """
    length = size * np.dtype(dtype).itemsize
    period, place = _LINE, 0
    if length >= _LARGE:  # 43 lines apart: no common factor with a page's 64
        period, place = _PAGE, next(_places) * 43 * _LINE % _PAGE
    room = make(length + period, np.uint8)
    start = (place - room.ctypes.data) % period
    return room[start : start + length].view(dtype)


class Host(Device):
    """The CPU: NumPy's arrays, and the engine's buffers."""

    name = "the CPU"

    def pool(self, size: int, dtype: str, limit: int, until_read: int = 0) -> Pool:
        return Pool(size, dtype, limit, until_read=until_read)

    def take(self, pool: Any) -> Buffer:
        return Buffer(pool)

    def empty(self, size: int, dtype: str) -> Any:
        return _placed(np.empty, size, dtype)

    def full(self, size: int, value: float, dtype: str) -> Any:
        vector = _placed(np.empty if value else np.zeros, size, dtype)  # zeros take no memory before they are used
        if value:
            vector.fill(value)
        return vector

    def fill(self, vector: Any, values: npt.NDArray[Any]) -> None:
        np.copyto(np.asarray(vector), values)

    def copy(self, vector: Any) -> Any:
        return vector.copy()

    def read_only(self, vector: Any) -> Any:
        view = vector.view()
        view.flags.writeable = False
        return view

    def wait(self) -> None:
        pass


#: The host is the same for all servers.
HOST = Host()


def as_list(arrays: "Array | list[Array]") -> list[Array]:
    """Return the arrays as a list; a single array becomes a list of one."""
    return arrays if isinstance(arrays, list) else [arrays]
