"""The state of a server: all decisions so far."""

from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.participation import Participation
from afflux.aggregation.plane import NamedVectors, is_lent
from afflux.aggregation.reports import Pulled, Report, no_counts
from afflux.aggregation.round import Round
from afflux.aggregation.streaming import Term, Total
from afflux.rules.rule import Rule, Scalars


class ServerState(Struct, frozen=True, eq=False):
    """All decisions so far.

    A state is never changed. One assignment replaces it, so that an interrupt at any moment leaves the old state or the
    new one. States share the lists that grow, and have the numbers of their valid entries.
    """

    current: Pulled  #: the newest version
    rule: Rule  #: the rule of the arrivals in the buffer
    rows: RowCache | None
    waiting: list[PendingArrival]
    filled: int = 0  #: valid entries of `waiting`
    round: Round | None = None  #: the round that is decided, and not yet committed
    number: int = 0  #: the number of the next decision
    counts: dict[str, int] = field(default_factory=no_counts)
    logged: int = 0  #: valid entries of the log
    task_events: int = 0  #: valid entries of the list of tasks
    closed_task: str | tuple[str, ...] | None = None  #: the id of the task that was closed last, or those of a step
    rule_vectors: NamedVectors = MappingProxyType({})  #: changed in place by a sweep, if not in a store
    handed: frozenset[str] = frozenset()  #: the rule vectors that the user has set
    scalars: Scalars = MappingProxyType({})  #: the rule's own numbers
    passes: Participation | None = None  #: for rules that take every client once per pass
    decided_state: "ServerState | None" = None  #: this state when `round` was decided, which a store commits
    next_rule: Rule | None = None  #: replaces `rule` when the buffer is emptied
    since: float = 0.0  #: time.monotonic() of the join of the first arrival in the buffer
    unreported: tuple[Report, ...] = ()  #: steps for which on_step was not called yet, oldest first
    norms: tuple[float, ...] = ()  #: of the last arrivals that entered rounds, oldest first, for clip_norms
    round_counts: dict[str, int] = field(default_factory=no_counts)  #: `counts` when the last round was decided

    def arrivals(self) -> list[PendingArrival]:
        """Return the arrivals in the buffer."""
        return self.waiting[: self.filled]

    @property
    def counts_since_round(self) -> dict[str, int]:
        """The number of pushes by status since the last round was decided."""
        return {status: count - self.round_counts[status] for status, count in self.counts.items()}

    def deferred(self) -> list[PendingArrival]:
        """Return the arrivals that wait for the next pass."""
        return [] if self.passes is None else self.passes.waiting()

    @property
    def total(self) -> Total | None:
        """The sum of the arrivals in the buffer, if the server accumulates."""
        held = self.waiting[0].slot if self.filled else None
        return held.total if isinstance(held, Term) else None

    @property
    def unfinished(self) -> bool:
        """Whether a round, or a term of the sum, is decided and not yet computed."""
        if self.round is not None or not self.filled:
            return self.round is not None
        total = self.total
        return total is not None and total.added < self.filled

    @property
    def slots_held(self) -> int:
        """The number of the server's slots that the waiting arrivals occupy; those of the round are not counted."""
        total = self.total
        if total is not None:
            return self.filled - total.added
        return sum(not is_lent(w.slot) for w in [*self.arrivals(), *self.deferred()])


def after(state: ServerState, current: Pulled, rule_vectors: NamedVectors, done: Round) -> ServerState:
    """Return the state after a round, with its version and its rule vectors."""
    return replace(
        state,
        current=current,
        round=None,
        decided_state=None,
        scalars=done.scalars,
        rule_vectors=rule_vectors,
        norms=done.norms,
    )
