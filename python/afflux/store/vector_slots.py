"""Vectors of a server's state on disk.

`VectorSlots` holds the sum of the rows and the rule's vectors. Each has two slots: the committed one and the next one.
`ParamsSlots` holds versions of params. Each version has a slot, which is reused when nothing refers to the version.
`ArrivalSlots` holds the vectors of waiting arrivals.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux._engine import CopiedInChildren, address
from afflux.arrays.interop import bring, on_gpu, on_host
from afflux.arrays.pools import Vector
from afflux.store.checksums import SweepChecksums, crc, raise_if_damaged
from afflux.store.segments import Place, Row, Segments


class VectorSlots:
    """Vectors by name. A committed slot is never written to; the other one is updated in place."""

    def __init__(self, arrays: Mapping[str, Segments], committed: Mapping[str, Place], num_threads: int) -> None:
        self._arrays = arrays
        self._num_threads = num_threads
        self._slots: dict[str, tuple[Row, Row]] = {}
        self.set_committed(committed)
        for name, segments in arrays.items():
            segments.reserve(2)
            self._slots[name] = segments.array(0), segments.array(1)
        is_mapped = "sum" in arrays and arrays["sum"].mapped
        # A forked child may read the sum, of which `RowCache.sum` gives out the memory itself.
        self._copied = [CopiedInChildren(row) for row in self._slots["sum"]] if is_mapped else []

    def committed_vector(self, name: str) -> Row:
        """Return the vector of the last commit; before the first commit, an empty slot."""
        return self._slots[name][self.committed.get(name, 0)]

    def output(self, name: str, now: Row) -> Row:
        """Return the vector into which a sweep may write the new values of `now`; it may be `now` itself."""
        return self._slots[name][self._target(name, now)]

    def _target(self, name: str, now: Row) -> int:
        """Return the slot of `now` if it is not the committed one, else the other slot."""
        spare = [slot for slot in (0, 1) if slot != self.committed.get(name)]
        return next((slot for slot in spare if self._slots[name][slot] is now), spare[0])

    def write(self, name: str, now: Vector, checksums: SweepChecksums) -> Place:
        """Return the place of `now` for a commit.

        `now` is copied to a slot if it is not in one, for example on a GPU.
        """
        slot, array = self.committed.get(name), self._arrays[name]
        if slot is None or self._slots[name][slot] is not now:
            slot = self._target(name, now)
            if on_gpu(now):
                array.check([slot])
                array.populate([slot], write=True)
                bring(now, self._slots[name][slot])
                now = self._slots[name][slot]
            array.write(slot, now)
        return Place(slot, crc(now, self._num_threads, checksums))

    def populate(self) -> None:
        """Map the pages that a sweep may write."""
        for array in self._arrays.values():
            array.populate((0, 1), write=True)

    def set_committed(self, places: Mapping[str, Place]) -> None:
        """Record that these places are committed."""
        self.committed = {name: place.slot for name, place in places.items()}

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated."""
        for array in self._arrays.values():
            array.check((0, 1))


class ParamsSlots:
    """The slots of one array, allocated one by one for a pool of versions."""

    def __init__(self, segments: Segments, committed: Iterable[int]) -> None:
        """Set the slots that are allocated first, in this order: those in `committed`, each once."""
        self._segments = segments
        self._committed = list(committed)
        self._slots: dict[int, int] = {}  # by the address of their memory
        self._rows: dict[int, Row] = {}
        self._copied: list[CopiedInChildren] = []  # their pages are reused while a forked child may read a version

    def allocate(self) -> Row:
        """Return memory for one more version.

        Raises:
            StoreError: the disk is full.
        """
        if self._committed:
            slot = self._committed[0]
            row = self._segments.array(slot)
            del self._committed[0]
        else:
            slot = next(slot for slot in range(len(self._rows) + 1) if slot not in self._rows)
            self._segments.reserve(slot + 1)
            row = self._segments.empty(slot)
            self._segments.populate([slot], write=True)
        self._rows[slot] = row
        self._slots[address(row)] = slot
        if self._segments.mapped:
            self._copied.append(CopiedInChildren(row))
        return row

    def owns(self, params: Row) -> bool:
        """Return whether `allocate` has returned the memory of this version."""
        return address(params) in self._slots

    def slot_of(self, params: Row) -> int:
        """Return the slot of a version."""
        return self._slots[address(params)]

    def used(self, free: Iterable[int]) -> set[int]:
        """Return the slots that are in use; `free` is memory that is not."""
        return {self._slots[place] for place in self._slots.keys() - set(free)}

    def write(self, params: Row) -> int:
        """Write a version to its slot, if it is not there yet; return the slot."""
        slot = self.slot_of(params)
        self._segments.write(slot, params)
        return slot

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated."""
        self._segments.check(self._rows)

    def detach(self, free: Iterable[int]) -> None:
        """Make versions that are still in use independent of the files. `free` is memory that is not in use."""
        self._segments.detach(self.used(free))


class ArrivalSlots:
    """The vectors of arrivals, by the number of their join. Each is written once, to its own slot.

    The slot becomes free after the first commit without the arrival.
    """

    def __init__(self, segments: Segments, committed: Mapping[int, Place], num_threads: int) -> None:
        self._segments = segments
        self._num_threads = num_threads
        self._places = committed
        for place in committed.values():
            raise_if_damaged(segments, place, num_threads)

    def write(self, waiting: Mapping[int, Vector]) -> dict[int, Place]:
        """Write the vectors that are not on disk yet; return the places of all."""
        used_slots, places = {place.slot for place in self._places.values()}, dict[int, Place]()
        for join, slot in waiting.items():
            place = self._places.get(join)
            if place is None:
                free = next(slot for slot in range(len(used_slots) + 1) if slot not in used_slots)
                used_slots.add(free)
                self._segments.reserve(free + 1)
                vector = on_host(slot)
                self._segments.write(free, vector)
                place = Place(free, crc(vector, self._num_threads))
            places[join] = place
        return places

    def set_committed(self, places: Mapping[int, Place]) -> None:
        """Record that these arrivals are committed, and no others."""
        self._places = places

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated."""
        self._segments.check(place.slot for place in self._places.values())

    def stacked(self, places: Sequence[Place]) -> npt.NDArray[Any]:
        """Return a copy of these vectors, (n, d)."""
        out = np.empty((len(places), self._segments.size), self._segments.shape.dtype)
        for row, place in zip(out, places, strict=True):
            row[:] = self._segments.array(place.slot)
        return out
