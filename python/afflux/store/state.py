"""What a commit holds beside vectors and rows: lists that grow, entry by entry; all of it as `state_dict` has it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux.aggregation import checkpoint
from afflux.aggregation.admission import Admission, ServerState
from afflux.aggregation.reports import Join, Quarantined
from afflux.store.index import Committed, Tail


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
