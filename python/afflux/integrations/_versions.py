"""The arrays of a version, in the form that clients get."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from afflux import Layout, Pulled
from afflux.arrays.interop import on_host
from afflux.arrays.likeness import Like
from afflux.ops.errors import AffluxError
from afflux.server.inputs import is_tree

T = TypeVar("T")


class VersionArrays:
    """The maker of a version's arrays, by name, in the library and the dtypes of the model.

    Args:
        arrays: the initial model: arrays by name, or a torch module.
        layout: the layout of the model.

    Raises:
        AffluxError: the arrays have no names, or are nested.
    """

    def __init__(self, arrays: Any, layout: Layout) -> None:
        named = arrays if isinstance(arrays, Mapping) else layout.arrays(arrays)
        likes = {name: Like.of(name, array) for name, array in named.items()}
        fields = {
            each.name: (each, parts is layout.buffers) for parts in (layout.fields, layout.buffers) for each in parts
        }
        if not is_tree(arrays) or not likes.keys() <= fields.keys():
            raise AffluxError("[model] the initial model must be arrays by name, not nested, or a torch module")
        self._places = [
            (name, like, slice(field.start, field.stop), field.shape, is_buffer, _limits(like.dtype))
            for name, like in likes.items()
            for field, is_buffer in (fields[name],)
        ]
        self._limited = [place for place in self._places if place[-1] is not None]
        if any(like.library == "torch" for like in likes.values()):
            _silence_torch()

    def of(self, version: Pulled) -> dict[str, Any]:
        """Return views of the version's params where the model has their dtype, otherwise copies.

        NumPy arrays are read-only. torch has no read-only tensors: callers must not write to them.
        """
        return self._made_of(version.params, version.buffers)

    def copied(self, version: Pulled) -> dict[str, Any]:
        """Return a writable copy of the version."""
        buffers = None if version.buffers is None else version.buffers.copy()
        return self._made_of(on_host(version.params, copy=True), buffers)

    def _made_of(self, params: Any, buffers: npt.NDArray[np.float64] | None) -> dict[str, Any]:
        sources: tuple[Any, Any] = (params, buffers)
        made = {}
        for name, like, place, shape, is_buffer, limits in self._places:
            values = sources[is_buffer][place]
            # A step may exceed the range of float16, and an older store may hold integers beyond their range.
            values = values if limits is None else values.clip(*limits)
            made[name] = like.made_of(name, values.reshape(shape))
        return made

    def check(self, arrays: Any, buffers: npt.NDArray[np.float64] | None) -> None:
        """Check that a reply's values fit the dtypes of the model.

        Args:
            arrays: the arrays of the reply.
            buffers: replace the reply's own buffers, if not None.

        Raises:
            AffluxError: an array of float16 or of integers cannot hold the new values.
        """
        for name, like, place, _, is_buffer, limits in self._limited if isinstance(arrays, Mapping) else ():
            if limits is None or name not in arrays:
                continue
            values = arrays[name] if buffers is None or not is_buffer else buffers[place]
            if getattr(values, "dtype", None) == like.dtype:
                continue
            found = np.asarray(on_host(values))
            if found.size and (found.min() < limits[0] or found.max() > limits[1]):
                raise AffluxError(f"[model] {name} is {like.dtype}, which cannot hold values up to {abs(found).max()}")


class OncePerVersion(Generic[T]):
    """A cache of one message that is made from a version, for all clients that get this version one after the other."""

    def __init__(self, make: Callable[[Pulled], T]) -> None:
        self._make = make
        self._last: tuple[int, T] | None = None

    def __call__(self, version: Pulled) -> T:
        if self._last is None or self._last[0] != version.version:
            self._last = version.version, self._make(version)
        return self._last[1]


def _limits(dtype: Any) -> tuple[float, float] | None:
    """Return the least and the largest float64 of an array of float16 or of integers; None for other dtypes."""
    kind = str(dtype).removeprefix("torch.")
    if kind == "bool":
        return 0.0, 1.0
    if kind == "float16":
        return -65504.0, 65504.0
    if not kind.startswith(("int", "uint")):
        return None
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return float(low), float(high) if int(float(high)) == high else float(np.nextafter(float(high), 0.0))


def _silence_torch() -> None:
    """Trigger and hide the warning that torch gives once, for the first tensor of read-only memory."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.broadcast_to(np.float32(0), 1))
