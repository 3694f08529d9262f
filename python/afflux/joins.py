"""The buffer that is filling, and what is decided about each arrival. Knows nothing of threads: callers take turns."""

from typing import Literal

from afflux.errors import AffluxError
from afflux.receipts import Cut, Entry, Join, Quarantined, Status, no_counts
from afflux.round import Waiting
from afflux.rule import ClientId, Rule
from afflux.slots import Slot
from afflux.store import MemoryRows

Duplicates = Literal["latest", "both", "reject"]


class Joins:
    """Decides by the rules of `Server`'s docstring, counts, and keeps the log."""

    def __init__(
        self, rule: Rule, duplicates: Duplicates, max_staleness: int | None, rows: MemoryRows | None, log: bool
    ) -> None:
        self.rule = rule
        self.duplicates = duplicates
        self.max_staleness = max_staleness
        self.rows = rows
        self.waiting: list[Waiting] = []
        self.number = 0  #: of the next decision
        self.counts = no_counts()
        self.quarantined: list[Quarantined] = []
        self.log: list[Entry] | None = [] if log else None
        self.places: dict[ClientId, int] = {}  #: where a client waits, unless both count
        self.id_type: type | None = None  #: of client ids: int or str; None before the first join

    def status(self, client_id: ClientId, version: int, staleness: int, bad: int | None) -> Status:
        """What becomes of an arrival, if it joins now; nothing changes.

        Raises:
            AffluxError: the id's type differs from the earlier ones', the client is one too many, or the version is
                not made.
        """
        if self.id_type is not None and self.id_type is not type(client_id):
            raise AffluxError(f"[push] client_id {client_id!r} is not of the same type as the earlier ones")
        if staleness < 0:
            raise AffluxError(
                f"[push] client {client_id!r} says that it pulled version {version}, which an older state that was "
                "loaded meanwhile has not made"
            )
        if bad is not None:
            return "quarantined"
        if self.max_staleness is not None and staleness > self.max_staleness:
            return "dropped"
        place = self.places.get(client_id)
        if place is None:
            self._check_clients(client_id)
            return "joined"
        if self.duplicates == "reject":
            return "rejected"
        return "superseded" if self.waiting[place].version > version else "replaced"

    def completes(self, status: Status) -> bool:
        """Whether an arrival of this status makes the buffer full."""
        return status == "joined" and len(self.waiting) + 1 == self.rule.buffer_size

    def place(self, status: Status, arrival: Waiting, bad: int | None) -> Slot | None:
        """Puts an arrival that completes nothing where it belongs; returns a slot that is free now."""
        if status == "joined":
            if self.duplicates != "both":
                self.places[arrival.client_id] = len(self.waiting)
            self.waiting.append(arrival)
            return None
        if status == "replaced":
            place = self.places[arrival.client_id]
            arrival, self.waiting[place] = self.waiting[place], arrival
        elif bad is not None:
            self.quarantined.append(Quarantined(self.number, arrival.client_id, arrival.version, bad))
        return arrival.slot

    def count(self, status: Status, arrival: Waiting) -> None:
        """A decision's place in the counters and in the log."""
        self.number += 1
        self.counts[status] += 1
        if status in ("joined", "replaced"):
            self.id_type = type(arrival.client_id)
        if self.log is not None:
            client_id, version, num_examples, loss, *_ = arrival
            join, staleness = arrival.join, arrival.staleness
            self.log.append(Join(join, status, client_id, version, staleness, num_examples, loss))

    def cut(self, kind: Literal["flush", "discard"]) -> None:
        """Logs that the buffer is emptied before it is full."""
        if self.log is not None:
            self.log.append(Cut(kind))

    def refill(self, waiting: list[Waiting]) -> None:
        """These wait now, and nobody else."""
        self.waiting = waiting
        self.places = {} if self.duplicates == "both" else {w.client_id: i for i, w in enumerate(waiting)}

    def load(
        self,
        waiting: list[Waiting],
        number: int,
        counts: dict[str, int],
        quarantined: list[Quarantined],
        log: list[Entry] | None,
    ) -> None:
        """Takes over a saved state. A log that was not kept so far is not begun in the middle."""
        self.refill(waiting)
        self.number, self.counts, self.quarantined = number, counts, quarantined
        self.log = None if self.log is None else log
        known = [w.client_id for w in waiting] or ([] if self.rows is None else self.rows.client_ids)
        self.id_type = type(known[0]) if known else None

    def _check_clients(self, client_id: ClientId) -> None:
        rows = self.rows
        if rows is None or client_id in rows or len(rows) + len(self.waiting) < rows.num_clients:
            return  # even if all that wait are new; counting them at each push would be quadratic in M
        new = {w.client_id for w in self.waiting if w.client_id not in rows}
        if client_id not in new and len(rows) + len(new) == rows.num_clients:
            raise AffluxError(
                f"[push] client {client_id!r} would be number {rows.num_clients + 1}, but num_clients is "
                f"{rows.num_clients}"
            )
