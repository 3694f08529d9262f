"""What a client has sent, in a form that the server's `push` reads without an error that it takes for its own."""

from collections.abc import Mapping
from typing import Any, NoReturn

from afflux.arrays.interop import own_arrays
from afflux.ops.errors import AffluxError


def own_dict(arrays: Any) -> Any:
    """The arrays of a reply in a dict, with their shapes and dtypes read: what raises there is the client's fault."""
    if not isinstance(arrays, Mapping):
        return arrays
    found = dict(arrays)
    if not set(map(type, found.values())) <= own_arrays():
        for array in found.values():
            getattr(array, "shape", None), getattr(array, "dtype", None)
    return found


class Unreadable(Mapping[str, Any]):
    """The model of a reply that cannot be read. The server that reads it counts the error, and keeps the reason."""

    def __init__(self, error: Exception) -> None:
        # An AffluxError passes through the layout's messages as it is. Never a MemoryError or an OSError, which `push`
        # takes for the server's own.
        kind = type(error).__name__
        try:
            self._reason = str(error) if isinstance(error, ValueError) else f"{kind}: {error}"
        except Exception:
            self._reason = f"{kind}, which cannot be printed"

    def __getitem__(self, name: str) -> NoReturn:
        raise AffluxError(self._reason)

    def __iter__(self) -> NoReturn:
        raise AffluxError(self._reason)

    def __len__(self) -> NoReturn:
        raise AffluxError(self._reason)
