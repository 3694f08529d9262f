"""The state of a server: all decisions so far."""

from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct, field

from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.plane import NamedVectors
from afflux.aggregation.reports import Closed, Entry, Opened, Pulled, no_counts
from afflux.aggregation.round import Round
from afflux.aggregation.streaming import Term
from afflux.rules.rule import ClientId, Rule, Scalars


class Participation(NamedTuple):
    """The clients that have entered in the current pass of gradient scheduling, those in the buffer last.

    For a rule that limits participations: the clients of all rounds, once for each round that they were in.
    """

    num_clients: int | None  #: of a pass; None: there are no passes
    order: list[ClientId]  #: later ones are appended
    entered: int  #: valid entries of `order`


class ServerState(Struct, frozen=True, eq=False):
    """All decisions so far: what a commit contains, and what a server loads.

    The decisions that follow append to the lists that grow. The state has the numbers of their entries.
    """

    current: Pulled  #: the newest version
    rule: Rule  #: the rule of the arrivals in the buffer
    rows: RowCache | None
    waiting: list[PendingArrival]  #: the buffer
    round: Round | None = None  #: the round that is decided, and not yet committed
    number: int = 0  #: the number of the next decision
    counts: dict[str, int] = field(default_factory=no_counts)
    log: list[Entry] | None = None
    logged: int = 0  #: entries of the log
    task_events: list[Opened | Closed] = []  #: the tasks that were opened and closed, since the last compaction
    events: int = 0  #: entries of `task_events`
    rule_vectors: NamedVectors = MappingProxyType({})  #: changed in place by a sweep, if not in a store
    handed: frozenset[str] = frozenset()  #: the rule vectors that the user has set
    scalars: Scalars = MappingProxyType({})  #: the rule's own numbers
    participation: Participation | None = None  #: for rules with passes or a limit of participations
    next_rule: Rule | None = None  #: replaces `rule` when the buffer is emptied
    norms: tuple[float, ...] = ()  #: of the last arrivals that entered rounds, oldest first, for clip_norms

    @property
    def filled(self) -> int:
        """The number of arrivals in the buffer."""
        return len(self.waiting)

    @property
    def terms(self) -> list[Term]:
        """The terms of the arrivals in the buffer, all added, if the server accumulates."""
        return [arrival.slot for arrival in self.waiting if isinstance(arrival.slot, Term)]
