"""New arrays of the library, dtype and device of an earlier array, which is not kept."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.arrays.interop import Array, gpu_of, is_cupy, is_torch, prepare, put, type_of


@dataclass(frozen=True, slots=True)
class Like:
    """The library, dtype and device of an array."""

    library: str  #: numpy, torch, cupy or jax
    dtype: Any  #: the library's own
    device: Any = None  #: torch's; the index of CuPy's

    @staticmethod
    def of(name: str, array: Array) -> "Like":
        """Return the likeness of an array; for an array of an unknown library, that of a NumPy array."""
        if is_torch(array):
            return _like("torch", array.dtype, array.device)
        if is_cupy(array):
            return _like("cupy", array.dtype, gpu_of(array))
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(array, jax.Array):
            return _like("jax", array.dtype)
        return _like("numpy", array.dtype if isinstance(array, np.ndarray) else np.dtype(type_of(name, array)))

    def shares(self, values: npt.NDArray[Any]) -> bool:
        """Return whether an array of this likeness can have the memory of these values."""
        if self.library == "torch":
            return bool(self.device.type == "cpu") and type_of("", self) == type_of("", values)
        return self.library in ("numpy", "jax") and bool(self.dtype == values.dtype)

    def wrapped(self, values: npt.NDArray[Any]) -> Array:
        """Return values of this dtype as an array of the library, which may share their memory."""
        if self.library == "torch":
            return sys.modules["torch"].from_numpy(values)
        return sys.modules["jax"].numpy.array(values) if self.library == "jax" else values

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return a new array to write to; in the place of JAX's, which cannot be written, NumPy's."""
        if self.library == "torch":
            return sys.modules["torch"].empty(shape, dtype=self.dtype, device=self.device)
        if self.library == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                return cupy.empty(shape, self.dtype)
        return np.empty(shape, self.dtype)

    def made_of(self, name: str, values: npt.NDArray[Any]) -> Array:
        """Return an array of these values, rounded half to even for integers. The array may share their memory."""
        if self.shares(values):
            return self.wrapped(values)
        out = self.empty(values.shape)
        put(out, prepare(name, out, values))
        return self.finished(out)

    def finished(self, array: Array) -> Array:
        """Return the result of `empty`, after it was written, as an array of the library."""
        return self.wrapped(array) if self.library == "jax" else array


_like = cache(Like)  # equal ones are one object
