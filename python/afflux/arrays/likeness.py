"""New arrays of the library, dtype and device of an earlier array, which is not kept."""

import sys
from dataclasses import dataclass
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

    @classmethod
    def of(cls, name: str, array: Array) -> "Like":
        """Return the likeness of an array; for an array of an unknown library, that of a NumPy array."""
        if is_torch(array):
            return cls("torch", array.dtype, array.device)
        if is_cupy(array):
            return cls("cupy", array.dtype, gpu_of(array))
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(array, jax.Array):
            return cls("jax", array.dtype)
        return cls("numpy", array.dtype if isinstance(array, np.ndarray) else np.dtype(type_of(name, array)))

    def made_of(self, name: str, values: npt.NDArray[Any]) -> Array:
        """Return an array of these values, rounded half to even for integers. The array may share their memory."""
        if self.library == "jax":
            own = Like("numpy", np.dtype(self.dtype)).made_of(name, values)
            return sys.modules["jax"].numpy.array(own)
        if self.library == "torch":
            import torch

            shared = torch.from_numpy(values)
            if (shared.dtype, shared.device) == (self.dtype, self.device):
                return shared
            out: Array = torch.empty(values.shape, dtype=self.dtype, device=self.device)
        elif self.library == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device):
                out = cupy.empty(values.shape, self.dtype)
        elif values.dtype == self.dtype:
            return values
        else:
            out = np.empty(values.shape, self.dtype)
        put(out, prepare(name, out, values))
        return out
