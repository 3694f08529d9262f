"""The version that each client of APPFL trains from, as far as it is known.

APPFL's messages do not contain the version.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from afflux import BlockedError
from afflux.aggregation.reports import Pulled
from afflux.integrations._appfl_replies import Last
from afflux.integrations._core import TrainingRun
from afflux.rules.rule import ClientId


@dataclass(slots=True)
class Client:
    """The known facts about a client."""

    size: Any = None  #: its number of examples; None: unknown
    last: Last | None = None  #: facts about its last model; None: it sent none, or it has requested a model since then
    joined: bool = False  #: whether one of its models has joined


class KnownClients:
    """The clients of a run: at most twice as many as may train, because ids may be forged.

    Args:
        run: the run of the server.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._most = run, 2 * run.concurrency
        self._resumed = run.server.joins > 0  # clients may send models that they trained in an earlier run
        self._known: dict[ClientId, Client] = {}  # by id, newest last
        #: The version that was sent without an id, and the time until which it counts. None: more than one version.
        self._first: tuple[Pulled | None, float] = (None, 0.0)
        self._seen: set[ClientId] = set()  # clients that had an assignment, while `_first` may count

    @property
    def ids(self) -> list[ClientId]:
        """The ids of the clients."""
        return [*self._known]

    def of(self, client: ClientId) -> Client:
        """Return the facts about this client.

        If there are too many clients, the oldest one is removed, preferably one without an assignment or without a
        joined model.
        """
        clients = self._known
        if client not in clients and len(clients) >= self._most:
            self._run.expire()
            useless = (name for name, own in clients.items() if not own.joined or name not in self._run.assignments)
            forgotten = next(useless, next(iter(clients)))
            self._run.cancel(forgotten)
            del clients[forgotten]
        if client not in clients:
            clients[client] = Client()
            self._run.clients.are(self.ids)
        clients[client] = clients.pop(client)  # the newest
        return clients[client]

    def assign(self, client: ClientId) -> Pulled:
        """Return the newest version, and record that the client trains from it, unless its pushes are rejected."""
        self._run.cancel(client)
        try:
            task = self._run.assign(client)
        except BlockedError:
            return self._run.server.pull()
        self._run.sent(client, task)
        self._seen.add(client)
        if len(self._seen) >= self._run.concurrency:  # all clients that may train have had an assignment
            self._first, self._seen = (None, inf), set()
        return task.pulled

    def sent_without_id(self, pulled: Pulled) -> None:
        """Record that an unknown client trains from this version."""
        now = self._run.now()
        before, until = self._first
        unique = now >= until or (before is not None and before.version == pulled.version)
        self._first = (pulled if unique else None, max(until, now + self._run.timeout))

    def claim_first(self, client: ClientId, trainings: int) -> None:
        """Assign the version that was sent without an id to a client that sends its first model."""
        pulled, until = self._first
        new = not self._resumed and client not in self._seen and trainings <= 1
        if self._run.now() >= until:
            self._first = (None, 0.0)  # the version is no longer held
        elif pulled is not None and new:
            self._seen.add(client)
            self._run.sent(client, self._run.assign(client), pulled=pulled)
