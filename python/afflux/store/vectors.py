"""The vectors of a server's state on disk: the sum of the rows and the rule's memories. Each has a slot that the last
commit refers to, and another one for what comes next.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from afflux import ops
from afflux._engine import SUPERBLOCK
from afflux.arrays.interop import bring, on_gpu
from afflux.arrays.pools import Vector
from afflux.ops.errors import StoreError
from afflux.store.index import Place
from afflux.store.segments import Row, Segments

#: Checksums of what a sweep has just written, by address.
Fresh = Mapping[int, bytes]
NOTHING: Fresh = MappingProxyType({})


def fresh(sweep: ops.Pass, checksums: ops.Checksums) -> Fresh:
    """Those that the sweep itself has taken."""
    out, total, rows, states, memories = checksums
    written: list[tuple[ops.Array | None, bytes]] = [(sweep.out, out)]
    if (cache := sweep.calibrate) is not None:
        written += [(cache.sum if cache.sum_out is None else cache.sum_out, total)]
        written += zip(cache.new_rows, rows, strict=True)
    written += zip(sweep.states_out or sweep.states, states, strict=True)
    if memories and (memory := sweep.memory) is not None:
        written += zip(memory.outs or memory.vectors, memories, strict=True)
    return {np.asarray(vector).ctypes.data: crcs for vector, crcs in written if vector is not None}


def crc(row: Row, num_threads: int, known: Fresh = NOTHING) -> bytes:
    """Of each superblock of a vector."""
    found = known.get(row.ctypes.data)
    return ops.crc32c(row, SUPERBLOCK * row.itemsize, num_threads=num_threads) if found is None else found


def damage(segments: Segments, place: Place, num_threads: int) -> str | None:
    """What is wrong with the vector in a slot that a commit refers to."""
    lack = segments.lack(place.slot)
    if lack is not None:
        return lack
    row = segments.array(place.slot)
    segments.present([place.slot])
    if crc(row, num_threads) == place.crc:
        return None
    return f"{segments.folder} is damaged: slot {place.slot} does not agree with its checksum"


def refuse_damage(segments: Segments, place: Place, num_threads: int) -> None:
    """Refuses the vector in a slot that a commit refers to.

    Raises:
        StoreError: it is missing, or does not agree with its checksum.
    """
    found = damage(segments, place, num_threads)
    if found is not None:
        raise StoreError(f"[store] {found}; {segments.remedy}")


class Vectors:
    """By name. What is committed is never written to; what is not is updated in place."""

    def __init__(self, arrays: Mapping[str, Segments], committed: Mapping[str, Place], num_threads: int) -> None:
        self._arrays = arrays
        self._num_threads = num_threads
        self._slots: dict[str, dict[int, Row]] = {}
        self.committed: dict[str, int] = {}
        for name, segments in arrays.items():
            segments.reserve(2)
            self._slots[name] = {slot: segments.array(slot) for slot in (0, 1)}
            if name in committed:
                self.committed[name] = committed[name].slot

    def now(self, name: str) -> Row:
        """What the last commit says; before the first one, what is to become of it."""
        return self._slots[name][self.committed.get(name, 0)]

    def out(self, name: str, now: Row) -> Row:
        """Where the sweep may write the successor of `now`, perhaps in its own place."""
        return self._slots[name][self._target(name, now)]

    def _target(self, name: str, now: Row) -> int:
        """Not the committed slot: that of `now`, if it can be."""
        kept = self.committed.get(name)
        own = next((slot for slot, row in self._slots[name].items() if row is now), None)
        return own if own is not None and own != kept else next(slot for slot in self._slots[name] if slot != kept)

    def put(self, name: str, now: Vector, known: Fresh) -> Place:
        """Where `now` lies, to be committed; it is copied if it lies elsewhere, as on a GPU."""
        kept = self.committed.get(name)
        if kept is not None and self._slots[name][kept] is now:
            slot = kept
        else:
            slot = self._target(name, now)
            if on_gpu(now):
                now = self._brought(name, slot, now)
            self._arrays[name].put(slot, now)
        return Place(slot, crc(now, self._num_threads, known))

    def _brought(self, name: str, slot: int, now: Vector) -> Row:
        """A slot with the values of a vector on a GPU."""
        self._arrays[name].check([slot])
        self._arrays[name].present([slot], write=True)
        bring(now, self._slots[name][slot])
        return self._slots[name][slot]

    def present(self) -> None:
        """Brings in what a sweep may write."""
        for name, slots in self._slots.items():
            self._arrays[name].present(slots, write=True)

    def settle(self, places: Mapping[str, Place]) -> None:
        """They are committed."""
        self.committed = {name: place.slot for name, place in places.items()}

    def flush(self, places: Mapping[str, Place]) -> None:
        """Returns when they are on the disk itself."""
        for name, place in places.items():
            self._arrays[name].flush([place.slot])

    def check(self) -> None:
        """Refuses files that have vanished or were cut off."""
        for name, slots in self._slots.items():
            self._arrays[name].check(slots)


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
