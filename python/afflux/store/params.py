"""Versions of params on disk: each in a slot of its own, which is used again when nobody holds a view of it and no
commit refers to it.
"""

from collections.abc import Iterable

from afflux.store.segments import Row, Segments


class ParamsSlots:
    """Hands the slots of one array to a pool of versions, one by one."""

    def __init__(self, segments: Segments, first: Iterable[int]) -> None:
        """The slots of `first`, which are committed, are handed out first."""
        self._segments = segments
        self._first = list(first)
        self._slots: dict[int, int] = {}  # by the address of their memory
        self._rows: dict[int, Row] = {}

    def more(self) -> Row:
        """Memory for one version more.

        Raises:
            StoreError: the disk is full.
        """
        if self._first:
            slot = self._first[0]
            row = self._segments.array(slot)
            del self._first[0]
        else:
            slot = next(slot for slot in range(len(self._rows) + 1) if slot not in self._rows)
            self._segments.reserve(slot + 1)
            row = self._segments.blank(slot)
            self._segments.present([slot], write=True)
        self._rows[slot] = row
        self._slots[row.ctypes.data] = slot
        return row

    def has(self, params: Row) -> bool:
        """Whether `more` has given the memory of this version."""
        return params.ctypes.data in self._slots

    def put(self, params: Row) -> int:
        """Writes a version to its slot, if it is not there already; returns the slot."""
        slot = self._slots[params.ctypes.data]
        self._segments.put(slot, params)
        return slot

    def check(self) -> None:
        """Refuses files that have vanished or were cut off."""
        self._segments.check(self._rows)

    def detach(self, free: Iterable[int]) -> None:
        """Whoever holds a version keeps it, whatever becomes of the files; `free` is memory that nobody holds."""
        self._segments.detach(self._slots[address] for address in self._slots.keys() - set(free))

    def flush(self, slots: Iterable[int]) -> None:
        """Returns when these slots are on the disk itself."""
        self._segments.flush(slots)
