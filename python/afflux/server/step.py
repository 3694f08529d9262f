"""`Server.step`: the round of pushes that a caller has all at once."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from afflux import ops
from afflux.aggregation.admission import Admission, ClientError
from afflux.aggregation.arrivals import Pushed
from afflux.aggregation.frames import clear_stored_frames
from afflux.aggregation.options import ServerOptions, reads_in_place
from afflux.aggregation.reports import Receipt, Report
from afflux.aggregation.round import Round
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError, StoreError, UnavailableError
from afflux.ops.validation import brief, unreadable
from afflux.server import versions
from afflux.server.aggregator import Aggregator
from afflux.server.checkout import close_overdue
from afflux.server.decisions import count_without_arrival, with_term
from afflux.server.inputs import NAME_OF_VECTOR, NO_MEMORY, InputAdapter, require_own_memory
from afflux.server.pending_push import NoArrival, Ticket, add_joined
from afflux.server.pushing import NO_TASK, CallError, PushCall, Taken, fault_of, take_in, ticket_of
from afflux.server.tracebacks import clear_tracebacks

#: A finished update of a client: (client, version, vector), or the arguments of `Server.push`.
Finished = tuple[Any, Any, Any] | Mapping[str, Any]


def make_step(
    aggregator: Aggregator,
    adapter: InputAdapter,
    options: ServerOptions,
    pushes: Iterable[Finished],
    out: "ops.Array | Tree | None",
) -> tuple[tuple[Receipt, ...], Report | None]:
    """Make the round of `Server.step`."""
    aggregator.enter("step")
    if out is not None:
        versions.copied(aggregator, partial(adapter.copy_out, "step", out=out, check=True))
    close_overdue(aggregator)
    batch: StepBatch | None = None
    try:
        batch = StepBatch(aggregator, adapter, _listed(pushes))
        receipts: tuple[Receipt, ...] = ()
        report: Report | None = None
        for in_place in (True, False) if _reads_in_place(aggregator, options) else (False,):
            batch.take_in(in_place=in_place)
            try:
                report = aggregator.flush(batch=batch)
                receipts = tuple(batch.receipts)
                break
            except (AffluxError, UnavailableError):
                if batch.is_decided or not in_place:
                    raise
            # Taken in as by pushes, each vector gets its receipt, or an error with the reason.
            batch.release()
    except Exception as error:
        is_decided = batch is not None and batch.is_decided
        if isinstance(error, StoreError):
            add_joined(error, joined=is_decided, subject="the pushes have", it="them")
        if not is_decided:
            aggregator.count_refused()
        raise
    finally:
        pushes = ()
        if batch is not None:
            batch.forget()
            batch.release()
        batch = None
        clear_stored_frames()
        aggregator.notify_waiters()
    if out is not None:
        try:
            versions.copied(aggregator, partial(adapter.copy_out, "step", out=out))
        except AffluxError as error:
            raise AffluxError(f"{error}; the round is made, as version {aggregator.admission.version}") from None
    del aggregator, adapter  # an error that a rule's part has caught and kept keeps this frame
    return receipts, report


def _reads_in_place(aggregator: Aggregator, options: ServerOptions) -> bool:
    """Return whether the sweep of a round may read the vectors of a step where they are."""
    rule, plane, storage = aggregator.rule, aggregator.plane, aggregator.storage
    if not plane.reads_in_place or options.inplace or not reads_in_place(rule, options):
        return False
    # A store has no third slot of a rule vector: between two commits a sweep overwrites the vector itself.
    return storage is None or storage.commit_every == 1 or not rule.rule_vectors


def _listed(pushes: object) -> list[Any]:
    """Return the entries of a step."""
    if type(pushes) is not list and isinstance(pushes, Mapping):
        raise CallError("[step] pushes is a dict, must be a list of (client, version, vector) or of push's arguments")
    try:
        entries: list[Any] = list(pushes)  # type: ignore[call-overload]
    except Exception as error:
        unreadable("[step] pushes", error)
    return entries


def _calls(entries: list[Any], kind: str) -> list[PushCall]:
    """Return the arguments of the pushes of a step."""
    calls = []
    for i, entry in enumerate(entries):
        try:
            if type(entry) is not tuple and isinstance(entry, Mapping):
                calls.append(PushCall(**entry))
                if calls[-1].timeout is not None:
                    raise TypeError("timeout is no argument of a step")
            else:
                client, version, vector = entry
                calls.append(PushCall(client=client, version=version, **{kind: vector}))
        except (TypeError, ValueError) as error:
            subject = f"[step] push {i} of the list is {brief(entry)}, must be (client, version, vector) or a dict of"
            raise CallError(f"{subject} push's arguments: {error}") from None
    return calls


class StepBatch:
    """The pushes of one step, see `afflux.server.aggregator.Batch`.

    Vectors that are read `in_place` are checked by the sweep of their round. It writes only new memory, and is made
    with the mutex, before the decision: if a value is not valid, or a vector is not read, nothing has changed.
    """

    def __init__(self, aggregator: Aggregator, adapter: InputAdapter, entries: list[Any]) -> None:
        self._aggregator, self._adapter, self._entries = aggregator, adapter, entries
        self._calls: list[PushCall] = []  #: read from the entries when they are needed, once
        self._in_place = False
        self._taken: list[Taken] | None = None  #: if the engine has taken all of them
        self._tickets: list[Ticket] = []  #: else
        self._clients: list[Any] = []  # after the decision
        self.receipts: list[Receipt] = []
        self.held_back = 0
        self.is_decided = False

    def take_in(self, *, in_place: bool) -> None:
        """Take in all vectors."""
        aggregator, entries, self._in_place = self._aggregator, self._entries, in_place
        pushes: Any = aggregator.admission.take_all(entries, in_place) or [None] * len(entries)
        if entries and all(pushes):
            self._taken = pushes
            return
        self._calls = self._calls or _calls(entries, self._adapter.kind)
        lend = partial(self._adapter.in_place, dtype=aggregator.slot_dtype) if in_place else None
        self._tickets = [
            Ticket(call, memory=NO_MEMORY) if plain is None else self._ticket_of(plain)
            for call, plain in zip(self._calls, pushes, strict=True)
        ]
        for ticket in self._tickets:
            if ticket.pushed is not None:
                continue
            try:
                if lend is None:  # all of them wait for one round: one that waits for a free slot might wait for ever
                    ticket.slot = aggregator.any_slot()
                ticket.pushed = take_in(aggregator, self._adapter, ticket, lend)
            except Exception as error:
                ticket.pushed = self._fault(error, ticket)
                if ticket.pushed is None:
                    raise
            finally:
                if ticket.reading:
                    aggregator.reading.discard(ticket)
        tickets = self._tickets
        place_of = {id(ticket) if ticket.task is None else ticket.task.task: i for i, ticket in enumerate(tickets)}
        places = [*place_of.values()]  # of several pushes of one task only one joins
        require_own_memory(
            "step",
            lambda i: f"push {places[i]} of the list (client {brief(tickets[places[i]].client_id)})",
            [tickets[place].memory for place in places],
        )

    def _fault(self, error: Exception, ticket: Ticket) -> NoArrival | None:
        """Return the fault of a client; None if the step must raise the error."""
        clear_tracebacks(error)
        return fault_of(error, ticket) if self._aggregator.records_faults else None

    def decided(self) -> Admission:
        """Return a draft that has the decisions about all pushes; an error changes nothing. May be repeated."""
        admission = self._aggregator.admission
        draft = admission.draft()
        receipts: list[Receipt] | None = None if self._taken is None else draft.join_all(self._taken)
        if receipts is None:
            if self._taken is not None:
                draft = admission.draft()
                self._tickets, self._taken = [self._ticket_of(plain) for plain in self._taken], None
            receipts = []
            for ticket in self._tickets:  # no closure: an error that is kept keeps closures
                receipts.append(self._decided(draft, ticket))
        self.receipts = receipts
        completes = not admission.by_flush and admission.filled < admission.round_size <= draft.filled
        self.held_back = sum([receipt.join is not None for receipt in receipts]) if completes else 0
        return draft

    def _ticket_of(self, plain: Taken) -> Ticket:
        """Return the ticket of a push that the engine has taken."""
        ticket = ticket_of(self._aggregator.admission, plain)
        if isinstance(ticket.slot, ops.Parts):
            ticket.memory = self._adapter.names or NAME_OF_VECTOR, [*ticket.slot.arrays]
        return ticket

    def _decided(self, draft: Admission, ticket: Ticket) -> Receipt:
        """Decide about a push in the draft; return its receipt."""
        task, pushed = ticket.task, ticket.pushed
        if task is not None and not draft.is_open(task.task) and self._aggregator.admission.is_open(task.task):
            pushed = NO_TASK  # an earlier push of the step has closed it
        if not isinstance(pushed, NoArrival):
            assert pushed is not None
            try:
                return self._joined(draft, pushed, ticket)
            except ClientError as error:
                pushed = self._fault(error, ticket)
                if pushed is None:
                    raise
        return count_without_arrival(draft, pushed)

    def _joined(self, draft: Admission, pushed: Pushed, ticket: Ticket) -> Receipt:
        """Decide about an arrival; return its receipt."""
        aggregator, task_id = self._aggregator, None if ticket.task is None else ticket.task.task
        if task_id is not None and not draft.is_open(task_id):
            refusal = NoArrival("expired", f"[push] task {task_id} is closed", pushed[0], pushed[1])
            return count_without_arrival(draft, refusal)
        receipt: Receipt | None = draft.join(pushed, ticket.staged_row, task_id, None)
        if receipt is None:
            status, staleness, _ = draft.check(pushed)
            if aggregator.accumulate and status == "joined":
                pushed = with_term(draft, pushed, staleness, aggregator.plane)
            receipt = draft.record(pushed, ticket.staged_row, task_id, None, None)
        return receipt

    def sweep(self, decided: Round | None) -> None:
        """Make the sweep of the round, if there is one that reads callers' arrays; an error changes nothing."""
        pushes, tickets = self._taken, self._tickets
        arrivals = len(pushes or ()) + sum([not isinstance(ticket.pushed, NoArrival) for ticket in tickets])
        if not self._in_place or not arrivals:
            return
        aggregator = self._aggregator
        if decided is None or [*map(type, decided.plan.slots)].count(ops.Parts) < arrivals:
            raise AffluxError("[step] a vector is not read")
        if aggregator.storage is not None:
            aggregator.storage.prepare_sweep(decided)
        if not decided.make_unchecked():
            decided.release()
            raise AffluxError("[step] a value is not valid")

    def adopt(self, draft: Admission) -> None:
        """Make the decisions of the draft those of the server."""
        self.is_decided = True
        self._aggregator.admission.adopt(draft)
        pushes, tickets = self._taken, self._tickets
        self._clients = [pushed[0] for pushed, _ in pushes] if pushes else [ticket.client_id for ticket in tickets]
        self.forget()  # on_step may take long

    def forget(self) -> None:
        """Release the vectors."""
        self._entries, self._calls, self._taken, self._tickets = [], [], None, []

    def release(self) -> None:
        """Release slots, versions and vectors, and warn about work that was dropped."""
        self._taken, self._tickets = None, []
        for client_id, receipt in zip(self._clients, self.receipts, strict=False):
            if receipt.status != "joined":
                self._aggregator.drop_watch.see(receipt.status, client_id, receipt.reason)
