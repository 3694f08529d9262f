"""What a commit holds besides vectors and rows: arrivals in the buffer, the lists that grow, and the layout."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.checkpoint import arrival_record, log_record
from afflux.aggregation.state import ServerState
from afflux.arrays.layout import Layout
from afflux.ops.errors import AffluxError, StoreError
from afflux.store.index import CommittedState
from afflux.store.index_entries import ListUpdate, StoredArrival
from afflux.store.segments import Place

#: For each growing list, the list, and the number of its entries that are committed and never change.
WrittenLists = dict[str, tuple[list[Any], int]]


def list_updates(state: ServerState, before: WrittenLists) -> tuple[dict[str, ListUpdate], WrittenLists]:
    """Return the updates of the log, the tasks and the clients that have entered that a commit of this state writes.

    `before` is the second result of the last commit's call.
    """
    lists: dict[str, tuple[list[Any], Callable[[Any], Any], int, int]] = {
        "tasks": (state.task_events, log_record, state.events, 0)
    }
    if state.log is not None:
        lists["log"] = state.log, log_record, state.logged, 0
    if (participation := state.participation) is not None:
        # A discard removes the clients in the buffer from a pass again.
        open_ = 0 if participation.num_clients is None else state.filled
        lists["passed"] = participation.order, lambda client_id: client_id, participation.entered, open_
    updates, written = dict[str, ListUpdate](), WrittenLists()
    for name, (entries, record_of, count, open_) in lists.items():
        old_entries, fixed = before.get(name, ([], 0))
        start = fixed if old_entries is entries else 0
        updates[name] = ListUpdate(start, [record_of(entry) for entry in entries[start:count]])
        written[name] = entries, count - open_
    return updates, written


def layout_of(path: Path, server: Mapping[str, Any], buffers: bytes | None) -> Layout | None:
    """Return the layout of a server's params and of its model's `buffers`, from the server's facts.

    Raises:
        StoreError: the stored layout is invalid, or does not fit the facts.
    """
    layout_json, count = server["layout"], len(buffers or b"") / np.dtype(np.float64).itemsize
    try:
        layout = None if layout_json is None else Layout.from_json(layout_json)
    except (AffluxError, RecursionError) as error:
        raise StoreError(f"[store] {path} is damaged: its layout: {error}") from None
    sizes = (server["d"], 0) if layout is None else (layout.size, layout.buffers_size)
    if sizes != (server["d"], count):
        raise StoreError(f"[store] {path} is damaged: its layout has {sizes[0]} elements and {sizes[1]} buffers")
    return layout


def stored_arrival(arrival: PendingArrival, place: Place | None) -> StoredArrival:
    """Return the entry of an arrival whose vector is in this place; None: it is in a sum."""
    buffers = None if arrival.buffers is None else arrival.buffers.tobytes()
    return StoredArrival(arrival.join, place, arrival_record(arrival), buffers)


def state_of(
    facts: Mapping[str, Any],
    last: CommittedState,
    vectors: Mapping[str, npt.NDArray[Any]],
    slots: npt.NDArray[Any],
    *,
    log: bool,
) -> dict[str, Any]:
    """Return a commit in the form of `Server.state_dict`, without rows. `slots` are the vectors of the arrivals."""
    lists, waiting = last.lists, last.arrivals
    meta = {
        **facts,
        **last.meta,
        "passed": lists["passed"],
        "waiting": [stored.record for stored in waiting],
        "log": lists["log"] if log else None,
        "row_ids": [],
    }
    arrays: dict[str, Any] = {**vectors, "slots": slots}
    if last.buffers is not None:
        arrays["buffers"] = np.frombuffer(last.buffers, np.float64)
        content = b"".join(stored.buffers or b"" for stored in waiting)
        arrays["slot_buffers"] = np.frombuffer(content, np.float64).reshape(len(waiting), arrays["buffers"].size)
    return {"meta": meta, "arrays": arrays}
