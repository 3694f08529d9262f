"""Cached rows of clients on disk, and their sum: a `RowCache` for any number of clients."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from afflux._engine import RowCheck, address
from afflux.aggregation.cache.new_rows import NewRows, Row
from afflux.aggregation.cache.rows import RowCache, RowRead, row_blocks, row_crc
from afflux.aggregation.cache.staging import RowStaging, StagedRow
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId
from afflux.store.index import Index
from afflux.store.segments import Place, Segments
from afflux.store.vectors import SweepChecksums, VectorSlots


class RowTable(NamedTuple):
    """The rows that have changed since the last commit, and their slots; the other rows are in the index.

    A table is immutable: a new table replaces it.
    """

    clients: int  #: clients that have a row
    high: int  #: slots from this number on were never used
    free: tuple[int, ...]  #: unused slots below `high`
    sum: Row  #: on a GPU the sum on the GPU, which is updated in place
    changed: dict[ClientId, tuple[int, int]]  #: rank among the clients (-1: as in the index), slot
    retired: tuple[int, ...] = ()  #: slots to which only the last commit refers

    def after_commit(self) -> "RowTable":
        """Return the table after its commit: the same rows, none of them changed."""
        return self._replace(free=(*self.free, *self.retired), changed={}, retired=())


class NewDiskRows(NewRows):
    """The rows of a round's accepted clients, and their slots."""

    table: RowTable  #: the table after the round, or after the round's commit, if there is one
    slots: dict[ClientId, int]


