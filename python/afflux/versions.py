"""Versions of params: each in a buffer of its own, used again when nobody holds a view of it any more."""

import numpy as np
import numpy.typing as npt

from afflux import _engine

Float32 = npt.NDArray[np.float32]


class Versions:
    """Writable buffers for new versions, read-only views for everybody else.

    A view keeps its version's memory through NumPy's own base reference; when the last one goes, the buffer returns to
    the pool, from whatever thread. Memory stays at the number of distinct versions held.

    >>> versions = Versions(3, max_versions=2)
    >>> old, new = versions.take(), versions.take()
    >>> del old
    >>> versions.held
    1
    """

    def __init__(self, size: int, max_versions: int | None = None) -> None:
        self._pool = _engine.VersionPool(size, max_versions or 0)

    def take(self) -> "Draft":
        """A buffer to write a new version into.

        Raises:
            AffluxError: max_versions are held.
        """
        return Draft(_engine.Version(self._pool))

    @property
    def held(self) -> int:
        """Versions that somebody still holds."""
        return self._pool.held

    @property
    def allocated(self) -> int:
        """Buffers that exist, held or free."""
        return self._pool.allocated


class Draft:
    """A version that is being written."""

    def __init__(self, version: _engine.Version) -> None:
        self._version = version
        #: (d,) float32, writable until it is published.
        self.array: Float32 = np.frombuffer(memoryview(version), np.float32)

    def publish(self) -> Float32:
        """The finished version, read-only for good: NumPy refuses to make it writable again."""
        del self.array
        self._version.freeze()
        return np.frombuffer(memoryview(self._version), np.float32)
