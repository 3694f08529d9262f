"""The memory that pushed vectors are taken into: made when first needed, used again, at most so many at once."""

from afflux import _engine
from afflux.errors import BusyError

#: Memory of one pushed vector, whose type the engine knows; NumPy sees bfloat16 as uint16.
Slot = _engine.Buffer


class Slots:
    """A free list. `take` and `give_back` are single operations of Python's, hence safe between threads."""

    def __init__(self, size: int, dtype: str, limit: int) -> None:
        self.size = size
        self.dtype = dtype
        self.limit = limit
        self._pool = _engine.Pool(size, dtype, limit)
        self.made = 0
        self._free: list[Slot] = []

    def take(self) -> Slot | None:
        """A free slot, the one used last; None if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def take_or_make(self) -> Slot | None:
        """A free slot, or a new one; None if there are `limit`. For one thread at a time."""
        slot = self.take()
        if slot is None and self.made < self.limit:
            slot = _engine.Buffer(self._pool)
            self.made += 1
        return slot

    def checked(self, op: str, slot: Slot | None) -> Slot:
        """The slot, or a BusyError if there was none."""
        if slot is None:
            raise BusyError(
                f"[{op}] all {self.limit} slots of max_slots are taken: by arrivals that wait, that are being pushed, "
                "or that are in the round being made"
            )
        return slot

    def give_back(self, *slots: Slot) -> None:
        """These may be taken again."""
        self._free.extend(slots)

    @property
    def taken(self) -> int:
        """Slots that hold something."""
        return self.made - len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.size * {"float32": 4, "float64": 8, "bfloat16": 2}[self.dtype]