class DiskCache(RowCache):
    """Rows in slots of a Zarr array. A round writes new rows to slots to which no commit refers.

    Between two commits a changed row has one slot, which later rounds update in place.
    """

    def __init__(
        self,
        segments: Segments,
        vectors: VectorSlots,
        index: Index,
        table: RowTable,
        *,
        size: int,
        num_clients: int,
        codec: Codec,
        seed: int,
        device: Device,
        num_threads: int,
    ) -> None:
        staging = RowStaging(device, pinned=False) if isinstance(device, Gpu) else None
        super().__init__(size, num_clients, codec, seed, device, staging)
        self.reads_ahead = True
        self._segments = segments
        self._vectors = vectors
        self._index = index
        self._table = table
        self._blocks = row_blocks(codec)
        self._num_threads = num_threads
        self._crcs: dict[ClientId, bytes] = {}  # checksums of the changed rows
        problem = segments.missing_slot(table.high - 1)
        if problem is not None:
            raise StoreError(f"[store] {problem}; {segments.remedy}")

    def __contains__(self, client_id: ClientId) -> bool:
        if client_id in self._table.changed:
            return True
        place = self._index.row(client_id)
        # A rank beyond the table: the row is committed, and its round is not published yet.
        return place is not None and place.rank < self._table.clients

    def __len__(self) -> int:
        return self._table.clients

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""
        table = self._table
        new = {rank: client_id for client_id, (rank, _) in table.changed.items() if rank >= 0}
        # Without the rows whose round is not published yet. A client that was new until this commit is in both.
        old = {place.rank: client_id for client_id, place in self._index.rows() if place.rank < table.clients}
        return [client_id for _, client_id in sorted((old | new).items())]

    def values(self) -> Iterator[Row]:
        """Yield all rows, encoded, in the order of `client_ids`."""
        for client_id in self.client_ids:
            row = self._encoded(client_id)
            if row is not None:
                yield row

    @property
    def _own_sum(self) -> Row:
        return self._table.sum

    def _slot(self, client_id: ClientId) -> int | None:
        changed = self._table.changed.get(client_id)
        if changed is not None:
            return changed[1]
        place = self._index.row(client_id)
        return None if place is None else place.slot

    def _encoded(self, client_id: ClientId) -> Row | None:
        self.fetch(client_id, self._committed_place(client_id, "row"), "row")
        return self._stored_row(client_id)

    def _stored_row(self, client_id: ClientId) -> Row | None:
        """Return a client's row in its slot, without a check of its checksum."""
        slot = self._slot(client_id)
        if slot is None:
            return None
        self._segments.populate([slot])
        return self._segments.array(slot)

    def _committed_place(self, client_id: ClientId, op: str) -> Place | None:
        """Return the place of a row that has not changed since the last commit."""
        if client_id in self._table.changed:
            return None
        place = self._index.row(client_id)
        problem = None if place is None else self._segments.missing_slot(place.slot)
        if problem is not None:
            raise StoreError(f"[{op}] client {brief(client_id)}'s row: {problem}; {self._segments.remedy}")
        return place

    def prefetch(self, client_id: ClientId) -> RowRead | None:
        """Start to read a client's row, and return the read; None: there is nothing to read.

        On the host, if the file is mapped, the row is read in parallel with the sweep that copies the vector. Otherwise
        the system is asked to start reading it.
        """
        place, check = self._committed_place(client_id, "push"), None
        if place is not None and self._segments.mapped and self.device is HOST:
            check = RowCheck(self._segments.array(place.slot), *self._blocks, place.crc, self._num_threads)
        elif place is not None:
            self._segments.prefetch(place.slot)
        elif self.staging is None:
            return None

        def finish() -> StagedRow | None:
            if check is None or not check.sound:
                self.fetch(client_id, place)
            return None if self.staging is None else self.staging.start_upload(client_id, self._stored_row)

        return RowRead(check, finish)

    def fetch(self, client_id: ClientId, place: Place | None, op: str = "push") -> None:
        """Read a client's row into memory before the round that replaces it, and verify its checksum.

        Raises:
            StoreError: the row does not match its checksum, or cannot be read.
        """
        while place is not None and client_id not in self._table.changed:
            row = self._segments.array(place.slot)
            self._segments.populate([place.slot])
            if row_crc(row, self.codec) == place.crc:
                return
            before, place = place, self._committed_place(client_id, op)
            if place == before:  # else a commit has moved the row meanwhile
                raise StoreError(
                    f"[{op}] client {brief(client_id)}'s row is damaged: slot {place.slot} of {self._segments.folder} "
                    f"does not agree with its checksum; {self._segments.remedy}"
                )

    def _allocate(
        self, client_ids: Collection[ClientId], accepted: Collection[ClientId], unaliased: Collection[ClientId]
    ) -> tuple[Mapping[ClientId, Row | None], NewDiskRows]:
        """Allocate as `RowCache` does. A new row also gets another slot if the last commit refers to the old slot."""
        table, segments = self._table, self._segments
        slots = {client_id: self._slot(client_id) for client_id in client_ids}
        old = {client_id: None if slot is None else segments.array(slot) for client_id, slot in slots.items()}
        free, high, count = list(table.free), table.high, table.clients
        changed, retired, left, new = dict(table.changed), list(table.retired), list[int](), NewDiskRows()
        for client_id in accepted:
            slot, row = slots[client_id], old[client_id]
            if row is not None and client_id in changed and client_id not in unaliased:
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
            new[client_id] = segments.empty(spare)
        segments.check(slot for slot in slots.values() if slot is not None)
        total = self._vectors.output("sum", table.sum) if new and self.device is HOST else table.sum
        new.clients = count
        new.sum_out = None if total is table.sum else total
        new.slots = {client_id: changed[client_id][1] for client_id in new}
        # A slot to which no commit refers becomes free only at the end of this round, because the round reads it.
        new.table = RowTable(count, high, (*free, *left), total, changed, tuple(retired))
        return old, new

    def populate(self, rows: NewDiskRows) -> None:
        """Map the pages that the sweep writes. The pushes have already read the pages that the sweep reads."""
        self._segments.populate(rows.slots.values(), write=True)

    def record_sweep(self, rows: NewDiskRows, checksums: SweepChecksums) -> None:
        """Record the rows that a sweep has written, and their checksums. May be repeated."""
        segments = self._segments
        segments.check(rows.slots.values())
        for client_id, row in rows.items():
            if not segments.mapped:  # else it is the slot's own memory
                segments.write(rows.slots[client_id], row)
            crc = checksums.get(address(row))
            self._crcs[client_id] = row_crc(row, self.codec, self._num_threads) if crc is None else crc

    def changed_places(self, table: RowTable) -> dict[ClientId, Place]:
        """Return the places that a commit of this table writes to the index."""
        return {
            client_id: Place(slot, self._crcs[client_id], rank) for client_id, (rank, slot) in table.changed.items()
        }

    @property
    def table(self) -> RowTable:
        """The current table."""
        return self._table

    def flush(self, table: RowTable) -> None:
        """Wait until the changed rows are on the disk itself."""
        self._segments.flush(slot for _, slot in table.changed.values())

    def _commit_rows(self, rows: NewRows) -> None:
        assert isinstance(rows, NewDiskRows)
        self.set_table(rows.table)

    def set_table(self, table: RowTable) -> None:
        """Replace the table."""
        self._table = table
        if not table.changed:
            self._crcs = {}
