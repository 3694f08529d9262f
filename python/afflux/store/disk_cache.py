"""Per-client rows on disk, and their sum: the interface of `MemoryRows`, at any number of clients."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from afflux.aggregation.cache.rows import Row, RowCache, Rows, row_crc
from afflux.aggregation.cache.staging import Stage, Stages
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError
from afflux.rules.rule import ClientId
from afflux.store.index import Index, Place
from afflux.store.segments import Segments
from afflux.store.vectors import Fresh, Vectors

#: So many places of rows are remembered between two rounds; it is a cache.
_REMEMBERED = 4096


class Table(NamedTuple):
    """Where the rows are that were changed since the last commit (the others: in SQLite). Not changed but replaced."""

    clients: int  #: those that have a row
    high: int  #: slots from here on were never used
    free: tuple[int, ...]  #: those below `high` that hold nothing
    sum: Row  #: on a GPU the one there, which is changed in place
    changed: dict[ClientId, tuple[int, int]]  #: since the last commit: rank among the clients, slot
    retired: tuple[int, ...] = ()  #: slots that the last commit refers to, and the present does not

    def committed(self) -> "Table":
        """The same, as soon as it is committed."""
        return self._replace(free=(*self.free, *self.retired), changed={}, retired=())


class Staged(Rows):
    """The rows of a round's accepted clients, and the table that goes with them."""

    table: Table  #: after the round and, as soon as it is committed, after that
    slots: dict[ClientId, int]


