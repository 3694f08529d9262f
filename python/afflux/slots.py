"""The memory that pushed vectors are taken into: at most so much at once, made when first needed, used again."""

from typing import Any

from afflux.devices import HOST, Device
from afflux.ops.errors import AffluxError, BusyError

#: Memory of one pushed vector, whose type the engine knows: its own buffer, which NumPy sees, bfloat16 as uint16; on a
#: GPU an array of the device's library. It is free again as soon as nobody refers to it, however that comes about.
Slot = Any


def is_lent(slot: Slot) -> bool:
    """Whether it is a caller's own vector."""
    return getattr(slot, "is_lent", False)


class Slots:
    """At most `limit` slots of `size` elements."""

    def __init__(self, size: int, dtype: str, limit: int, device: Device = HOST) -> None:
        self.size = size
        self.dtype = dtype
        self.limit = limit
        self._device = device
        self._pool: Any = device.pool(size, dtype, limit)

    def take(self) -> Slot | None:
        """A slot; None if all are taken."""
        try:
            return self._device.take(self._pool)
        except AffluxError:
            return None

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
        """Slots that somebody holds."""
        return int(self._pool.held)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return int(self._pool.buffer_bytes)
