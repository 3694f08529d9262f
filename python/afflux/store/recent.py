"""A cache of the places of rows that were read or committed recently. It spares most pushes a query to SQLite."""

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Literal

from afflux.rules.rule import ClientId
from afflux.store.segments import Place

_MOST_BYTES = 8 << 20  #: bytes of memory, approximately
_ENTRY_BYTES = 300  #: bytes of an entry, without its checksums and the text of a client id


class RecentPlaces:
    """The newest places by client; None for clients that have no row. The oldest entries are removed.

    An entry agrees with the last commit. While a commit is written, its clients have no entry. A place that a thread
    has read before the end of a commit is not added after the commit. After an interrupt, entries may be missing, but
    are never wrong.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._places: OrderedDict[ClientId, Place | None] = OrderedDict()
        self._lock = Lock()
        #: A counter that changes when a commit begins and when it ends.
        self.generation = 0

    def get(self, client_id: ClientId) -> Place | Literal["unknown"] | None:
        """Return the client's place; None if the client has no row, "unknown" if there is no entry."""
        return self._places.get(client_id, "unknown")

    def add(self, client_id: ClientId, place: Place | None, generation: int) -> None:
        """Add a place that was read from the last commit, unless a commit has begun or ended since.

        Args:
            client_id: the client.
            place: its place; None if it has no row.
            generation: the value of `generation` before the place was read.
        """
        with self._lock:
            if generation == self.generation and not generation % 2:
                self._put(client_id, place)

    def begin_commit(self, rows: Mapping[ClientId, Place], *, others: bool) -> dict[ClientId, Place | None]:
        """Remove the places of the clients of `rows` until `end_commit`, and return these places.

        With `others`, remove the places of all clients.
        """
        with self._lock:
            self.generation += 1 + self.generation % 2  # odd also after a commit that has failed
            before = {client_id: self._places[client_id] for client_id in rows if client_id in self._places}
            for client_id in list(self._places) if others else before:
                self._remove(client_id)
        return before

    def end_commit(self, rows: Mapping[ClientId, Place], before: Mapping[ClientId, Place | None]) -> None:
        """Add the rows that are now committed; `before` is the result of `begin_commit`."""
        with self._lock:
            for client_id, place in rows.items():
                if place.rank >= 0:
                    self._put(client_id, place)
                elif (old := before.get(client_id)) is not None:  # the rank does not change
                    self._put(client_id, Place(place.slot, place.crc, old.rank))
            self.generation += 1

    def _put(self, client_id: ClientId, place: Place | None) -> None:
        if client_id in self._places:
            self._remove(client_id)
        self._places[client_id] = place
        self._bytes += _size(client_id, place)
        while self._bytes > self._most_bytes and len(self._places) > 1:
            self._remove(next(iter(self._places)))

    def _remove(self, client_id: ClientId) -> None:
        self._bytes -= _size(client_id, self._places.pop(client_id))


def _size(client_id: ClientId, place: Place | None) -> int:
    text = len(client_id) if isinstance(client_id, str) else 0
    return _ENTRY_BYTES + text + (0 if place is None else len(place.crc))
