"""The clients that may train: their ids, their consecutive failures, and the number of clients that a rule allows.

An address is the destination of a framework's messages, such as the number of a node. The id names the client in the
server, for example for cached rows. Id and address are equal unless the adapter defines another id.
"""

import random
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from logging import getLogger
from math import inf
from typing import Any, NamedTuple

from afflux import Server
from afflux.integrations._server import keeps_clients
from afflux.integrations._settings import RunSettings
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, plain_id, shortened
from afflux.rules.rule import ClientId

#: A function from an address to the client's id; or, if each reply contains the id, its key in the reply.
ClientKey = Callable[[ClientId], ClientId] | str
#: A client rests at most 2**10 times as long as after its first failure.
_MOST_DOUBLINGS = 10
#: Seconds after which the run ends if none of the clients that are there may train: others may come back.
_MOST_EXCLUDED = 60.0
_MOST_NAMED = 10  # in one warning
_HOW_TO_NAME = "A client that was restarted may have a new address: client_key= recognizes it"
#: A function from the addresses of idle clients and a number to at most that number of these addresses.
ClientSelection = Callable[[list[ClientId], int], Iterable[ClientId]]


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

    Attributes:
        are_kept: whether the rule keeps state for each client.
        known: the clients in the server's state: those with a row, and those that have entered in this pass, or in a
            round, if it counts their rounds.
        there: the addresses of the connected clients, without those that are left out.
        warn: logs a warning: a message and its arguments.
        select: chooses among the idle clients; None: at random.
    """

    def __init__(self, server: Server, settings: RunSettings, key: ClientKey | None = None) -> None:
        self._settings, self._key = settings, key
        self._random = random.Random(settings.seed)
        self.warn: Callable[..., object] = getLogger("afflux").warning
        self.select: ClientSelection | None = None
        self._none_selected = False
        self.there: list[ClientId] = []
        self._left_out: dict[ClientId, str] = {}  # reason by address, of connected clients that get no task
        self._excluded_since: float | None = None  # the time since which all connected clients are left out
        self._looks = 0  # number of calls of `are`
        self._chosen: dict[ClientId, int] = {}  # by address: the look before its last task
        #: by address: the look before the last task that it has replied to, or the look that found it
        self._active: dict[ClientId, int] = {}
        self._ids: dict[ClientId, ClientId] = {}  # by address, of clients whose id is known
        self._failures: dict[ClientId, _Failures] = {}  # by address
        self.are_kept = keeps_clients(server.rule) or server.rule.needs.participations is not None
        self._most = (server.options.num_clients if self.are_kept else None) or inf
        self._rule = server.rule.name
        self.known: set[ClientId] = set()
        if self.are_kept:
            self.known.update(server.clients)

    # Ids

    def id_of(self, address: ClientId) -> ClientId:
        """Return the id of the client at this address."""
        if callable(self._key) and address not in self._ids:
            self._ids[address] = plain_id(self._key(address), "client_key")
        return self._ids.get(address, address)

    def identify(self, address: ClientId, client: object) -> ClientId:
        """Return the id of the client at this address, whose reply contains the id `client`.

        Raises:
            AffluxError: the reply has no id, another id than before, or that of another connected client, unless that
                client has replied to no task since this one has connected: a client that was restarted may have a new
                address.
                Or the rule allows no further client.
        """
        if isinstance(self._key, str) and client is None:
            raise AffluxError(f"[client_key] nothing in the reply has the name {self._key!r}")
        name = plain_id(client, "client_key") if isinstance(self._key, str) else self.id_of(address)
        if self._is_full() and name not in self.known:
            reason = f"{brief(name)} would be client {len(self.known) + 1} of num_clients={self._most}"
            if address in self.there:
                self._leave_out([address], reason)
            raise AffluxError(f"[clients] {reason}")
        if self._key is None:
            return name
        before = self._ids.get(address)
        if before is not None and before != name:
            raise AffluxError(f"[client_key] the client has said that it is {brief(before)}, and now {brief(name)}")
        if any(self._active[other] >= self._active.get(address, 0) for other in self._namesakes(address, name)):
            raise AffluxError(f"[client_key] another client that is there is {brief(name)}")
        return name

    def _namesakes(self, address: ClientId, name: ClientId) -> list[ClientId]:
        """Return the other addresses that have this id; none for an address that has had the id before."""
        if address in self._ids:
            return []
        return [other for other in self.there if other != address and self._ids.get(other) == name]

    def require_known(self) -> None:
        """Check that a resumed server knows at least one of the connected clients.

        Raises:
            AffluxError: it knows none, so its state of each client would never be used again.
        """
        anonymous = isinstance(self._key, str) and not all(address in self._ids for address in self.there)
        if self.there and self.known and not anonymous and self.known.isdisjoint(map(self.id_of, self.there)):
            raise AffluxError(
                f"[resume] the store keeps something for {len(self.known)} clients of {self._rule}, such as "
                f"{brief(min(self.known, key=str))}, and none of the {len(self.there)} clients that are there is one "
                f"of them: {brief(self.id_of(self.there[0]))}. A store that was "
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

    # Choice

    def are(self, addresses: Iterable[ClientId]) -> None:
        """Set the addresses of the connected clients. One without an id is left out, with a warning."""
        present = dict.fromkeys(addresses, self._looks + 1)
        tables: list[dict[ClientId, Any]] = [self._failures, self._ids, self._left_out, self._active, self._chosen]
        for table in tables:
            for address in table.keys() - present.keys():
                del table[address]
        if self._key is not None:
            self._looks += 1
            self._active = present | self._active
        nameless: dict[str, list[ClientId]] = {}
        for address in [address for address in present if address not in self._ids] if callable(self._key) else ():
            try:
                self.id_of(address)
                self._left_out.pop(address, None)
            except Exception as error:
                nameless.setdefault(f"client_key has no id for it: {error!r}", []).append(address)
        for reason, excluded in nameless.items():
            self._leave_out(excluded, reason)
        self.there = [address for address in present if address not in self._left_out]

    def _leave_out(self, addresses: list[ClientId], reason: str) -> None:
        """Give the clients at these addresses no task as long as they are connected, and warn once."""
        new = [address for address in addresses if address not in self._left_out]
        if new:
            self._left_out.update(dict.fromkeys(new, reason))
            self.there = [address for address in self.there if address not in self._left_out]
            names = ", ".join(map(str, new[:_MOST_NAMED]))
            others = f" and {len(new) - _MOST_NAMED} others" if len(new) > _MOST_NAMED else ""
            self.warn("No task goes to client %s%s: %s", names, others, reason)

    def have_all_entered(self, entered: Collection[ClientId]) -> bool:
        """Return whether the connected clients are those that have entered in a pass, and others that have failed."""
        ids = [self.id_of(address) for address in self.there if address not in self._failures]
        return bool(ids) and all(client in entered for client in ids)

    def choose(
        self, count: int, busy: Collection[ClientId], now: float, entered: Collection[ClientId] = ()
    ) -> list[ClientId]:
        """Draw the addresses of at most `count` clients that are not busy, do not rest, and have not entered."""
        idle = [address for address in self.there if address not in busy]
        if entered:
            idle = [address for address in idle if self.id_of(address) not in entered]
        if failures := self._failures:
            idle = [address for address in idle if address not in failures or now >= failures[address].until]
        most = count if self.select is None else len(idle)
        idle = self._random.sample(idle, len(idle) if self.are_kept else min(most, len(idle)))
        if self.are_kept:
            idle = self._with_room(idle, most, busy)
        if self.select is not None and idle:
            idle = self._selected(self.select, idle, count, not busy)
        if self._key is not None:
            self._chosen.update(dict.fromkeys(idle, self._looks))
        return idle

    def _selected(self, select: ClientSelection, idle: list[ClientId], count: int, waits: bool) -> list[ClientId]:
        """Return the choice of the user's function."""
        chosen = select(list(idle), count)
        choice = list(chosen) if isinstance(chosen, Iterable) else [chosen]
        if len(choice) > count or len(set(choice)) < len(choice) or not set(choice) <= set(idle):
            most = f"at most {count} of {brief(idle)}, each once"
            raise AffluxError(f"[choose] the choice is {brief(choice)}, must be {most}")
        if waits and not choice and not self._none_selected:
            self.warn("None of %d idle clients is chosen, and none trains: the run waits", len(idle))
        self._none_selected = waits and not choice
        return choice

    def _with_room(self, idle: list[ClientId], count: int, busy: Collection[ClientId]) -> list[ClientId]:
        """Return the first of these addresses that the rule allows."""
        taken = self.known | {self.id_of(address) for address in busy}
        chosen: list[ClientId] = []
        excluded: list[ClientId] = []
        for address in idle:
            client = self.id_of(address)
            unknown = isinstance(self._key, str) and address not in self._ids
            if not unknown and self._is_full() and client not in self.known:
                excluded.append(address)
            elif len(chosen) < count and (unknown or client in taken or len(taken) < self._most):
                chosen.append(address)
                taken.add(client)
        reason = f"{self._rule} keeps something for each client, and has room for num_clients={self._most}"
        self._leave_out(excluded, f"{reason}. {_HOW_TO_NAME}" if self._key is None else reason)
        return chosen

    def _is_full(self) -> bool:
        return len(self.known) >= self._most

    # Failures

    def succeeded(self, address: ClientId, client: ClientId, *, joined: bool) -> None:
        """Record a reply that was no failure; with `joined`, the reply has joined."""
        self._failures.pop(address, None)
        if self._key is not None:
            for other in self._namesakes(address, client):
                self._leave_out([other], f"{brief(client)} has connected again, as {address}")
                del self._ids[other]
            self._ids[address] = client
            self._active[address] = self._chosen.get(address, self._active.get(address, 0))
        if joined and self.are_kept:
            self.known.add(client)

    def failed(self, address: ClientId, reason: str, start: float, now: float) -> None:
        """Log that a client, whose task was sent at `start`, has failed or has not replied."""
        text, count = shortened(reason), self._failures[address].times + 1 if address in self._failures else 1
        rest = max(self._settings.retry_after, now - start) * 2 ** min(count - 1, _MOST_DOUBLINGS)
        self._failures[address] = _Failures(count, now + rest, text)
        self.warn("Client %s: %s", address, text)

    def require_some_of_use(self, now: float | None = None, *, most: int | None = None) -> None:
        """Check that not all clients fail, and at the time `now` that some of them may train.

        Args:
            now: the time of the run's clock; None: whether some may train is not checked.
            most: the number of failures in a row; None: max_failures.

        Raises:
            RuntimeError: all connected clients have failed so many times in a row, or have been left out for a minute.
        """
        if self.there or not self._left_out:
            self._excluded_since = None
        elif now is not None:
            since = self._excluded_since = now if self._excluded_since is None else self._excluded_since
            if now - since >= _MOST_EXCLUDED:
                (address, reason), count = next(iter(self._left_out.items())), len(self._left_out)
                example = f"for example {address}: {reason}"
                raise RuntimeError(f"none of the {count} clients that are there may train, {example}")
        most, failures = most or self._settings.max_failures, self._failures
        if failures and self.there and all(each in failures and failures[each].times >= most for each in self.there):
            last = max((failures[each] for each in self.there), key=lambda failed: failed.until)
            raise RuntimeError(
                f"none of {len(self.there)} clients is of use: each has failed {most} times in a row or more, for "
                f"example: {last.reason}"
            )


def has_id(key: ClientKey | None, address: ClientId) -> bool:
    """Return whether a function `key` has an id for this address; True if replies contain the ids."""
    with suppress(Exception):
        return not callable(key) or plain_id(key(address), "client_key") is not None
    return False
