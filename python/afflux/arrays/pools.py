"""Memory that is used again: versions of params, and slots for pushed vectors.

Each version has its own buffer, which returns to its pool when the last view of it is dropped. Slots are allocated when
first needed, up to a limit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from afflux._engine import Buffer
from afflux.arrays.devices import HOST, ITEM_BYTES, Device
from afflux.ops.errors import AffluxError, BusyError

#: (d,), NumPy's, or on a GPU that of the library that params came from.
Vector = Any


class Versions:
    """Writable buffers for new versions, read-only views for everybody else.

    A view keeps its version's memory through NumPy's own base reference; when the last one goes, the buffer returns to
    the pool, from whatever thread. Memory stays at the number of distinct versions held. On a GPU the library keeps its
    arrays, and the pool counts.

    Args:
        size: d.
        max_versions: at most so many are held at once; None: no limit.
        dtype: "float32", "float64" or "bfloat16", whose arrays are uint16.
        checked: compare each version with its checksum when it comes back, and count those that somebody wrote to
            although they are read-only. Reads every version twice.
        inplace: there is one buffer, which every version is written into.
        memory: where the memory of a version comes from; the pool's own if None.
        device: where they live.

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
        checked: bool = False,
        inplace: bool = False,
        memory: Callable[[], Vector] | None = None,
        device: Device = HOST,
    ) -> None:
        self.inplace = inplace
        self._live: Draft | None = None
        self._newest: Draft | None = None
        self._damage_told = 0
        self.checked = checked
        self.max_versions = max_versions
        self._memory = memory
        self._device = device
        self._pool: Any = device.pool(size, dtype, max_versions or 0, checked)

    def take(self) -> "Draft":
        """A buffer to write a new version into.

        Raises:
            AffluxError: max_versions are held.
        """
        if self._live is not None:
            return self._live
        if self._memory is not None and self.held == self.allocated and self.allocated != self.max_versions:
            self._pool.lend(self._memory())
        try:
            draft = Draft(self._device.take(self._pool))
        except AffluxError:
            raise AffluxError(
                f"all {self.max_versions} versions of max_versions are held: release pulled params, or raise "
                "max_versions"
            ) from None
        if self.inplace:
            self._live = draft
        return draft

    def finished(self, draft: "Draft", version: int) -> Vector:
        """The params in a draft, the newest from now on, read-only for others; if inplace they are never handed out."""
        if self.inplace:
            return draft.array
        self._newest = draft
        return draft.publish(version)

    @property
    def held(self) -> int:
        """Versions that somebody still holds."""
        return int(self._pool.held)

    @property
    def full(self) -> bool:
        """Whether max_versions are held, so that there is none for a step."""
        return self.max_versions is not None and not self.inplace and self.held >= self.max_versions

    def has(self, params: Vector) -> bool:
        """Whether it is one of these, on a GPU."""
        return bool(self._pool.has(params))

    @property
    def allocated(self) -> int:
        """Buffers that exist, held or free."""
        return int(self._pool.allocated)

    @property
    def free(self) -> list[int]:
        """The addresses of buffers that are not held."""
        return list(self._pool.free)

    @property
    def damaged(self) -> list[int]:
        """The versions that came back with other bytes than they were published with; none unless checked."""
        return list(self._pool.damaged)

    def refuse_damage(self, op: str) -> None:
        """Raises once for each version that was written to, as soon as it is not held any more."""
        if not self.checked:
            return
        damaged = self.damaged
        if len(damaged) > self._damage_told:
            versions = ", ".join(map(str, damaged[self._damage_told :]))
            self._damage_told = len(damaged)
            raise AffluxError(
                f"[{op}] version {versions} of params was written to after it was pulled; the server itself "
                "is sound, and goes on: pull(out=...) gives a client an array of its own"
            )

    def refuse_damaged_newest(self, op: str, version: int) -> None:
        """The newest version is what a step or a state is made of."""
        if self._newest is not None and not self._newest.intact:
            raise AffluxError(
                f"[{op}] version {version} of params, the newest, was written to after it was pulled: "
                "load_state_dict() of an earlier state is the way back"
            )


class Draft:
    """A version that is being written."""

    def __init__(self, buffer: Any) -> None:
        #: For the engine, which knows its type: (d,), writable until it is published.
        self.buffer = buffer

    @property
    def array(self) -> Vector:
        """The same for callers: on the host for NumPy."""
        return np.asarray(self.buffer) if isinstance(self.buffer, Buffer) else self.buffer

    def publish(self, version: int) -> Vector:
        """The finished version, read-only for good: NumPy refuses to make it writable again, other libraries do not."""
        if not isinstance(self.buffer, Buffer):
            return self.buffer
        self.buffer.freeze(version)
        return np.asarray(self.buffer)

    @property
    def intact(self) -> bool:
        """Whether it was not written to since; True if that is not watched."""
        return not isinstance(self.buffer, Buffer) or self.buffer.intact()


#: Memory of one pushed vector, whose type the engine knows: its own buffer, which NumPy sees, bfloat16 as uint16; on a
#: GPU an array of the device's library. It is freed when its last reference is dropped.
Slot = Any


def is_lent(slot: Slot) -> bool:
    """Whether it is a caller's own vector."""
    return getattr(slot, "is_lent", False)


class Slots:
    """At most `limit` slots of `size` elements, of which a round reads `together`."""

    def __init__(self, size: int, dtype: str, limit: int, device: Device = HOST, together: int = 1) -> None:
        self.size = size
        self.dtype = dtype
        self.limit = limit
        self._device = device
        # Callers' vectors are read and slots written: M of both lie between a push and its round, at most.
        self._until_read = min(2 * together * size * ITEM_BYTES[dtype], 2**62)
        self._pools: tuple[Any, ...] = (device.pool(size, dtype, limit, until_read=self._until_read),)

    def take(self) -> Slot | None:
        """A slot; None if all are taken."""
        for pool in self._pools:
            try:
                return self._device.take(pool)
            except AffluxError:
                continue
        return None

    @property
    def spare(self) -> bool:
        """Whether one that was taken before is free again, and kept."""
        return self._device is HOST and any(pool.allocated > pool.held for pool in self._pools)

    def grow(self, limit: int) -> None:
        """From now on there are at most `limit` slots, unless there may be more already. `together` stays: it decides
        about speed only.
        """
        if limit > self.limit:
            more = self._device.pool(self.size, self.dtype, limit - self.limit, until_read=self._until_read)
            self._pools = (*self._pools, more)
            self.limit = limit

    def checked(self, op: str, slot: Slot | None) -> Slot:
        """The slot, or a BusyError if there was none."""
        if slot is None:
            raise BusyError(
                f"[{op}] all {self.limit} slots of max_slots are taken: by arrivals that wait, that are being pushed, "
                "or that are in the round being made"
            )
        return slot

    @property
    def taken(self) -> int:
        """The number of slots in use."""
        return sum(int(pool.held) for pool in self._pools)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return int(self._pools[0].buffer_bytes)
