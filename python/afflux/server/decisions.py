"""The results of a decision about a push: its arrival, and its receipt."""

from pathlib import Path
from typing import Any, Protocol

from afflux.aggregation.admission import Admission
from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.reports import Fault, JoinStatus, Receipt, Report
from afflux.aggregation.round import Round
from afflux.aggregation.streaming import term_of
from afflux.server.pending_push import NoArrival, Ticket

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


def arrival_of(
    admission: Admission, pushed: Pushed, staleness: int, ticket: Ticket, adds_to: DataPlane | None
) -> PendingArrival:
    """Return the arrival of a push that is decided now; with a term, if a sum of this plane gets it."""
    # Without the class's own __new__, as for the receipt: that call takes three times as long.
    arrival = tuple.__new__(PendingArrival, (*pushed, admission.number, staleness, ticket.staged_row))
    if adds_to is None:
        return arrival
    facts, last = (staleness, arrival.num_examples, arrival.norm, arrival.facts), admission.last_term
    total = [adds_to.total()] if last is None else last.total
    return arrival._replace(slot=term_of(admission.rule, total, admission.filled, facts, ticket.slot))


def receipt_of(
    admission: Admission,
    pulled: int,
    decision: tuple[JoinStatus, int, int],
    report: Report | None = None,
) -> Receipt:
    """Return the receipt of a push.

    Args:
        admission: the decisions, this one among them.
        pulled: the version that the client pulled.
        decision: the status, the staleness, and the number of the join.
        report: that of the round that the arrival has completed.
    """
    status, staleness, join = decision
    makes = pulled + staleness + 1  # the version that the arrival's round makes
    skipped = report is not None and not report.stepped
    step = makes if status in ("joined", "replaced") and not skipped else None
    durable = admission.durable_version(makes)
    version = admission.version
    reason = "has entered in this pass" if status == "rejected" and admission.in_passes else ""
    return tuple.__new__(Receipt, (status, staleness, version, join, step, report, durable, reason))


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