class DiskCache(RowCache):
    """Rows in slots of a Zarr array; a round writes new ones to slots that no commit refers to.

    Between two commits a row has one slot of its own, which later rounds update in place.
    """

    def __init__(
        self,
        segments: Segments,
        vectors: Vectors,
        index: Index,
        table: Table,
        *,
        size: int,
        num_clients: int,
        codec: Codec,
        seed: int,
        device: Device,
    ) -> None:
        stages = Stages(device, pinned=False) if isinstance(device, Gpu) else None
        super().__init__(size, num_clients, codec, seed, device, stages)
        self._segments = segments
        self._vectors = vectors
        self._index = index
        self._table = table
        self._crcs: dict[ClientId, bytes] = {}  # of the changed ones
        self._known: dict[ClientId, Place] = {}  # of those who have pushed since the last round, as the index has them
        lack = segments.lack(table.high - 1)
        if lack is not None:
            raise StoreError(f"[store] {lack}; {segments.remedy}")

    def __contains__(self, client_id: ClientId) -> bool:
        if client_id in self._table.changed:
            return True
        place = self._known.get(client_id) or self._index.row(client_id)
        return place is not None and place.rank < self._table.clients  # else it is committed, and does not count yet

    def __len__(self) -> int:
        return self._table.clients

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order in which they came."""
        table = self._table
        new = {rank: client_id for client_id, (rank, _) in table.changed.items() if rank >= 0}
        # Those that are committed and do not count yet are left out; those that were new until then come once.
        old = {place.rank: client_id for client_id, place in self._index.rows() if place.rank < table.clients}
        return [client_id for _, client_id in sorted((old | new).items())]

    def values(self) -> Iterator[Row]:
        """All rows, encoded, in the order of `client_ids`."""
        for client_id in self.client_ids:
            row = self._encoded(client_id)
            if row is not None:
                yield row

    @property
    def _total(self) -> Row:
        return self._table.sum

    def _slot(self, client_id: ClientId) -> int | None:
        changed = self._table.changed.get(client_id)
        if changed is not None:
            return changed[1]
        place = self._known.get(client_id) or self._index.row(client_id)
        return None if place is None else place.slot

    def _encoded(self, client_id: ClientId) -> Row | None:
        self.fetch(client_id, self._committed(client_id, "row"), "row")
        return self._lying(client_id)

    def _lying(self, client_id: ClientId) -> Row | None:
        slot = self._slot(client_id)
        if slot is None:
            return None
        self._segments.present([slot])
        return self._segments.array(slot)

    def _committed(self, client_id: ClientId, op: str) -> Place | None:
        """Where the row of a client lies that was not changed since the last commit."""
        if isinstance(client_id, str) and not client_id.isascii():
            try:
                client_id.encode()
            except UnicodeEncodeError as error:
                raise StoreError(f"[{op}] client_id {client_id!r} is no Unicode text: {error.reason}") from None
        if client_id in self._table.changed:
            return None
        place = self._index.row(client_id)
        lack = None if place is None else self._segments.lack(place.slot)
        if lack is not None:
            raise StoreError(f"[{op}] client {client_id!r}'s row: {lack}; {self._segments.remedy}")
        return place

    def prefetch(self, client_id: ClientId) -> Callable[[], Stage | None]:
        """Has the system read the row, while the vector is copied; what is returned waits for it, and checks it."""
        place = self._asked(client_id)

        def fetched() -> Stage | None:
            self.fetch(client_id, place)
            return None if self.stages is None else self.stages.begin(client_id, self._lying)

        return fetched

    def _asked(self, client_id: ClientId) -> Place | None:
        """Has the system read a client's row, and does not wait for it: what is to be given to `fetch`."""
        known = self._known  # the next round has another one
        place = self._committed(client_id, "push")
        if place is not None:
            if len(known) >= _REMEMBERED:  # pushes that complete no round: refused, or too old
                known.clear()
            known[client_id] = place
            self._segments.prefetch(place.slot)
        return place

    def fetch(self, client_id: ClientId, place: Place | None, op: str = "push") -> None:
        """Brings a client's row into memory, ahead of the round that replaces it, and checks it.

        Raises:
            StoreError: it does not agree with its checksum, or cannot be read.
        """
        while place is not None and client_id not in self._table.changed:
            row = self._segments.array(place.slot)
            self._segments.present([place.slot])
            if row_crc(row, self.codec) == place.crc:
                return
            before, place = place, self._committed(client_id, op)
            if place == before:  # else a commit has moved it meanwhile
                raise StoreError(
                    f"[{op}] client {client_id!r}'s row is damaged: slot {place.slot} of {self._segments.folder} does "
                    f"not agree with its checksum; {self._segments.remedy}"
                )

    def _places(
        self, client_ids: Collection[ClientId], accepted: Collection[ClientId], apart: Collection[ClientId]
    ) -> tuple[Mapping[ClientId, Row | None], Staged]:
        """On disk a row that the last commit refers to stays: its successor gets another slot."""
        table, segments = self._table, self._segments
        slots = {client_id: self._slot(client_id) for client_id in client_ids}
        old = {client_id: None if slot is None else segments.array(slot) for client_id, slot in slots.items()}
        free, high, count = list(table.free), table.high, table.clients
        changed, retired, left, new = dict(table.changed), list(table.retired), list[int](), Staged()
        for client_id in accepted:
            slot, row = slots[client_id], old[client_id]
            if row is not None and client_id in changed and client_id not in apart:
                new[client_id] = row
                continue
            if free:
                spare = free.pop()
            else:
                spare, high = high, high + 1
                segments.reserve(high)
            if slot is None:
                changed[client_id] = count, spare
                count += 1
            else:
                (left if client_id in changed else retired).append(slot)
                changed[client_id] = changed.get(client_id, (-1,))[0], spare
            new[client_id] = segments.blank(spare)
        segments.check(slot for slot in slots.values() if slot is not None)
        total = self._vectors.out("sum", table.sum) if new and self.device is HOST else table.sum
        new.clients = count
        new.sum_out = None if total is table.sum else total
        new.slots = {client_id: changed[client_id][1] for client_id in new}
        # What no commit refers to is free again as soon as this round, which reads it, is over.
        new.table = Table(count, high, (*free, *left), total, changed, tuple(retired))
        return old, new

    def present(self, rows: Staged) -> None:
        """Brings in what a sweep will write; what it reads was brought in by the pushes."""
        self._segments.present(rows.slots.values(), write=True)

    def swept(self, rows: Staged, known: Fresh, num_threads: int) -> None:
        """Takes note of the rows that a sweep has written, and of their checksums. May be repeated."""
        self._segments.check(rows.slots.values())
        for client_id, row in rows.items():
            self._segments.put(rows.slots[client_id], row)
            crc = known.get(row.ctypes.data)
            self._crcs[client_id] = row_crc(row, self.codec, num_threads) if crc is None else crc

    def changes(self, table: Table) -> dict[ClientId, Place]:
        """What a commit of this table has to write."""
        return {
            client_id: Place(slot, self._crcs[client_id], rank) for client_id, (rank, slot) in table.changed.items()
        }

    @property
    def table(self) -> Table:
        """The present one."""
        return self._table

    def flush(self, table: Table) -> None:
        """Returns when the changed rows are on the disk itself."""
        self._segments.flush(slot for _, slot in table.changed.values())

    def _count(self, rows: Rows) -> None:
        assert isinstance(rows, Staged)
        self.settle(rows.table)

    def settle(self, table: Table) -> None:
        """Takes a table over."""
        self._known = {}  # first: the index is right at any time, and a slot of before may be free in the new table
        self._table = table
        if not table.changed:
            self._crcs = {}
