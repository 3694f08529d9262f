"""Where the rows of clients lie that were read or committed lately, so that SQLite need not be asked for each push."""

from collections.abc import Collection, Mapping
from threading import Lock
from typing import Literal

from afflux.rules.rule import ClientId
from afflux.store.segments import Place

#: Bytes of memory, about; those of an entry without its checksums.
_MOST_BYTES, _ENTRY_BYTES = 8 << 20, 300


class RecentPlaces:
    """The newest places by client, None for those that have no row; the oldest are forgotten.

    What stands here is what the index says: while a commit is written, its clients are not here, and a thread that has
    read their entries just before cannot add them. An interrupt at any moment leaves entries out, never wrong ones in.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._places: dict[ClientId, Place | None] = {}
        self._changing: Collection[ClientId] = ()
        self._all_change = False
        self._lock = Lock()

    def get(self, client_id: ClientId) -> Place | Literal["unknown"] | None:
        """The client's place; None: it has no row."""
        return self._places.get(client_id, "unknown")

    def add(self, client_id: ClientId, place: Place | None) -> None:
        """What was read of the last commit."""
        with self._lock:
            if not self._all_change and client_id not in self._changing:
                self._put(client_id, place)

    def begin_commit(self, rows: Mapping[ClientId, Place], *, others: bool) -> dict[ClientId, Place | None]:
        """From now on until `end_commit` the rows of these clients change, and with `others` those of all clients."""
        with self._lock:
            self._changing, self._all_change = rows.keys(), others
            before = {client_id: self._places.pop(client_id) for client_id in rows if client_id in self._places}
            if others:
                self._places.clear()
        return before

    def end_commit(self, rows: Mapping[ClientId, Place], before: Mapping[ClientId, Place | None]) -> None:
        """The rows are committed; `before` is what `begin_commit` has returned."""
        with self._lock:
            for client_id, place in rows.items():
                if place.rank >= 0:
                    self._put(client_id, place)
                elif (old := before.get(client_id)) is not None:  # its rank stays
                    self._put(client_id, Place(place.slot, place.crc, old.rank))
            self._changing, self._all_change = (), False

    def _put(self, client_id: ClientId, place: Place | None) -> None:
        entry = _ENTRY_BYTES + (0 if place is None else len(place.crc))
        while len(self._places) >= max(1, self._most_bytes // entry):
            del self._places[next(iter(self._places))]
        self._places[client_id] = place
