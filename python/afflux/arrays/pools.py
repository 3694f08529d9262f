"""Versions of params, in a pool of reused memory.

Each version has its own buffer, which returns to its pool when the last view of it is dropped.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from afflux._engine import Buffer
from afflux.arrays.devices import HOST, Device
from afflux.ops.errors import AffluxError

#: (d,), a NumPy array, or on a GPU an array of the library of the initial params.
Vector = Any
#: A version that is being written: on the host a `Buffer`, which knows its type also if NumPy does not.
Draft = Any


class Versions:
    """Writable buffers for new versions, and read-only views of finished versions.

    A view keeps its version's memory by NumPy's base reference. When the last view is deleted, in any thread, the
    buffer returns to the pool. So memory is proportional to the number of distinct versions that are held. On a GPU the
    library manages the memory of its arrays, and the pool only counts them.

    Args:
        size: d.
        max_versions: the largest number of versions that are held at once; None: no limit.
        dtype: "float32", "float64" or "bfloat16", whose arrays are uint16.
        inplace: whether there is only one buffer, to which every version is written.
        memory: allocates the memory of a version; None: the pool itself.
        device: the device of the versions.

    >>> versions = Versions(3, max_versions=2)
    >>> old, new = versions.take(), versions.take()
    >>> del old
    >>> versions.held
    1
    """

    def __init__(
        self,
        size: int,
        max_versions: int | None = None,
        *,
        dtype: str = "float32",
        inplace: bool = False,
        memory: Callable[[], Vector] | None = None,
        device: Device = HOST,
    ) -> None:
        self.inplace = inplace
        self._live: Draft = None  # if inplace
        self.max_versions = max_versions
        self._memory = memory
        self._device = device
        self._pool: Any = device.pool(size, dtype, max_versions or 0)

    def take(self, op: str = "Server") -> Draft:
        """Take a buffer for a new version; `op` names the call in errors.

        Raises:
            AffluxError: max_versions versions are held.
        """
        if self._live is not None:
            return self._live
        if self._memory is not None and self.held == self.allocated and self.allocated != self.max_versions:
            self._pool.lend(self._memory())
        try:
            draft = self._device.take(self._pool)
        except AffluxError:
            raise AffluxError(
                f"[{op}] all {self.max_versions} versions of max_versions are held: release pulled params, or raise "
                "max_versions"
            ) from None
        if self.inplace:
            self._live = draft
        return draft

    def finished(self, draft: Draft) -> Vector:
        """Return a finished draft for callers. On the host it is read-only, and NumPy refuses to make it writable
        again; on a GPU it stays writable. If inplace, return the writable memory, which callers never get.
        """
        if isinstance(draft, Buffer) and not self.inplace:
            draft.freeze()
        return as_array(draft)

    @property
    def held(self) -> int:
        """The number of versions that are still in use."""
        return int(self._pool.held)

    def has(self, params: Vector) -> bool:
        """Return whether these params, on a GPU, are a version of this pool."""
        return bool(self._pool.has(params))

    @property
    def allocated(self) -> int:
        """The number of buffers, in use or free."""
        return int(self._pool.allocated)

    @property
    def free(self) -> list[int]:
        """The addresses of buffers that are not in use."""
        return list(self._pool.free)


def as_array(draft: Draft) -> Vector:
    """Return the memory of a version that is being written as an array: on the host a NumPy array."""
    return np.asarray(draft) if isinstance(draft, Buffer) else draft
