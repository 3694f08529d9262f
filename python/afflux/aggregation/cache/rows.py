"""Cached rows of clients, and their memory: rows in numbered slots, and the float64 sum of all rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from afflux import ops
from afflux._engine import RowCheck
from afflux.aggregation.cache.staging import EncodedRow, NewRows, RowStaging, StagedRow
from afflux.aggregation.cache.table import NO_SLOTS, RowMoves, RowPlan, RowTable, SlotCounts
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.ops import CachedDifference, CachedMean, codecs
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId


class RowRead(Struct, frozen=True, eq=False):
    """A row that is being read for a push."""

    check: RowCheck | None  #: a check that `ingest` makes in parallel; None: none
    finish: Callable[[], StagedRow | None]  #: waits for the row, and checks it


class RowMemory(ABC):
    """The memory of rows: encoded rows in numbered slots, and their sum. It knows no clients."""

    sum: EncodedRow  #: the sum of all rows, (d,), that the next round updates
    row: Callable[[int], EncodedRow]  #: returns the row in a slot, encoded
    in_state: bool = True  #: whether the state of a server contains the rows

    def __init__(self, size: int, codec: Codec, device: Device = HOST, staging: RowStaging | None = None) -> None:
        self.size = size  #: d
        self.codec = codec
        self.device = device  #: the device of the sum, and of the rounds
        self.staging = staging  #: for rows that are kept on the host, if the device is a GPU

    @abstractmethod
    def publish(self, new: Any) -> None:
        """Make these rows, and the sum that the sweep has written, the current ones. May be repeated."""

    def loaded(self, rows: Iterable[EncodedRow], total: EncodedRow) -> "RowMemory":
        """Return other memory, with copies of these rows, in the first slots, and of their sum."""
        raise NotImplementedError


class LocalRows(RowMemory):
    """The memory of rows in this process: a round reads and writes it."""

    @abstractmethod
    def _empty(self, slot: int) -> EncodedRow:
        """Return memory for a new row of a slot."""

    def _spare_sum(self) -> EncodedRow | None:
        """Return the memory to which a sweep writes the sum; None: the sweep updates it in place."""
        return None

    def prepare(self, plan: RowPlan) -> tuple[CachedDifference | CachedMean, NewRows]:
        """Return the calibration stage of a round, and its new rows.

        Memory, or space on the disk, for new rows is allocated here: if it runs out, the error comes before anything
        is written. `publish` makes the rows effective.

        Raises:
            StoreError: the disk is full.
        """
        how, reads, writes = plan.how, plan.reads, plan.writes
        row = self.row
        old: dict[Any, EncodedRow] = {slot: row(slot) for slot in reads if slot is not None}
        new = NewRows({slot: old[slot] if slot in old else self._empty(slot) for slot in writes if slot is not None})
        new.sum_out = self._spare_sum() if new else None
        if self.staging is not None:
            old = self.staging.uploaded_rows(reads, writes, old, new)
        written: dict[Any, EncodedRow] = new.staged or new
        rows, replaced = [*map(old.get, reads)], [*map(written.get, writes)]  # None for None
        stage = CachedDifference if how.direction == "difference" else CachedMean
        how_rows = self.codec, plan.facts, how.quantize_direction
        return stage(self.sum, plan.divisor, rows, replaced, *how_rows, new.sum_out, how.factor), new


class MemoryRows(LocalRows):
    """Rows in memory of the device, or in the host's pinned memory. A round allocates the rows that are new."""

    def __init__(self, size: int, codec: Codec, device: Device = HOST, *, pinned: bool = False) -> None:
        """Make an empty memory. `pinned`: rows of a GPU are kept in pinned memory of the host."""
        staging = RowStaging(device, pinned=True) if pinned and isinstance(device, Gpu) else None
        super().__init__(size, codec, device, staging)
        self.sum = device.full(size, 0.0, "float64")
        self._rows: list[EncodedRow] = []  # by slot
        self.row = self._rows.__getitem__

    def _empty(self, slot: int) -> EncodedRow:
        if slot < len(self._rows):  # it has become free
            return self._rows[slot]
        empty = self.device.empty if self.staging is None else self.staging.device.pinned
        return empty(self.codec.row_size(self.size), self.codec.row_dtype)

    def loaded(self, rows: Iterable[EncodedRow], total: EncodedRow) -> "MemoryRows":
        """Return other memory, with copies of these rows, in the first slots, and of their sum."""
        other = MemoryRows(self.size, self.codec, self.device, pinned=self.staging is not None)
        self.device.fill(other.sum, total)
        for values in rows:
            row = other._empty(len(other._rows))
            (self.device if self.staging is None else HOST).fill(row, values)
            other._rows.append(row)
        return other

    def publish(self, new: NewRows) -> None:
        """Make these rows the current ones; the sweep has written the sum in place. May be repeated."""
        for slot, row in sorted(new.items()):
            self._rows[slot : slot + 1] = [row]


