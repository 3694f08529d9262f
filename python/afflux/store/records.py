"""What a commit holds beside vectors and rows: lists that grow, entry by entry; all of it as `state_dict` has it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux.aggregation import checkpoint
from afflux.aggregation.admission import Admission, ServerState
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.checkpoint import waiting_entry
from afflux.aggregation.reports import Join, Quarantined
from afflux.aggregation.streaming import Term
from afflux.arrays.interop import on_host
from afflux.store.index import Committed, Kept, Place, Tail
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
        lists: dict[str, tuple[list[Any], int, int]] = {"quarantined": (quarantined, book.quarantined, 0)}
        if log is not None:
            lists["log"] = (log, book.logged, 0)
        if book.passes is not None:  # a discard takes those in the buffer out again
            lists["passed"] = (book.passes.order, book.passes.entered, book.filled)
        tails, written = dict[str, Tail](), dict[str, Written]()
        for name, (entries, count, open_) in lists.items():
            before = self._written.get(name)
            start = before.fixed if before is not None and before.entries is entries else 0
            tails[name] = Tail(start, [_plain(entry) for entry in entries[start:count]])
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
    kept, entries = last.arrivals, last.tails["log"] if log else None
    meta = {
        **facts,
        **last.meta,
        "passed": last.tails["passed"],
        "waiting": [k.facts[:5] for k in kept],
        "quarantined": last.tails["quarantined"],
        "log": entries and [_without_loss(entry) for entry in entries],
        "row_ids": [],
    }
    arrays: dict[str, Any] = {
        **vectors,
        "slots": slots,
        "losses": np.array([k.facts[5] for k in kept], np.float64),
        "norms": np.array([k.facts[6] for k in kept], np.float64),
        "extremes": np.array([k.facts[7:9] for k in kept], np.float64).reshape(len(kept), 2),
        "log_losses": np.array([entry[6] for entry in entries or [] if len(entry) > 2], np.float64),
    }
    if last.buffers is not None:
        arrays["buffers"] = np.frombuffer(last.buffers, np.float64)
        own = b"".join(k.buffers or b"" for k in kept)
        arrays["slot_buffers"] = np.frombuffer(own, np.float64).reshape(len(kept), arrays["buffers"].size)
    return {"meta": meta, "arrays": arrays}


def _without_loss(entry: list[Any]) -> list[Any]:
    if len(entry) <= 2:
        return entry
    *facts, _, lent = entry
    return [*facts, True] if lent else facts


def _plain(entry: Any) -> Any:
    """An entry of a list as JSON has it; a NaN stays one."""
    if isinstance(entry, Join):
        return list(entry)
    if isinstance(entry, Quarantined):
        return checkpoint.quarantined_entry(entry)
    return entry if isinstance(entry, int | str) else checkpoint.log_entry(entry)


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
