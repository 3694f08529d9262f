"""The clients that may train: their ids, their consecutive failures, and the number of clients that a rule allows.

An address is the destination of a framework's messages, such as the number of a node. The id names the client in the
server, for example for cached rows. Id and address are equal unless the adapter defines another id.
"""

import random
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from afflux import Server
from afflux.integrations._settings import RunSettings
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, plain_id
from afflux.rules.rule import ClientId

#: A function from an address to the client's id; or, if each reply contains the id, its key in the reply.
ClientKey = Callable[[ClientId], ClientId] | str
#: A client rests at most 2**10 times as long as after its first failure.
_MOST_DOUBLINGS = 10
#: The most characters of a client's error message that are kept and logged.
MOST_REASON = 500


class _Failures(NamedTuple):
    times: int  #: number of consecutive failures
    until: float  #: the time until which the client rests, by the run's clock
    reason: str  #: reason of the last failure


class Clients:
    """The clients of one run.

    Args:
        server: the server of the run.
        settings: the settings of the run.
        key: the id of the client at an address; None: the address itself.
    """

    def __init__(self, server: Server, settings: RunSettings, key: ClientKey | None = None) -> None:
        self._settings, self._key = settings, key
        self._random = random.Random(settings.seed)
        self._there: list[ClientId] = []
        self._ids: dict[ClientId, ClientId] = {}  # by address, of clients whose id is known
        self._failures: dict[ClientId, _Failures] = {}  # by address
        rule = server.rule
        self._most = server.options.num_clients if rule.calibrate.cached or rule.needs.passes else None
        self._rule = rule.name
        #: The clients in the server's state: those with a row, and those that have entered in this pass.
        self.known: set[ClientId] = set() if self._most is None else known_clients(server)

    # Ids

    def id_of(self, address: ClientId) -> ClientId:
        """Return the id of the client at this address."""
        found = self._ids.get(address)
        if found is None:
            if self._key is None or isinstance(self._key, str):
                return address
            found = self._ids[address] = plain_id(self._key(address), "client_key")
        return found

    def identify(self, address: ClientId, client: object) -> ClientId:
        """Return the id of the client at this address, whose reply contains the id `client`.

        Raises:
            AffluxError: the reply has no id, another id than before, or that of another connected client; or the rule
                allows no further client.
        """
        if isinstance(self._key, str) and client is None:
            raise AffluxError(f"[client_key] nothing in the reply has the name {self._key!r}")
        name = plain_id(client, "client_key") if isinstance(self._key, str) else self.id_of(address)
        if self._most is not None and name not in self.known and len(self.known) >= self._most:
            raise AffluxError(f"[clients] {brief(name)} would be client {self._most + 1} of num_clients={self._most}")
        if self._key is None:
            return name
        before = self._ids.get(address)
        if before is not None and before != name:
            raise AffluxError(f"[client_key] the client has said that it is {brief(before)}, and now {brief(name)}")
        if before is None:
            for other in self._there:
                if other != address and self._ids.get(other) == name:
                    raise AffluxError(f"[client_key] another client that is there is {brief(name)}")
        return name

    def require_known(self) -> None:
        """Check that a resumed server knows at least one of the connected clients.

        Raises:
            AffluxError: it knows none, so its state of each client would never be used again.
        """
        said = isinstance(self._key, str) and not all(address in self._ids for address in self._there)
        if self._there and self.known and not said and self.known.isdisjoint(map(self.id_of, self._there)):
            raise AffluxError(
                f"[resume] the store keeps something for {len(self.known)} clients of {self._rule}, such as "
                f"{brief(min(self.known, key=str))}, and none of the {len(self._there)} clients that are there is one "
                f"of them: {brief(self.id_of(self._there[0]))}. A store that was "
                "begun with such ids cannot be resumed: begin with a new one, and with client_key= from its first start"
            )

    @property
    def source(self) -> str:
        """A description of the source of the ids."""
        if self._key is None:
            return "its address (client_key=None)"
        return f"client_key={self._key!r}" if isinstance(self._key, str) else "a function of its address"

    def require_source(self, before: str | None) -> None:
        """Check that replies name clients by the same source as before the resumption.

        `before` is None if the earlier source is unknown.

        Raises:
            AffluxError: the source differs, and the server's state contains clients.
        """
        if isinstance(self._key, str) and self.known and before not in (None, self.source):
            raise AffluxError(
                f"[resume] the store was begun with {before} as the id of a client, and this run has {self.source}: "
                "give the same client_key, or begin with a new store"
            )

    @property
    def are_kept(self) -> bool:
        """Whether the rule keeps state for each client."""
        return self._most is not None

    # Choice

    @property
    def there(self) -> int:
        """The number of connected clients."""
        return len(self._there)

    def are(self, addresses: Iterable[ClientId]) -> None:
        """Set the addresses of the connected clients."""
        self._there = list(addresses)
        gone = self._failures.keys() - set(self._there)
        for address in gone:
            del self._failures[address]
        for address in self._ids.keys() - set(self._there):
            del self._ids[address]

    def choose(self, count: int, busy: Collection[ClientId], now: float) -> list[ClientId]:
        """Draw the addresses of at most `count` clients that are not busy and do not rest."""
        idle = [address for address in self._there if address not in busy]
        if self._failures:
            idle = [address for address in idle if not self._rests(address, now)]
        if self._most is not None:
            return self._with_room(self._random.sample(idle, len(idle)), count, busy)
        return self._random.sample(idle, min(count, len(idle)))

    def _rests(self, address: ClientId, now: float) -> bool:
        failed = self._failures.get(address)
        return failed is not None and now < failed.until

    def _with_room(self, idle: list[ClientId], count: int, busy: Collection[ClientId]) -> list[ClientId]:
        """Return the first of these addresses that the rule allows."""
        assert self._most is not None
        taken = self.known | {self.id_of(address) for address in busy}
        kept: list[ClientId] = []
        for address in idle:
            client = self.id_of(address)
            unknown = isinstance(self._key, str) and address not in self._ids
            if len(kept) < count and (unknown or client in taken or len(taken) < self._most):
                kept.append(address)
                taken.add(client)
        return kept

    # Failures

    def succeeded(self, address: ClientId, client: ClientId, *, joined: bool) -> None:
        """Record a reply that was no failure; with `joined`, the reply has joined."""
        self._failures.pop(address, None)
        if self._key is not None:
            self._ids[address] = client
        if joined and self._most is not None:
            self.known.add(client)

    def failed(self, address: ClientId, reason: str, took: float, now: float) -> None:
        """Record that a client has failed, or has not replied, after `took` seconds."""
        before = self._failures.get(address)
        count = 1 if before is None else before.times + 1
        rest = max(self._settings.retry_after, took) * 2 ** min(count - 1, _MOST_DOUBLINGS)
        self._failures[address] = _Failures(count, now + rest, reason[:MOST_REASON])

    def require_some_of_use(self, most: int | None = None) -> None:
        """Check that not all clients fail.

        Args:
            most: the number of failures in a row; None: max_failures.

        Raises:
            RuntimeError: all connected clients have failed so many times in a row.
        """
        if len(self._failures) < len(self._there) or not self._there:
            return
        most = most or self._settings.max_failures
        if all(self._failures[address].times >= most for address in self._there):
            last = max(self._failures.values(), key=lambda failed: failed.until)
            raise RuntimeError(
                f"none of {len(self._there)} clients is of use: each has failed {most} times in a row or more, for "
                f"example: {last.reason}"
            )


def known_clients(server: Server) -> set[ClientId]:
    """Return the ids of the clients in a server's state."""
    rows, passes = server.rows, server._aggregator.admission.state.passes
    found: set[ClientId] = set() if rows is None else set(rows.client_ids)
    return found if passes is None else found | set(passes.order[: passes.entered])
