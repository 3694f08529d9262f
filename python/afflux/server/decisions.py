"""What a decision about a push is made of: its arrival, or the receipt of a push without one."""

from pathlib import Path
from typing import Any, Protocol

from afflux.aggregation.admission import Admission
from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.cache.staging import StagedRow
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.reports import Fault, Receipt
from afflux.aggregation.round import Round
from afflux.aggregation.streaming import term_of
from afflux.server.pending_push import NoArrival

#: The most characters of a faulty client's id.
_MOST_ID = 500


class RoundStorage(Protocol):
    """What rounds need of a store (`afflux.store.store.Store`). Each method raises StoreError if the disk fails."""

    path: Path  #: for messages
    commit_every: int | None  #: rounds of a commit; None: no round commits

    def check(self) -> None:
        """Check that the open files still exist and are complete."""

    def prepare_sweep(self, decided: Round) -> None:
        """Make writable all memory that the sweep of this round writes. May be repeated."""

    def save_round(self, swept: Round, admission: Admission) -> None:
        """Record a round whose sweep has been made. Commit it if its version is one to commit. May be repeated."""


def arrival_of(admission: Admission, pushed: Pushed, staleness: int, staged_row: StagedRow | None) -> PendingArrival:
    """Return the arrival of a push that is decided now."""
    version = admission.decided_version - staleness
    # Without the class's own __new__: that call takes three times as long.
    facts = pushed[0], version, *pushed[2:], admission.number, staleness, staged_row
    return tuple.__new__(PendingArrival, facts)


def with_term(admission: Admission, pushed: Pushed, staleness: int, plane: DataPlane) -> Pushed:
    """Return the facts of a push that joins now, whose slot is a term that a sum of this plane gets."""
    last, (*before, slot, buffers, extremes, steps, facts) = admission.last_term, pushed
    total = [plane.total()] if last is None else last.total
    term = term_of(admission.rule, total, admission.filled, (staleness, pushed[2], pushed[4], facts), slot)
    return *before, term, buffers, extremes, steps, facts  # type: ignore[return-value]


def count_without_arrival(admission: Admission, push: NoArrival, decided: list[Any] | None = None) -> Receipt:
    """Count a push that makes no arrival, and close its task; return its receipt, which `decided` gets as well."""
    status, reason, client_id, pulled, task = push
    if task is not None and not admission.is_open(task.task):
        status, reason, task = "expired", "the task was closed meanwhile", None
    fault = None
    if status == "faulty":
        prefix = client_id[:_MOST_ID] if isinstance(client_id, str) else client_id
        fault = Fault(prefix, pulled, reason)
    newest, staleness = admission.version, None
    if pulled is not None and 0 <= pulled <= newest:
        staleness = admission.decided_version - pulled
    receipt = Receipt(status, staleness, newest, None, None, None, reason=reason)
    admission.count_push(status, None if task is None else task.task, fault, receipt, decided)
    return receipt
