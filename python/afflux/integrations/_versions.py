"""The arrays of a version, in the form that clients get."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from afflux import Pulled, Server
from afflux.arrays import trees
from afflux.arrays.interop import on_host
from afflux.arrays.likeness import Like
from afflux.arrays.modules import is_module
from afflux.ops.errors import AffluxError

T = TypeVar("T")


def require_names(arrays: Any) -> None:
    """Raise AffluxError unless the initial model is a torch module, or a mapping of arrays that is not nested."""
    nested = isinstance(arrays, Mapping) and any(isinstance(array, Mapping | list | tuple) for array in arrays.values())
    if nested or not (isinstance(arrays, Mapping) or is_module(arrays)):
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
        self.layout, self._server = layout, server
        # The layout of a store may have another order.
        self._names = [*arrays] if isinstance(arrays, Mapping) else trees.names(layout.nesting)
        self._likes = {name: Like.of(name, array) for name, array in layout.arrays(arrays).items()}
        fields = {field.name: field for field in (*layout.fields, *layout.buffers)}
        limits = {name: _limits(self._likes[name].dtype) for name in fields}
        self._limits = {name: (fields[name], pair) for name, pair in limits.items() if pair is not None}
        if any(like.library == "torch" for like in self._likes.values()):
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
        arrays = {}
        for field, values in self.layout._pieces_of(params, buffers):
            if field.name in self._limits:
                # A step may exceed the range of float16, and an older store may hold integers beyond their range.
                values = values.reshape(-1).clip(*self._limits[field.name][1]).reshape(field.shape)
            arrays[field.name] = self._likes[field.name].made_of(field.name, values)
        arrays.update(self._server.constants)
        arrays.update((alias.name, arrays[alias.of]) for alias in self.layout.aliases if alias.of in arrays)
        return arrays if [*arrays] == self._names else {name: arrays[name] for name in self._names if name in arrays}

    def check(self, arrays: Mapping[str, Any], buffers: npt.NDArray[np.float64] | None) -> None:
        """Check that a reply's values fit the dtypes of the model.

        Args:
            arrays: the arrays of the reply.
            buffers: replace the reply's own buffers, if not None.

        Raises:
            AffluxError: an array of float16 or of integers cannot hold the new values.
        """
        for name, (field, (low, high)) in self._limits.items():
            if name not in arrays:
                continue
            values = arrays[name] if buffers is None or field.role == "trained" else buffers[field.start : field.stop]
            dtype = self._likes[name].dtype
            if getattr(values, "dtype", None) != dtype:
                host = np.asarray(on_host(values))
                if host.size and (host.min() < low or host.max() > high):
                    raise AffluxError(f"[model] {name} is {dtype}, which cannot hold values up to {abs(host).max()}")


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
    if not kind.startswith(("int", "uint")):
        return {"bool": (0.0, 1.0), "float16": (-65504.0, 65504.0)}.get(kind)
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return float(low), float(high) if int(float(high)) == high else float(np.nextafter(float(high), 0.0))


def _silence_torch() -> None:
    """Trigger and hide the warning that torch gives once, for the first tensor of read-only memory."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.broadcast_to(np.float32(0), 1))