class RowCache(RowTable):
    """Each client's last vector, encoded, and the float64 sum of all rows.

    A client that has never pushed has no row. A missing row counts as zeros.
    """

    def __init__(self, memory: RowMemory, num_clients: int, seed: int, counts: SlotCounts = NO_SLOTS) -> None:
        super().__init__(memory.codec, num_clients, seed, counts)
        self.memory = memory
        self.reads_ahead = memory.staging is not None  #: whether `prefetch` may read a row

    def values(self) -> Iterable[EncodedRow]:
        """Yield all rows, encoded, in the order of `client_ids`."""
        return (row for client_id in self.client_ids if (row := self.encoded(client_id)) is not None)

    def encoded(self, client_id: ClientId) -> EncodedRow | None:
        """Return the client's row, encoded; None if the client has never pushed."""
        slot = self.slot(client_id)
        return None if slot is None else self.memory.row(slot)

    @property
    def sum(self) -> EncodedRow:
        """The sum of all rows, (d,) float64, read-only; the next step changes it. On a GPU a copy."""
        return self.memory.device.read_only(self.memory.sum)

    @property
    def nbytes(self) -> int:
        """Bytes in use: a row for each client that has pushed, and 8 d for the sum."""
        size: int = self.memory.size
        return 8 * size + len(self) * self.codec.row_bytes(size)

    def row(self, client_id: ClientId) -> EncodedRow | None:
        """Return the client's row decoded, (d,) float32 or float64; None if the client has never pushed.

        Raises:
            StoreError: the row is on disk, and does not match its checksum.
        """
        row, device = self.encoded(client_id), self.memory.device
        if row is None:
            return None
        return decoded(row if self.memory.staging is None else device.moved(row), self.memory.size, self.codec, device)

    def prefetch(self, client_id: ClientId) -> RowRead | None:
        """Start to read the row that the round of this client's push needs. Return None if there is nothing to read."""
        if (staging := self.memory.staging) is None or (slot := self.slot(client_id)) is None:
            return None
        staged = staging.start_upload(slot, self.memory.row)
        return RowRead(None, lambda: staged)

    def facts(self) -> dict[str, Any]:
        """Return the facts, in addition to rows and sum, on which the bits of later results depend."""
        return {"codec": self.codec.name, "seed": self.seed} if self.codec.keyed else {}

    def commit(self, new: NewRows, moves: RowMoves) -> None:
        """Make the new rows of a round the clients' rows. May be repeated."""
        self.memory.publish(new)
        self.publish(moves)
        if self.memory.staging is not None:
            self.memory.staging.end_round(new)  # last: after this pushes read the rows on the host again


def with_rows(
    cache: RowCache, client_ids: Sequence[ClientId], rows: npt.NDArray[np.generic], total: EncodedRow
) -> RowCache:
    """Return a cache in memory like `cache`, with copies of these clients' rows, (n, row_size), and their sum.

    Raises:
        AffluxError: a row is damaged.
    """
    old, codec = cache.memory, cache.codec
    for client_id, row in zip(client_ids, rows, strict=True):
        subject = f"[load_state_dict] the row of client {brief(client_id)}"
        try:
            sound = codec.exact or np.isfinite(decoded(row, old.size, codec)).all()
        except AffluxError as error:
            raise AffluxError(f"{subject} cannot be decoded: {error}") from None
        if not sound:
            raise AffluxError(f"{subject} has a non-finite value")
    counts = SlotCounts(len(client_ids), len(client_ids))
    other = RowCache(old.loaded(rows, total), cache.num_clients, cache.seed, counts)
    other.slots.update(zip(client_ids, range(len(client_ids)), strict=True))
    return other


def decoded(row: EncodedRow, size: int, codec: Codec, device: Device = HOST) -> EncodedRow:
    """Return a decoded row, (d,) float64 if that is the codec, else float32; on `device`, the row's device."""
    vector = device.empty(size, decoded_dtype(codec))
    ops.decode(row, vector, codec=codec)
    device.wait()  # the next step may write the row
    return vector


def decoded_dtype(codec: Codec) -> str:
    """Return the dtype of decoded rows."""
    return "float64" if codec == codecs.float64 else "float32"
