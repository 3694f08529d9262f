"""Which version each client of APPFL trains from, as far as that can be known: APPFL's messages do not say it."""

from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from afflux.aggregation.reports import Pulled
from afflux.integrations._appfl_replies import Last
from afflux.integrations._core import TrainingRun
from afflux.rules.rule import ClientId


@dataclass(slots=True)
class Client:
    """What is known of a client."""

    size: Any = None  #: its number of examples; None: not known
    last: Last | None = None  #: of its last model; None: none, or it has asked for the model since
    joined: bool = False  #: whether a model of it has joined


class KnownClients:
    """The clients of a run, at most twice as many as may train, because ids may be invented.

    Args:
        run: of the server.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._most = run, 2 * run.concurrency
        self._resumed = run.server.joins > 0  # clients may send what they have trained for an earlier run
        self._known: dict[str, Client] = {}  # by the key of the assignment, the newest one last
        #: What was sent without an id, None if that is more than one version; and until when it counts.
        self._first: tuple[Pulled | None, float] = (None, 0.0)
        self._seen: set[str] = set()  # keys of the clients that have had an assignment, while `_first` may count

    def of(self, client: ClientId) -> Client:
        """What is known of this client. One of too many is forgotten: the oldest one, if possible one without a model
        that has joined, or without an assignment.
        """
        key, known = ascii(client), self._known
        if key not in known and len(known) >= self._most:
            self._run.expire()
            useless = (name for name, own in known.items() if not own.joined or self._run.address_of(name) is None)
            forgotten = next(useless, next(iter(known)))
            self._run.cancel(forgotten)
            del known[forgotten]
        known[key] = found = known.pop(key, None) or Client()
        return found

    def assign(self, client: ClientId) -> Pulled:
        """From now on the client trains from the newest version."""
        key = ascii(client)
        self._run.cancel(key)
        task = self._run.assign(client)
        self._run.sent(key, task)
        self._seen.add(key)
        if len(self._seen) >= self._run.concurrency:  # none of the clients is new any more
            self._first, self._seen = (None, inf), set()
        return task.pulled

    def sent_without_id(self, pulled: Pulled) -> None:
        """Some client trains from this version."""
        now = monotonic()
        before, until = self._first
        unique = now >= until or (before is not None and before.version == pulled.version)
        self._first = (pulled if unique else None, max(until, now + self._run.timeout))

    def claim_first(self, client: ClientId, trainings: int) -> None:
        """Assigns the version that was sent without an id to a client that sends its first model."""
        key, (pulled, until) = ascii(client), self._first
        new = not self._resumed and key not in self._seen and trainings <= 1
        if monotonic() >= until:
            self._first = (None, 0.0)  # the version is no longer held
        elif pulled is not None and new:
            self._seen.add(key)
            self._run.sent(key, self._run.assign(client), pulled=pulled)
