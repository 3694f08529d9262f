"""The decisions of a server about arrivals. `afflux._engine.Ledger` makes them; here they meet rules and rounds.

Callers hold the mutex, except where a method says otherwise. Each decision is one call that runs no code of Python: it
is made whole, or an interrupt comes before it. The attributes can be read without the mutex.
"""

from typing import Literal

from afflux._engine import Ledger
from afflux.aggregation.arrivals import PendingArrival, Pushed
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.plane import NamedVectors
from afflux.aggregation.reports import (
    Closed,
    Cut,
    Entry,
    Fault,
    Handed,
    Join,
    JoinStatus,
    Pulled,
    Receipt,
)
from afflux.aggregation.round import Round, RoundStart
from afflux.aggregation.state import Participation, ServerState
from afflux.aggregation.streaming import Term
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId, Rule, Scalars

#: The largest number of versions whose params are held for tasks, if the server was made without max_versions.
MOST_BASES = 64
_CLASSES = PendingArrival, Receipt, Join, Closed, ServerState, Participation


class ClientError(AffluxError):
    """An invalid argument from a client."""


class Admission(Ledger):
    """The decisions about arrivals, by the options of a server; their counts, the log, and the open tasks."""

    # The types of the ledger's attributes, which cannot be assigned.
    current: Pulled
    rule: Rule
    next_rule: Rule | None
    rows: RowCache | None
    round: Round | None
    rule_vectors: NamedVectors
    scalars: Scalars
    state: ServerState
    decided_state: ServerState | None
    faults: tuple[Fault, ...]
    growing_log: list[Entry] | None

    def __init__(self, options: ServerOptions, rule: Rule, *, reporting: bool) -> None:
        """Make a ledger without a state, which `load` gives it.

        Args:
            options: a result of `ServerOptions.for_rule`.
            rule: that of the server.
            reporting: whether reports of steps are kept until `next_report`.
        """
        assert options.duplicates is not None  # for_rule has set it
        most_bases = MOST_BASES if options.max_versions is None else options.max_versions
        super().__init__(
            _CLASSES,
            options.duplicates,
            options.max_staleness_for(rule),
            options.flush_after,
            options.rounds == "flush",
            options.log,
            reporting,
            options.accumulate,
            most_bases,
        )
        self.duplicates, self.limits = options.duplicates, options.limits
        self.averaged: int | None = None  #: the number of the model's buffers that are averaged; None: all
        self.fact_names = options.fact_names(rule)

    def entries(self) -> list[Entry]:
        """Return all decisions.

        Raises:
            AffluxError: the server keeps no log.
        """
        if self.growing_log is None:
            raise AffluxError(
                "[log] this server keeps no log: make it with log=True, and load no state of a server without a log"
            )
        return [*self.growing_log]

    def check(self, pushed: Pushed) -> tuple[JoinStatus, int, bool]:
        """Look at an arrival that would join now; nothing changes.

        Returns:
            Its status, its staleness, and whether it would complete the buffer.

        Raises:
            ClientError: there are too many clients, or the server has not made the client's version.
        """
        client_id, version = pushed[:2]
        status, staleness, completes = self.decide(client_id, version)
        if status is None and version < 0:
            raise ClientError(
                f"[push] client {brief(client_id)}'s staleness is {~version}; the server has made 0 to "
                f"{self.decided_version}: Server(first_version=) begins with another number"
            )
        if status is None:
            raise ClientError(
                f"[push] client {brief(client_id)} says that it pulled version {version}, which an older state that "
                "was loaded meanwhile has not made"
            )
        if status == "joined" and not self.has_room:
            self._check_clients(client_id)
        return status, staleness, completes

    @property
    def last_term(self) -> Term | None:
        """The term of the last arrival in the buffer, if the server accumulates."""
        slot = self.last_slot
        return slot if isinstance(slot, Term) else None

    @property
    def slots_held(self) -> int:
        """The number of the server's slots that the waiting arrivals occupy; those of the round are not counted."""
        term = self.last_term
        return self.filled if term is None else int(term.slot is not None)

    def before(self, arrivals: int, slot_bytes: int, *, ends_pass: bool = False) -> RoundStart:
        """Return the start of a round of this number of arrivals; `ends_pass`: also if clients have not entered.

        Raises:
            AffluxError: a rule vector that the rule reads was never set.
        """
        rule, handed = self.rule, self.handed
        for name in rule.needs.handed_in:
            if name not in handed:
                raise AffluxError(
                    f"[{rule.name}] the rule vector {name!r} was never handed in: set_rule_vector({name!r}, vector)"
                )
        ends_pass = self.in_passes and (ends_pass or self.left_in_pass == arrivals - self.filled)
        settings = self.limits, self.fact_names, self.averaged
        vectors = self.current, self.rule_vectors, self.rows
        return RoundStart(*vectors, self.scalars, self.norms, ends_pass, slot_bytes, *settings)

    def hand_in(self, rule_vectors: NamedVectors, name: str) -> None:
        """Replace the rule vectors; the user has set the one with this name."""
        self.set_rule_vectors(rule_vectors, self.handed | {name}, Handed(name))

    def draft(self) -> "Admission":
        """Return a draft of the decisions of one step, of which no arrival completes the buffer.

        Nothing of this object changes before `adopt`.
        """
        draft = Admission.__new__(Admission)
        Ledger.__init__(draft, self)
        draft.__dict__ = self.__dict__
        return draft

    def cut(
        self, kind: Literal["flush", "discard", "end_pass"], prepared: Round | None, joins: int = 0
    ) -> list[PendingArrival]:
        """Empty the buffer without a push. `prepared` is the round of its arrivals; None discards them.

        `joins` is that of the log's entry.

        Returns:
            The arrivals that are discarded.
        """
        return self.cut_buffer(prepared, Cut(kind, joins), kind == "end_pass")

    def _check_clients(self, client_id: ClientId) -> None:
        rows, making = self.rows, self.round
        if self.in_passes and self.left_in_pass == 0:
            raise ClientError(
                f"[push] client {brief(client_id)} would be number {len(self.entered) + 1} of this pass, but "
                f"num_clients is {self.pass_clients}"
            )
        assert rows is not None  # else there is room
        if client_id in rows:
            return
        coming = {} if making is None or making.moves is None else making.moves.numbers
        new = {w.client_id for w in self.arrivals() if w.client_id not in rows}
        new.update(other for other in coming if other not in rows)
        if client_id not in new and len(rows) + len(new) >= rows.num_clients:
            raise ClientError(
                f"[push] client {brief(client_id)} would be number {len(rows) + len(new) + 1}, but num_clients is "
                f"{rows.num_clients}"
            )
