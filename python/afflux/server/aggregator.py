"""From arrivals to steps: each decision about a push, and the round that it completes, in turn."""

from contextlib import suppress

import numpy as np

from afflux.aggregation.admission import Admission
from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.cache.staging import Stage
from afflux.aggregation.checkpoint import Saved
from afflux.aggregation.reports import Pulled, Receipt, Report
from afflux.aggregation.round import Round, prepare
from afflux.aggregation.streaming import MOST_SQUARES, Streaming, Term, Total
from afflux.arrays.devices import HOST, Device
from afflux.arrays.pools import Slot, Slots, Versions
from afflux.ops.errors import AffluxError, StoreError
from afflux.rules.rule import Rule
from afflux.server.concurrency import Gate
from afflux.store.folder import Store


class Ticket:
    """What a push has to account for, however it ends."""

    __slots__ = ("decided", "slot", "stage")

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.stage: Stage | None = None  # of the client's row
        self.decided = False


class Rounds:
    """Carries decisions out. Its callers hold the mutex of its gate."""

    def __init__(
        self,
        rule: Rule,
        num_threads: int,
        versions: Versions,
        slots: Slots,
        joins: Admission,
        streaming: Streaming | None,
        device: Device,
    ) -> None:
        self._rule = rule
        self._num_threads = num_threads
        self._versions = versions
        self._slots = slots
        self._streaming = streaming
        self._device = device
        self._store: Store | None = None
        self._joins = joins
        self.gate = Gate(joins, slots, self._make, self._commit, device.alone)

    def settle(self, store: Store, versions: Versions) -> None:
        """From here on in a store, which the memory of these versions is in."""
        self._store, self._versions = store, versions
        self.gate.store = self.gate.alone = str(store.path)
        self.gate.check = store.check

    def join(self, pushed: Pushed, bad: int | None, ticket: Ticket) -> Receipt:
        """Decides what becomes of an arrival, and makes the step that it completes."""
        joins = self._joins
        client_id, version, *_ = pushed
        more = self.make_overdue()
        status, staleness = joins.status(client_id, version, bad)
        while joins.completes(status) and joins.book.unfinished:
            self.gate.settle()  # others may join meanwhile
            more += self.make_overdue()
            status, staleness = joins.status(client_id, version, bad)
        join = joins.book.number
        arrival = PendingArrival(*pushed, join, staleness, ticket.stage)
        if self._streaming is not None and status == "joined":
            total = joins.book.total or self._streaming.total()
            term = self._streaming.term(total, joins.book.filled, _facts(arrival), ticket.slot)
            arrival = arrival._replace(slot=term)
        sealed = self.prepared("push", [*joins.book.arrivals(), arrival]) if joins.completes(status) else None
        joins.record(status, arrival, bad, sealed)
        ticket.decided = True
        report, skipped = None, False
        if sealed is not None:
            self.step(sealed)
            report, skipped = sealed.report, not sealed.report.stepped
            with suppress(Exception):  # it is not this push's: the next one meets it before it joins
                more += self.make_overdue()
        elif isinstance(arrival.slot, Term):
            self.gate.added(arrival.slot)
        step = version + staleness + 1 if status in ("joined", "replaced") and not skipped else None
        durable = None if self._store is None else self._store.durable(version + staleness + 1)
        return Receipt(status, staleness, joins.book.current.version, join, step, report, tuple(more), durable)

    def loaded(self, saved: Saved) -> list[PendingArrival]:
        """The arrivals of a saved state, their vectors in this server's own memory; whatever raises leaves no trace."""
        op, streaming, arrivals = "load_state_dict", self._streaming, list(saved.arrivals)
        if saved.added and streaming is None:
            raise AffluxError(
                f"[{op}] {saved.added} arrivals wait as one sum in the state, and memory='buffered' needs the vectors: "
                "load it with memory='streaming', or save it after a flush() or discard()"
            )
        if streaming is not None:
            return self._added(op, streaming, saved)
        for place, arrival in enumerate(arrivals):
            arrivals[place] = arrival._replace(slot=self._copied(op, arrival, self._slots.take()))
        return arrivals

    def _added(self, op: str, streaming: Streaming, saved: Saved) -> list[PendingArrival]:
        """The same for a streaming server: vectors of a buffered state are added up here, through one slot."""
        total, arrivals, slot = streaming.total(saved.added, saved.total), list(saved.arrivals), None
        for place, arrival in enumerate(arrivals):
            if place >= saved.added:
                if arrival.norm * arrival.norm > MOST_SQUARES:
                    raise AffluxError(
                        f"[{op}] client {arrival.client_id!r} waits with the norm {arrival.norm}, too large for a sum"
                    )
                slot = self._copied(op, arrival, self._slots.take() if slot is None else slot)
            term = streaming.term(total, place, _facts(arrival), slot)
            if place < saved.added and term.weight != saved.raw[place]:
                raise AffluxError(
                    f"[{op}] client {arrival.client_id!r} is in the sum with the raw weight {saved.raw[place]}, and "
                    f"this rule gives it {term.weight}: save the state after a flush() or discard()"
                )
            if place >= saved.added:
                term.add(self._num_threads)
            arrivals[place] = arrival._replace(slot=term)
        return arrivals

    def _copied(self, op: str, arrival: PendingArrival, slot: Slot | None) -> Slot:
        """A slot of this server that holds the vector of a saved arrival."""
        slot = self._slots.checked(op, slot)
        self._device.fill(slot, np.asarray(arrival.slot))
        return slot

    def step(self, sealed: Round) -> None:
        """The sweep of a round that is on the books, and its commit; without them if the rule skips it."""
        if sealed.report.stepped:
            self.gate.drive(sealed)

    def make_overdue(self) -> list[Report]:
        """Steps with buffers that were full as soon as their pass began."""
        reports = []
        while self._joins.overdue:
            if self._joins.book.round is not None:
                self.gate.settle()
                continue
            sealed = self.prepared("push", self._joins.book.arrivals())
            self._joins.cut("overdue", sealed)
            self.step(sealed)
            reports.append(sealed.report)
        return reports

    def prepared(self, op: str, waiting: list[PendingArrival]) -> Round:
        """The round of these arrivals; whatever raises leaves no trace."""
        self._versions.refuse_damaged_newest(op, self._joins.book.current.version)
        try:
            draft = self._versions.take()
        except StoreError:
            raise
        except AffluxError as error:
            raise AffluxError(f"[{op}] {error}") from None
        store = self._store
        if store is not None:
            store.check()
        before = self._joins.before(len(waiting), (lambda memories: memories) if store is None else store.outs)
        sealed = prepare(self._rule, before, waiting, draft, self._num_threads)
        sealed.saved = store is None and not sealed.rows.staged
        sealed.checksums = None if store is None or self._device is not HOST else []
        return sealed

    def _make(self, work: Round | Total) -> None:
        if isinstance(work, Total) or work.saved:
            work.make(self._num_threads)
            return
        store, rows = self._store, self._joins.book.rows
        if not work.done:
            if rows is not None:
                rows.sweeping(work.rows)
            if store is not None:
                store.before(work)
        work.make(self._num_threads)
        if rows is not None:
            rows.collect(work.rows)
        if store is None:
            work.saved = True
        else:
            store.save(work, self._joins)

    def _commit(self, sealed: Round) -> None:
        """Makes the next version the newest one."""
        version = sealed.report.version
        current = Pulled(self._versions.finished(sealed.draft, version), version, sealed.buffers)
        if (rows := self._joins.book.rows) is not None:
            rows.commit(sealed.rows)
        self._joins.commit(current, sealed)
        sealed.release()


def _facts(arrival: PendingArrival) -> tuple[int, int, float]:
    """What its raw weight comes from."""
    return arrival.staleness, arrival.num_examples, arrival.norm
