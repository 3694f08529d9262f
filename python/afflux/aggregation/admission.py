"""The decision about each arrival. Callers hold a mutex."""

from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any, Literal, Self

from msgspec.structs import replace

from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.limits import Limits
from afflux.aggregation.options import Duplicates
from afflux.aggregation.participation import Participation
from afflux.aggregation.plane import NamedVectors, is_lent
from afflux.aggregation.reports import (
    Closed,
    Cut,
    Decision,
    Entry,
    Fault,
    Handed,
    Join,
    NewParams,
    Opened,
    Pulled,
    Replaced,
    Report,
    Status,
)
from afflux.aggregation.round import Round, RoundStart
from afflux.aggregation.state import ServerState, after
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId, Rule

#: The number of newest faults that are kept.
FAULTS_KEPT = 1000


class ClientError(AffluxError):
    """An invalid argument from a client."""


class Admission:
    """The decisions about arrivals, by the options of a server; their counts, and the log."""

    def __init__(
        self,
        duplicates: Duplicates,
        max_staleness: int | None,
        limits: Limits,
        log: bool,
        first: ServerState,
        copies: str | None,
        flush_after: float | None = None,
        reporting: bool = False,
        max_deferred: int | None = None,
        fact_names: tuple[str, ...] = (),
    ) -> None:
        self.duplicates = duplicates
        self.max_staleness = max_staleness
        self.limits = limits
        self.averaged: int | None = None  #: the number of the model's buffers that are averaged; None: all
        self.state = first
        self.flush_after = flush_after  #: seconds; None: no limit
        self.reporting = reporting  #: whether reports of steps are kept until `next_report`
        self.max_deferred = max_deferred  #: arrivals that may wait for the next pass; None: any number
        self.fact_names = fact_names  #: the facts that pushes may have
        self.replaying = False  #: whether a log is replayed: a push leaves its overdue rounds to the next entry
        self.least_overdue = 0  #: in a replay, `overdue` at the next entry of the log: rounds beyond this came later
        self.by_flush = False  #: whether only `flush` ends rounds: no arrival completes the buffer
        self._drafted: Self | None = None  # of a draft: the object of which it is one
        self.copies = copies  #: the reason why vectors are always copied; None: they may be lent
        self.faults: deque[Fault] = deque(maxlen=FAULTS_KEPT)
        self._log: list[Entry] | None = [] if log else None
        self._task_events: list[Opened | Closed] = []  # since the last compaction
        # The index of each client's waiting arrival; empty if duplicates is "both". Entries may be outdated: the state
        # determines which arrivals wait.
        self._places: dict[ClientId, int] = {}

    @property
    def growing_log(self) -> list[Entry] | None:
        """The list of the log, whose number of valid entries is in the state; None if there is no log."""
        return self._log

    @property
    def growing_task_events(self) -> list[Opened | Closed]:
        """The list of tasks that were opened and closed; its number of valid entries is in the state."""
        return self._task_events

    @property
    def log(self) -> list[Entry] | None:
        """All decisions; None if the server keeps no log."""
        return None if self._log is None else self._log[: self.state.logged]

    def entries(self) -> list[Entry]:
        """Return all decisions.

        Raises:
            AffluxError: the server keeps no log.
        """
        if self.log is None:
            raise AffluxError(
                "[log] this server keeps no log: make it with log=True, and load no state of a server without a log"
            )
        return self.log

    def counted(self, pushed: Pushed) -> Pushed:
        """Return the facts of a push with the version of its client; they have the staleness s as version -1 - s.

        Raises:
            ClientError: the server has made fewer versions.
        """
        client_id, version, *others = pushed
        state = self.state
        newest = state.current.version + (state.round is not None)
        if newest + 1 + version < 0:
            raise ClientError(
                f"[push] client {brief(client_id)}'s staleness is {~version}; the server has made 0 to {newest}: "
                "Server(first_version=) begins with another number"
            )
        return client_id, newest + 1 + version, *others

    def status(self, client_id: ClientId, version: int) -> tuple[Decision, int]:
        """Return the status and the staleness that an arrival would have if it joined now; nothing changes.

        Raises:
            ClientError: there are too many clients, or the version does not exist yet.
        """
        state = self.state
        # A decided round counts even before its sweep is made, so that the decisions alone determine the staleness.
        staleness = state.current.version + (state.round is not None) - version
        if staleness < 0:
            raise ClientError(
                f"[push] client {brief(client_id)} says that it pulled version {version}, which an older state that "
                "was loaded meanwhile has not made"
            )
        if self.max_staleness is not None and staleness > self.max_staleness:
            return "dropped", staleness
        if state.passes is not None and (state.passes.has(client_id) or not state.passes.left):
            full = self.max_deferred is not None and state.passes.queued >= self.max_deferred
            return "rejected" if full else "deferred", staleness
        place = None if client_id not in self._places else self._place(client_id)
        if place is None:
            if state.rows is not None:
                self._check_clients(client_id, state.rows)
            return "joined", staleness
        if self.duplicates == "reject":
            return "rejected", staleness
        return "superseded" if state.waiting[place].version > version else "replaced", staleness

    def completes(self, status: Decision) -> bool:
        """Return whether an arrival with this status makes the round of the buffer."""
        return not self.by_flush and self.fills(status)

    def fills(self, status: Decision) -> bool:
        """Return whether the buffer is full after an arrival with this status."""
        state = self.state
        full = state.rule.buffer_size if state.passes is None else self._target()
        return status == "joined" and state.filled + 1 == full

    @property
    def overdue(self) -> int:
        """The number of waiting arrivals if those of the buffer fill it, so that their round needs no push; else 0.

        A buffer is full, between two calls, only if a pass began with it.
        """
        state = self.state
        if self.by_flush or state.passes is None or not state.filled or state.filled != self._target():
            return 0
        return state.filled + state.passes.queued

    @property
    def late(self) -> bool:
        """Whether the buffer has held arrivals for longer than `flush_after`."""
        seconds, state = self.flush_after, self.state
        return seconds is not None and state.filled > 0 and monotonic() - state.since > seconds

    def _target(self) -> int:
        """Return the number of arrivals of a full buffer: M, or the number of clients that are left in the pass."""
        state = self.state
        size = state.rule.buffer_size
        return size if state.passes is None else min(size, state.passes.left + state.filled)

    def before(self, arrivals: int, slot_bytes: int) -> RoundStart:
        """Return the start of a round of this number of arrivals.

        Raises:
            AffluxError: a rule vector that the rule reads was never set.
        """
        state = self.state
        for name in state.rule.needs.handed_in:
            if name not in state.handed:
                raise AffluxError(
                    f"[{state.rule.name}] the rule vector {name!r} was never handed in: "
                    f"set_rule_vector({name!r}, vector)"
                )
        ends_pass = state.passes is not None and state.passes.left == arrivals - state.filled
        settings = self.limits, self.fact_names, self.averaged
        vectors = state.current, state.rule_vectors, state.rows
        return RoundStart(*vectors, state.scalars, state.norms, ends_pass, slot_bytes, *settings)

    def record(
        self, status: Decision, arrival: PendingArrival, prepared: Round | None, closed: Closed | None = None
    ) -> None:
        """Record a decision; `prepared` is the round that the arrival completes, `closed` the push's task."""
        state = self.state
        passes, scalars, counts = state.passes, state.scalars, state.counts
        waiting, filled, since = state.waiting, state.filled, state.since
        rule, next_rule, unreported, norms = state.rule, state.next_rule, state.unreported, state.norms
        if passes is not None and status == "joined":
            passes = passes.enter(arrival.client_id)
        elif passes is not None and status == "deferred":
            passes = passes.defer(arrival)
        if prepared is not None:
            rule, next_rule, since = next_rule or rule, None, monotonic()
            waiting, passes, counts = self._opened(passes, prepared)
            filled = len(waiting)
            if not prepared.report.stepped:
                scalars, norms, unreported = prepared.scalars, prepared.norms, self._with_report(prepared.report)
        elif status == "joined":
            if not filled:
                since = monotonic()
            if self.duplicates != "both":
                self._places[arrival.client_id] = filled
            waiting[filled:] = [arrival]
            filled += 1
        elif status == "replaced":
            waiting = state.arrivals()
            waiting[self._places[arrival.client_id]] = arrival
        logged, task_events, closed_task = state.logged, state.task_events, state.closed_task
        if self._log is not None or closed is not None:
            logged, task_events, closed_task = self._written(status, arrival, closed)
        counts = {**counts, status: counts[status] + 1}
        # A round without a step ends as soon as it is decided.
        decided = prepared if prepared is not None and prepared.report.stepped else state.round
        # Positional arguments take half the time of keywords, and every push runs this.
        new = ServerState(
            state.current,
            rule,
            state.rows,
            waiting,
            filled,
            decided,
            state.number + 1,
            counts,
            logged,
            task_events,
            closed_task,
            state.rule_vectors,
            state.handed,
            scalars,
            passes,
            state.decided_state,
            next_rule,
            since,
            unreported,
            norms,
            state.round_counts if prepared is None else counts,
        )
        self.state = new if decided is state.round else replace(new, decided_state=new)
        if prepared is not None:
            self._places = {}

    def _written(
        self, status: Decision, arrival: PendingArrival, closed: Closed | None
    ) -> tuple[int, int, str | tuple[str, ...] | None]:
        """Write the entries of a decision to the log and to the list of tasks.

        Returns:
            The new numbers of entries of both, and the id of the task that was closed last.
        """
        state = self.state
        logged, task_events, closed_task = state.logged, state.task_events, state.closed_task
        if self._log is not None:
            client_id, version, num_examples, loss, _, slot, _, _, steps, facts, join, staleness, _ = arrival
            lent = is_lent(slot)
            entry = Join(join, status, client_id, version, staleness, num_examples, loss, lent, steps, facts)
            self._log[logged:] = [entry] if closed is None else [entry, closed]
            logged += 1 + (closed is not None)
        if closed is not None:
            self._task_events[task_events:] = [closed]
            task_events += 1
            closed_task = closed.task
        return logged, task_events, closed_task

    def _opened(
        self, passes: Participation | None, prepared: Round
    ) -> tuple[list[PendingArrival], Participation | None, dict[str, int]]:
        """Return the buffer, the pass and the counts after a round.

        The buffer has only the arrivals that waited for this pass.
        """
        state = self.state
        counts, rule = state.counts, state.next_rule or state.rule
        if passes is None:
            return [], None, counts
        oldest = 0 if self.max_staleness is None else prepared.report.version - self.max_staleness
        entering, dropped, passes = passes.opened(rule.buffer_size, oldest)
        if dropped:
            moved = {"deferred": counts["deferred"] - dropped, "dropped": counts["dropped"] + dropped}
            counts = {**counts, **moved}
        return entering, passes, counts

    def count(self, status: Status | Literal["refused"], closed: Closed | None = None) -> None:
        """Count a push without a decision about an arrival; "refused": it raised an error. `closed` closes its task."""
        counts = self.state.counts
        counts = {**counts, status: counts[status] + 1}
        self.state = replace(self.state if closed is None else self._noted(closed), counts=counts)

    def note(self, event: Opened | Closed) -> None:
        """Record that a task was opened, or closed without a push."""
        self.state = self._noted(event)

    def _noted(self, event: Opened | Closed) -> ServerState:
        """Return the state with this event in the log and in the list of tasks."""
        state = self.state
        logged, task_events = state.logged, state.task_events
        if self._log is not None:
            self._log[logged:] = [event]
            logged += 1
        self._task_events[task_events:] = [event]
        closed_task = event.task if isinstance(event, Closed) else state.closed_task
        return replace(state, logged=logged, task_events=task_events + 1, closed_task=closed_task)

    def compact_task_events(self, still_open: list[Opened | Closed]) -> None:
        """Remove closed tasks from the list. There must be no round that is decided and not committed."""
        self._task_events, self.state = still_open, replace(self.state, task_events=len(still_open))

    def hand_in(self, rule_vectors: NamedVectors, name: str) -> None:
        """Replace the rule vectors; the user has set the one with this name."""
        state = self.state
        logged = state.logged
        if self._log is not None:
            self._log[logged:] = [Handed(name, self.overdue)]
            logged += 1
        self.state = replace(state, rule_vectors=rule_vectors, handed=state.handed | {name}, logged=logged)

    def with_params(self, current: Pulled) -> ServerState:
        """Return the state after the caller has set params, with the entry of the log, which counts with the state."""
        state = self.state
        logged = state.logged
        if self._log is not None:
            self._log[logged:] = [NewParams(self.overdue)]
            logged += 1
        return replace(state, current=current, logged=logged)

    def replace_rule(self, rule: Rule, config: Mapping[str, Any]) -> bool:
        """Replace the rule: at once if the buffer is empty, else when the buffer is emptied.

        Returns:
            Whether the rule was replaced at once.
        """
        state = self.state
        at_once, logged = not state.filled, state.logged
        if self._log is not None:
            self._log[logged:] = [Replaced(config, self.overdue)]
            logged += 1
        now, later = (rule, None) if at_once else (state.rule, rule)
        self.state = replace(state, rule=now, next_rule=later, logged=logged)
        return at_once

    def draft(self) -> Self:
        """Return a copy for the decisions of one step, of which no arrival completes the buffer.

        Nothing of this object changes before `adopt`: the two share the lists that grow, beyond the entries that count.
        """
        draft = object.__new__(type(self))
        draft.__dict__.update(self.__dict__)  # copy() takes ten times as long
        draft.by_flush, draft.faults, draft._drafted = True, deque(), self
        return draft

    def adopt(self, draft: "Admission") -> None:
        """Make the decisions of a draft those of this object, whose state has not changed but for `refused`."""
        faults = deque((*self.faults, *draft.faults), FAULTS_KEPT) if draft.faults else self.faults
        # One statement without a call, as in `load`.
        self.faults, self._places, self.state = faults, draft._places, draft.state

    def cut(self, kind: Literal["flush", "discard", "overdue"], prepared: Round | None, joins: int = 0) -> None:
        """Empty the buffer without a push. `prepared` is the round of its arrivals; None discards them.

        Overdue rounds need no entry in the log. `joins` is that of the entry.
        """
        state = self.state
        if self._drafted is not None:  # calls within the rule's weigh part were refused meanwhile
            refused = self._drafted.state.counts["refused"]
            self.state = state = replace(state, counts={**state.counts, "refused": refused})
        logged = state.logged
        if self._log is not None and kind != "overdue":
            self._log[logged:] = [Cut(kind, self.overdue, joins)]
            logged += 1
        waiting: list[PendingArrival] = []
        passes, scalars, counts, unreported = state.passes, state.scalars, state.counts, state.unreported
        norms, round_counts = state.norms, state.round_counts
        if prepared is None:
            passes = passes and passes.emptied(state.filled)
        else:
            waiting, passes, counts = self._opened(passes, prepared)
            round_counts = counts
            if not prepared.report.stepped:
                unreported = self._with_report(prepared.report)
                scalars, norms, prepared = prepared.scalars, prepared.norms, None
        new = replace(
            state,
            rule=state.next_rule or state.rule,
            next_rule=None,
            since=monotonic(),
            unreported=unreported,
            waiting=waiting,
            filled=len(waiting),
            round=prepared,
            logged=logged,
            scalars=scalars,
            counts=counts,
            passes=passes,
            norms=norms,
            round_counts=round_counts,
        )
        self.state = new if prepared is None else replace(new, decided_state=new)
        self._places = {}

    def discard_leftovers(self) -> None:
        """Remove entries beyond the counts, which an interrupt may have left."""
        del self.state.waiting[self.state.filled :]
        if self.state.passes is not None:
            self.state.passes.discard_leftovers()

    def commit(self, current: Pulled, rule_vectors: NamedVectors, done: Round) -> None:
        """End the round, and make its version the newest one."""
        state = after(self.state, current, rule_vectors, done)
        self.state = replace(state, unreported=self._with_report(done.report)) if self.reporting else state

    def abandon_round(self) -> None:
        """End the round without publishing its version."""
        self.state = replace(self.state, round=None, decided_state=None)

    def _with_report(self, report: Report) -> tuple[Report, ...]:
        """Return the waiting reports and this one; none if reports are not kept."""
        return (*self.state.unreported, report) if self.reporting else ()

    def next_report(self) -> Report | None:
        """Remove and return the oldest waiting report; None if there is none."""
        state = self.state
        if not state.unreported:
            return None
        first, *others = state.unreported
        self.state = replace(state, unreported=tuple(others))
        return first

    def load(self, state: ServerState, log: list[Entry] | None) -> None:
        """Replace the state by a saved one.

        After this the server keeps a log only if it kept one before and the saved state has one: a log never begins in
        the middle.
        """
        places = {} if self.duplicates == "both" else {w.client_id: i for i, w in enumerate(state.arrivals())}
        log = None if self._log is None else log
        state = replace(state, since=monotonic(), unreported=self.state.unreported, round_counts=state.counts)
        # One statement without a call: an interrupt comes before it or after it.
        self._log, self._places, self.state = log, places, state

    def _place(self, client_id: ClientId) -> int | None:
        place, state = self._places.get(client_id), self.state
        if place is None or place >= state.filled or state.waiting[place].client_id != client_id:
            return None
        return place

    def _check_clients(self, client_id: ClientId, rows: RowCache) -> None:
        making = self.state.round
        coming = {} if making is None or making.moves is None else making.moves.numbers
        if client_id in rows or len(rows) + len(coming) + self.state.filled < rows.num_clients:
            return  # room for all, even if all waiting clients are new; a count at each push would be quadratic in M
        new = {w.client_id for w in self.state.arrivals() if w.client_id not in rows}
        new.update(other for other in coming if other not in rows)
        if client_id not in new and len(rows) + len(new) >= rows.num_clients:
            raise ClientError(
                f"[push] client {brief(client_id)} would be number {len(rows) + len(new) + 1}, but num_clients is "
                f"{rows.num_clients}"
            )
