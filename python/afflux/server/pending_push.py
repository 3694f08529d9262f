"""A push in progress: its decision, and the resources that it holds."""

from typing import Any, NamedTuple

from msgspec import Struct, field

from afflux.aggregation.arrivals import Pushed
from afflux.aggregation.cache.staging import StagedRow
from afflux.aggregation.plane import Slot
from afflux.aggregation.reports import Opened, Status
from afflux.aggregation.round import Round
from afflux.ops.errors import AffluxError, StoreError
from afflux.rules.rule import ClientId


class TaskClosedError(AffluxError):
    """A push whose task was closed before: by another push, by the end of its lease, or by `Task.cancel`."""


class NoArrival(NamedTuple):
    """A push that makes no arrival, and the task that it closes."""

    status: Status
    reason: str
    client_id: ClientId | None = None
    pulled: int | None = None
    task: Opened | None = None


class Ticket(Struct, eq=False):
    """The resources that a push holds until it returns or raises, and what is known about it."""

    call: Any = None  #: the push's arguments (`afflux.server.pushing.PushCall`)
    pushed: Pushed | NoArrival | None = None  #: the facts of the push, if its vector was taken in first, or its fault
    slot: Slot | None = None
    staged_row: StagedRow | None = None  #: the client's row on the GPU
    decided: list[Any] = field(default_factory=list)  #: the receipt, and the arrival that this one has replaced
    completed: Round | None = None  #: the round that the arrival completes
    task: Opened | None = None  #: the task that the push closes
    made_step: bool = False  #: whether the push has completed a round
    reading: bool = False  #: whether the push's conversion reads a version
    client_id: Any = None
    pulled: Any = None  #: the number of the version that the client pulled
    memory: Any = None  #: of a push of a step: the caller's own arrays (`afflux.server.inputs.Memory`)
    checking: bool = False  #: whether the client's arguments are being checked


def add_joined(error: StoreError, *, joined: bool, subject: str = "the push has", it: str = "it") -> None:
    """Add to an error whether the arrival of a push has joined, or those of a step have."""
    if error.joined is None:  # else another push, which raised the error first, has set it
        error.joined = joined
        error.args = (f"{error}; {subject} {f'joined: do not push {it} again' if joined else 'not joined'}",)
