"""What a commit holds beside vectors and rows: lists that grow, entry by entry; all of it as `state_dict` has it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux.aggregation.admission import Admission, ServerState
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.checkpoint import arrival_record, log_record, quarantined_record
from afflux.aggregation.streaming import Term
from afflux.arrays.interop import on_host
from afflux.store.index import Committed, Place, StoredArrival, Tail
from afflux.store.segments import Segments
from afflux.store.vectors import crc, refuse_damage


class Written(NamedTuple):
    """How much of a list is committed for good."""

    entries: object  #: the list
    fixed: int  #: so many entries will stay as they are while it is this list


class Lists:
    """The log, the quarantined and those who have entered a pass; a commit writes what is new in them."""

    def __init__(self) -> None:
        self._written: dict[str, Written] = {}

    def put(self, book: ServerState, joins: Admission) -> tuple[dict[str, Tail], dict[str, Written]]:
        """What a commit has to write, and what is to be settled after it."""
        quarantined, log = joins.growing
        lists: dict[str, tuple[list[Any], Callable[[Any], Any], int, int]] = {
            "quarantined": (quarantined, quarantined_record, book.quarantined, 0)
        }
        if log is not None:
            lists["log"] = log, log_record, book.logged, 0
        if book.passes is not None:  # a discard takes those in the buffer out again
            lists["passed"] = book.passes.order, lambda client_id: client_id, book.passes.entered, book.filled
        tails, written = dict[str, Tail](), dict[str, Written]()
        for name, (entries, record_of, count, open_) in lists.items():
            before = self._written.get(name)
            start = before.fixed if before is not None and before.entries is entries else 0
            tails[name] = Tail(start, [record_of(entry) for entry in entries[start:count]])
            written[name] = Written(entries, count - open_)
        return tails, written

    def settle(self, written: dict[str, Written]) -> None:
        """It is committed."""
        self._written = written


def state_of(
    facts: Mapping[str, Any],
    last: Committed,
    vectors: Mapping[str, npt.NDArray[Any]],
    slots: npt.NDArray[Any],
    *,
    log: bool,
) -> dict[str, Any]:
    """A commit in the form of `state_dict`, but for the rows; `slots`: the vectors of the arrivals that wait."""
    lists, waiting = last.tails, last.arrivals
    meta = {
        **facts,
        **last.meta,
        "passed": lists["passed"],
        "waiting": [stored.record for stored in waiting],
        "quarantined": lists["quarantined"],
        "log": lists["log"] if log else None,
        "row_ids": [],
    }
    arrays: dict[str, Any] = {**vectors, "slots": slots}
    if last.buffers is not None:
        arrays["buffers"] = np.frombuffer(last.buffers, np.float64)
        own = b"".join(stored.buffers or b"" for stored in waiting)
        arrays["slot_buffers"] = np.frombuffer(own, np.float64).reshape(len(waiting), arrays["buffers"].size)
    return {"meta": meta, "arrays": arrays}


class Arrivals:
    """Each is written once, to a slot of its own, and stays there until a commit no longer knows it."""

    def __init__(self, segments: Segments, committed: Sequence[StoredArrival], num_threads: int) -> None:
        self._segments = segments
        self._num_threads = num_threads
        self._places = {kept.join: kept.place for kept in committed if kept.place is not None}
        for place in self._places.values():
            refuse_damage(segments, place, num_threads)

    def put(self, waiting: Sequence[PendingArrival]) -> list[StoredArrival]:
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
            place = None if isinstance(w.slot, Term) else new[w.join]
            buffers = None if w.buffers is None else w.buffers.tobytes()
            kept.append(StoredArrival(w.join, place, arrival_record(w), buffers))
        return kept

    def settle(self, kept: Sequence[StoredArrival]) -> None:
        """They are committed."""
        self._places = {k.join: k.place for k in kept if k.place is not None}

    def check(self) -> None:
        """Refuses files that have vanished or were cut off."""
        self._segments.check(place.slot for place in self._places.values())

    def flush(self, kept: Sequence[StoredArrival]) -> None:
        """Returns when they are on the disk itself."""
        self._segments.flush(k.place.slot for k in kept if k.place is not None)

    def stacked(self, kept: Sequence[StoredArrival]) -> np.ndarray:
        """(n, d) the vectors of those that have one, copied."""
        places = [k.place for k in kept if k.place is not None]
        out = np.empty((len(places), self._segments.size), self._segments.shape.dtype)
        for row, place in zip(out, places, strict=True):
            row[:] = self._segments.array(place.slot)
        return out
