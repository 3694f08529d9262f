"""Arrivals that wait, on disk: those of a checkpoint, and those that wait for the next pass."""

from collections.abc import Sequence

import numpy as np

from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.checkpoint import waiting_entry
from afflux.aggregation.streaming import Term
from afflux.arrays.interop import on_host
from afflux.store.index import Kept, Place
from afflux.store.segments import Segments
from afflux.store.vectors import crc, refuse_damage


class Arrivals:
    """Each is written once, to a slot of its own, and stays there until a commit no longer knows it."""

    def __init__(self, segments: Segments, committed: Sequence[Kept], num_threads: int) -> None:
        self._segments = segments
        self._num_threads = num_threads
        self._places = {kept.join: kept.place for kept in committed if kept.place is not None}
        for place in self._places.values():
            refuse_damage(segments, place, num_threads)

    def put(self, waiting: Sequence[PendingArrival]) -> list[Kept]:
        """Writes those that are not on disk yet; what a commit has to say about all of them."""
        taken = {place.slot for place in self._places.values()}
        kept, new = [], dict(self._places)
        for w in waiting:
            if not isinstance(w.slot, Term) and w.join not in new:
                slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                taken.add(slot)
                self._segments.reserve(slot + 1)
                vector = on_host(w.slot)
                self._segments.put(slot, vector)
                new[w.join] = Place(slot, crc(vector, self._num_threads))
            facts = [*waiting_entry(w), w.loss, w.norm, *w.extremes]
            buffers = None if w.buffers is None else w.buffers.tobytes()
            kept.append(Kept(w.join, None if isinstance(w.slot, Term) else new[w.join], facts, buffers))
        return kept

    def settle(self, kept: Sequence[Kept]) -> None:
        """They are committed."""
        self._places = {k.join: k.place for k in kept if k.place is not None}

    def check(self) -> None:
        """Refuses files that have vanished or were cut off."""
        self._segments.check(place.slot for place in self._places.values())

    def flush(self, kept: Sequence[Kept]) -> None:
        """Returns when they are on the disk itself."""
        self._segments.flush(k.place.slot for k in kept if k.place is not None)

    def stacked(self, kept: Sequence[Kept]) -> np.ndarray:
        """(n, d) the vectors of those that have one, copied."""
        places = [k.place for k in kept if k.place is not None]
        out = np.empty((len(places), self._segments.size), self._segments.shape.dtype)
        for row, place in zip(out, places, strict=True):
            row[:] = self._segments.array(place.slot)
        return out
