"""The arrays of a version, in the form that clients get."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from afflux import Pulled, Server
from afflux.arrays import trees
from afflux.arrays.fields import from_words
from afflux.arrays.interop import on_host
from afflux.arrays.likeness import Like
from afflux.ops.errors import AffluxError

T = TypeVar("T")


def require_names(arrays: Any) -> None:
    """Raise AffluxError unless the initial model is a torch module, or a mapping of arrays that is not nested."""
    nested = isinstance(arrays, Mapping) and any(isinstance(array, Mapping | list | tuple) for array in arrays.values())
    if nested or not (isinstance(arrays, Mapping) or hasattr(arrays, "named_parameters")):
        raise AffluxError("[model] the initial model must be arrays by name, not nested, or a torch module")


class VersionArrays:
    """The maker of a version's arrays, by name, in the library and the dtypes of the model.

    Args:
        arrays: the initial model: arrays by name, or a torch module.
        server: the server of the model.
    """

    def __init__(self, arrays: Any, server: Server) -> None:
        layout = server.layout
        assert layout is not None  # the server was made with arrays by name
        leaves = layout.arrays(arrays)
        self._layout, self._constants = layout, server._adapter.constants
        # The layout of a store may have another order.
        self._names = [*arrays] if isinstance(arrays, Mapping) else trees.names(layout.nesting)
        self._likes = {name: Like.of(name, array) for name, array in leaves.items()}
        self._places = [
            (
                field.name,
                self._likes[field.name],
                slice(field.start, field.stop),
                field.shape,
                field.role != "trained",
                _limits(self._likes[field.name].dtype),
            )
            for field in (*layout.fields, *layout.buffers)
        ]
        self._is_in_order = self._names == [place[0] for place in self._places]
        self._limited = [place for place in self._places if place[-1] is not None]
        if any(like.library == "torch" for like in self._likes.values()):
            _silence_torch()

    def of(self, version: Pulled) -> dict[str, Any]:
        """Return views of the version's params where the model has their dtype, otherwise copies.

        NumPy arrays are read-only. torch has no read-only tensors: callers must not write to them.
        """
        return self._made_of(version.params, version.buffers, writable=False)

    def copied(self, version: Pulled) -> dict[str, Any]:
        """Return a writable copy of the version."""
        buffers = None if version.buffers is None else version.buffers.copy()
        return self._made_of(on_host(version.params, copy=True), buffers, writable=True)

    def _made_of(self, params: Any, buffers: npt.NDArray[np.float64] | None, *, writable: bool) -> dict[str, Any]:
        sources: tuple[Any, Any] = (params, buffers)
        made = {}
        for name, like, place, shape, is_buffer, limits in self._places:
            values = sources[is_buffer][place]
            # A step may exceed the range of float16, and an older store may hold integers beyond their range.
            values = values if limits is None else values.clip(*limits)
            made[name] = like.made_of(name, values.reshape(shape))
        if buffers is not None:
            for field in self._layout.copied:
                made[field.name] = self._likes[field.name].made_of(field.name, from_words(field, buffers))
        made.update(self._constants.items(writable=writable))
        made.update((alias.name, made[str(alias.of)]) for alias in self._layout.aliases if alias.of in made)
        return made if self._is_in_order else {name: made[name] for name in self._names if name in made}

    def check(self, arrays: Any, buffers: npt.NDArray[np.float64] | None) -> None:
        """Check that a reply's values fit the dtypes of the model.

        Args:
            arrays: the arrays of the reply.
            buffers: replace the reply's own buffers, if not None.

        Raises:
            AffluxError: an array of float16 or of integers cannot hold the new values.
        """
        if not self._limited or not isinstance(arrays, Mapping):
            return
        for name, like, place, _, is_buffer, limits in self._limited:
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
