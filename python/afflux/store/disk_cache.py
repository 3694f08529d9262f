"""Cached rows of clients on disk, and their sum, in one piece or in shards: a `RowCache` for any number of clients."""

from collections.abc import Callable, Sequence
from typing import Any

from afflux._engine import RowCheck, address, forks
from afflux.aggregation.cache.rows import LocalRows, RowCache, RowRead
from afflux.aggregation.cache.staging import NewRows, RowStaging, StagedRow
from afflux.aggregation.cache.table import RowMoves, RowPlan, SlotCounts
from afflux.aggregation.sharded_plane import ShardedPlane, Shards
from afflux.aggregation.sharded_rows import ShardedRows
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.ops import CachedDifference, CachedMean
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError, UnavailableError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId
from afflux.store.checksums import SweepChecksums, row_blocks, row_crc
from afflux.store.index import Index
from afflux.store.segments import Place, Row, Segments
from afflux.store.shards import StoredPart
from afflux.store.vector_slots import VectorSlots

_FORKED = "[rows] this process was forked, and the rows are in a store of its parent"


class DiskRows(LocalRows):
    """Rows in slots of one Zarr array, and the checksums of those that sweeps have written since the last commit."""

    in_state = False

    def __init__(
        self,
        segments: Segments,
        vectors: VectorSlots,
        total: Row,
        *,
        size: int,
        codec: Codec,
        device: Device,
        num_threads: int,
    ) -> None:
        """`total` is the sum; on a GPU a copy of it, which is updated in place."""
        staging = RowStaging(device, pinned=False) if isinstance(device, Gpu) else None
        super().__init__(size, codec, device, staging)
        self.segments = segments
        self.row = segments.array  # its pages may not be in memory yet
        self.sum = total
        self.checksums: dict[int, bytes] = {}  #: by slot
        self._vectors = vectors
        self._blocks = row_blocks(codec)
        self._num_threads = num_threads

    def _empty(self, slot: int) -> Row:
        return self.segments.empty(slot)

    def _spare_sum(self) -> Row | None:
        out = self._vectors.output("sum", self.sum) if self.device is HOST else self.sum
        return None if out is self.sum else out

    def missing(self, slot: int) -> str | None:
        """Describe why a slot to which a commit refers is missing, with the remedy; None if it is not missing."""
        problem = self.segments.missing_slot(slot)
        return None if problem is None else f"{problem}; {self.segments.remedy}"

    def start_read(self, place: Place) -> RowCheck | None:
        """Start to read a row, and return its check, for `ingest` to make in parallel.

        Return None where that is not possible. Then the system is asked to start reading the row.
        """
        if self.segments.mapped and self.device is HOST:
            return RowCheck(self.row(place.slot), *self._blocks, place.crc, self._num_threads)
        self.prefetch(place.slot)
        return None

    def damage(self, place: Place) -> str | None:
        """Read a row into memory. Describe its damage, with the remedy; None if it has its checksums."""
        self.load(place.slot)
        if row_crc(self.row(place.slot), self.codec) == place.crc:
            return None
        slot, folder = place.slot, self.segments.folder
        return f"slot {slot} of {folder} does not agree with its checksum; {self.segments.remedy}"

    def load(self, slot: int) -> None:
        """Read a row into memory."""
        self.segments.populate([slot])

    def checksums_of(self, slots: Sequence[int]) -> Sequence[bytes]:
        """Return the checksums of rows that have changed since the last commit."""
        return [self.checksums[slot] for slot in slots]

    def prefetch(self, slot: int) -> None:
        """Ask the system to start reading a row."""
        self.segments.prefetch(slot)

    def forget_checksums(self) -> None:
        """Forget all checksums: the rows are committed."""
        self.checksums = {}

    def prepare(self, plan: RowPlan) -> tuple[CachedDifference | CachedMean, NewRows]:
        """Prepare as `LocalRows` does, and allocate segments for new slots."""
        self.segments.reserve(plan.high)
        prepared = super().prepare(plan)
        self.segments.check(slot for slot in plan.reads if slot is not None)
        return prepared

    def publish(self, new: NewRows) -> None:
        """Make the sum that the sweep has written the current one; the rows are in their slots. May be repeated."""
        if new.sum_out is not None:
            self.sum = new.sum_out

    def populate(self, new: NewRows) -> None:
        """Map the pages that the sweep writes. The pushes have already read the pages that the sweep reads."""
        self.segments.populate(new, write=True)

    def record_sweep(self, new: NewRows, checksums: SweepChecksums) -> None:
        """Record the rows that a sweep has written, and their checksums. May be repeated."""
        self.segments.check(new)
        for slot, row in new.items():
            if not self.segments.mapped:  # else it is the slot's own memory
                self.segments.write(slot, row)
            crc = checksums.get(address(row))
            self.checksums[slot] = row_crc(row, self.codec, self._num_threads) if crc is None else crc


class ShardedDiskRows(ShardedRows):
    """The rows of all parts on disk, by slot: the `DiskRows` of the parts."""

    in_state = False

    def __init__(self, rows: Shards, codec: Codec, plane: ShardedPlane, parts: Sequence[StoredPart]) -> None:
        super().__init__(plane.row_parts(rows, codec), [part.begin for part in parts])
        self._rows, self._plane, self._stored_parts = rows, plane, parts

    def _first(self, name: str, argument: Any) -> str | None:
        """Return the first problem of a part."""
        problems = self._plane.call(name, argument, of=self._rows)
        return next((problem for problem in problems if problem is not None), None)

    def missing(self, slot: int) -> str | None:
        return self._first("missing", slot)

    def start_read(self, place: Place) -> None:
        self._plane.call_later("prefetch", place.slot, of=self._rows)  # `ingest` makes no check beside its sweeps

    def damage(self, place: Place) -> str | None:
        return self._first("damage", Shards([part.place(place, self.codec) for part in self._stored_parts]))

    def load(self, slot: int) -> None:
        self._plane.call("load", slot, of=self._rows)

    def checksums_of(self, slots: Sequence[int]) -> Sequence[bytes]:
        parts = zip(*self._plane.call("checksums_of", [*slots], of=self._rows), strict=True)
        return [b"".join(row_parts) for row_parts in parts] if slots else []

    def forget_checksums(self) -> None:
        self._plane.call_later("forget_checksums", of=self._rows)


