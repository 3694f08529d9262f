"""The arrays of a version, as clients get them."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux import Layout, Pulled
from afflux.arrays.interop import on_host
from afflux.arrays.likeness import Like


class VersionArrays:
    """The arrays of one version, by name, and of the library and dtypes of the model's.

    Args:
        arrays: the initial model: arrays by name, or a torch module.
        layout: of the server.
    """

    def __init__(self, arrays: Any, layout: Layout | None) -> None:
        assert layout is not None  # the server was made with a tree
        named = arrays if isinstance(arrays, Mapping) else layout.arrays(arrays)
        likes = {name: Like.of(name, array) for name, array in named.items()}
        fields = {
            each.name: (each, parts is layout.buffers) for parts in (layout.fields, layout.buffers) for each in parts
        }
        self._places = [
            (name, like, slice(field.start, field.stop), field.shape, is_buffer)
            for name, like in likes.items()
            for field, is_buffer in (fields[name],)
        ]
        if any(like.library == "torch" for like in likes.values()):
            _silence_torch()

    def of(self, version: Pulled) -> dict[str, Any]:
        """Views of the version's params, as far as they have the model's dtypes, else copies.

        NumPy's are read-only. torch has no read-only tensors: whoever gets them must not write to them.
        """
        return self._made_of(version.params, version.buffers)

    def copied(self, version: Pulled) -> dict[str, Any]:
        """A copy of the version, which may be written to."""
        buffers = None if version.buffers is None else version.buffers.copy()
        return self._made_of(on_host(version.params, copy=True), buffers)

    def _made_of(self, params: Any, buffers: npt.NDArray[np.float64] | None) -> dict[str, Any]:
        sources: tuple[Any, Any] = (params, buffers)
        return {
            name: like.made_of(name, sources[is_buffer][place].reshape(shape))
            for name, like, place, shape, is_buffer in self._places
        }


def _silence_torch() -> None:
    """Has torch give its only warning about tensors of read-only memory where nobody sees it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.broadcast_to(np.float32(0), 1))