class DiskCache(RowCache):
    """Rows on disk. A row that has not changed since the last commit is in the index, with its checksums.

    A push checks such a row, before the round that replaces it. In a forked child rows cannot be read: the parent goes
    on to write them.
    """

    memory: DiskRows | ShardedDiskRows

    def __init__(
        self, memory: DiskRows | ShardedDiskRows, num_clients: int, seed: int, counts: SlotCounts, index: Index
    ) -> None:
        super().__init__(memory, num_clients, seed, counts)
        self.reads_ahead = True
        self._index, self._forks = index, forks[0]
        self._numbers: dict[ClientId, int] = {}  # of the clients in `slots` that the index does not have
        problem = memory.missing(counts.high - 1)
        if problem is not None:
            raise StoreError(f"[store] {problem}")

    def __contains__(self, client_id: ClientId) -> bool:
        if self._forks != forks[0]:
            raise UnavailableError(_FORKED)
        if client_id in self.slots:
            return True
        place = self._index.row(client_id)
        # A rank beyond the table: the row is committed, and its round is not published yet.
        return place is not None and place.rank < self.counts.clients

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""
        if self._forks != forks[0]:
            raise UnavailableError(_FORKED)
        # First: another thread's commit may move clients to the index. A client that was new until then is in both.
        new = {rank: client_id for client_id, rank in self._numbers.copy().items()}
        # Without the rows whose round is not published yet.
        old = {place.rank: client_id for client_id, place in self._index.rows() if place.rank < self.counts.clients}
        return [client_id for _, client_id in sorted((old | new).items())]

    @property
    def slot(self) -> Callable[[ClientId], int | None]:
        """The function that returns the slot of a client's row; None if the client has none."""
        return self._slot

    def _slot(self, client_id: ClientId) -> int | None:
        slot = self.slots.get(client_id)
        if slot is None and (place := self._index.row(client_id)) is not None:
            slot = place.slot
        return slot

    def encoded(self, client_id: ClientId) -> Row | None:
        """Return the client's row, encoded; None if the client has never pushed."""
        if self._forks != forks[0]:
            raise UnavailableError(_FORKED)
        self.fetch(client_id, self._committed_place(client_id, "row"), "row")
        slot = self._slot(client_id)
        if slot is None:
            return None
        self.memory.load(slot)
        row: Row = self.memory.row(slot)
        return row

    def _committed_place(self, client_id: ClientId, op: str) -> Place | None:
        """Return the place of a row that has not changed since the last commit."""
        place = None if client_id in self.slots else self._index.row(client_id)
        problem = None if place is None else self.memory.missing(place.slot)
        if problem is not None:
            raise StoreError(f"[{op}] client {brief(client_id)}'s row: {problem}")
        return place

    def prefetch(self, client_id: ClientId) -> RowRead | None:
        """Start to read a client's row, and return the read; None: there is nothing to read.

        On the host, if the file is mapped, the row is read in parallel with the sweep that copies the vector. Otherwise
        the system is asked to start reading it.
        """
        place, staging = self._committed_place(client_id, "push"), self.memory.staging
        if place is None and staging is None:
            return None
        check = None if place is None else self.memory.start_read(place)

        def finish() -> StagedRow | None:
            if check is None or not check.sound:
                self.fetch(client_id, place)
            if staging is None or (slot := self._slot(client_id)) is None:
                return None
            self.memory.load(slot)
            return staging.start_upload(slot, self.memory.row)

        return RowRead(check, finish)

    def fetch(self, client_id: ClientId, place: Place | None, op: str = "push") -> None:
        """Read a client's row into memory before the round that replaces it, and verify its checksum.

        Raises:
            StoreError: the row does not match its checksum, or cannot be read.
        """
        while place is not None and client_id not in self.slots and (problem := self.memory.damage(place)) is not None:
            before, place = place, self._committed_place(client_id, op)
            if place == before:  # else a commit has moved the row meanwhile
                raise StoreError(f"[{op}] client {brief(client_id)}'s row is damaged: {problem}")

    def changed_places(self, moves: RowMoves | None) -> dict[ClientId, Place]:
        """Return the places that a commit writes to the index; `moves` are those of a round not published yet."""
        slots, numbers = self.slots, self._numbers
        if moves is not None:
            slots, numbers = {**slots, **moves.slots}, {**numbers, **moves.numbers}
        places = zip(slots.items(), self.memory.checksums_of([*slots.values()]), strict=True)
        return {client_id: Place(slot, crc, numbers.get(client_id, -1)) for (client_id, slot), crc in places}

    def publish(self, moves: RowMoves) -> None:
        """Make the changes of a round. May be repeated."""
        super().publish(moves)
        self._numbers.update(moves.numbers)
        if moves.committed:
            self.set_committed(moves.counts)

    def set_committed(self, counts: SlotCounts) -> None:
        """Record that a commit has written all changes; `counts` are those that it has written. May be repeated."""
        self.slots, self._numbers = {}, {}
        self.memory.forget_checksums()
        self.counts = counts._replace(free=(*counts.free, *counts.retired), retired=())  # now no commit refers to these
