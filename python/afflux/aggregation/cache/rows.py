"""Cached rows of clients and their sum: the common part of rows in memory and rows on disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from afflux import ops
from afflux._engine import SUPERBLOCK, RowCheck
from afflux.aggregation.cache.new_rows import NewRows, Row
from afflux.aggregation.cache.staging import RowStaging, StagedRow
from afflux.arrays.devices import HOST, Device
from afflux.arrays.interop import on_host
from afflux.ops import CachedDifference, CachedMean, RowFacts, codecs
from afflux.ops.codecs import Codec
from afflux.rules.rule import Calibrate, ClientId


class RowRead(Struct, frozen=True, eq=False):
    """A client's row that is being read for a push."""

    check: RowCheck | None  #: a check that `ingest` makes in parallel; None: none
    finish: Callable[[], StagedRow | None]  #: waits for the row, and checks it


class RowCache(ABC):
    """Each client's last vector, encoded, and the float64 sum of all rows.

    A client that has never pushed has no row. A missing row counts as zeros.
    """

    def __init__(
        self,
        size: int,
        num_clients: int,
        codec: Codec,
        seed: int,
        device: Device = HOST,
        staging: RowStaging | None = None,
    ) -> None:
        self.size = size  #: d
        self.device = device  #: the device of the sum, and of the rounds
        self.staging = staging  #: for rows that are kept on the host, if the device is a GPU
        self.reads_ahead = staging is not None  #: whether `prefetch` may read a row
        self.num_clients = num_clients
        self.codec = codec
        self.seed = seed

    @abstractmethod
    def __contains__(self, client_id: ClientId) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""

    @abstractmethod
    def values(self) -> Iterable[Row]:
        """Return all rows, encoded, in the order of `client_ids`."""

    @abstractmethod
    def _commit_rows(self, rows: NewRows) -> None:
        """Make these rows the clients' rows. May be repeated."""

    @property
    @abstractmethod
    def _own_sum(self) -> Row:
        """The sum of all rows, (d,), that the next round updates."""

    @abstractmethod
    def _encoded(self, client_id: ClientId) -> Row | None: ...

    @abstractmethod
    def _allocate(
        self, client_ids: Collection[ClientId], accepted: Collection[ClientId], unaliased: Collection[ClientId]
    ) -> tuple[Mapping[ClientId, Row | None], NewRows]:
        """Return the rows of these clients, and memory for the new rows of the accepted clients.

        The old row of a client in `unaliased` is read after the new row is written. For such a client the memory is
        separate from the old row.
        """

    @property
    def sum(self) -> Row:
        """The sum of all rows, (d,) float64, read-only; the next step changes it. On a GPU a copy."""
        return self.device.read_only(self._own_sum)

    def saved_sum(self) -> npt.NDArray[np.float64]:
        """Return a copy of the sum on the host."""
        return on_host(self._own_sum, copy=True)

    @property
    def row_size(self) -> int:
        """Elements of an encoded row, of the codec's `row_dtype`."""
        return self.codec.row_size(self.size)

    @property
    def nbytes(self) -> int:
        """Bytes in use: a row for each client that has pushed, and 8 d for the sum."""
        return 8 * self.size + len(self) * self.codec.row_bytes(self.size)

    def row(self, client_id: ClientId) -> Row | None:
        """Return the client's row decoded, (d,) float32 or float64; None if the client has never pushed.

        Raises:
            StoreError: the row is on disk, and does not match its checksum.
        """
        row = self._encoded(client_id)
        if row is None:
            return None
        return decoded(row if self.staging is None else self.device.moved(row), self.size, self.codec, self.device)

    def prefetch(self, client_id: ClientId) -> RowRead | None:
        """Start to read the row that the round of this client's push needs. Return None if there is nothing to read."""
        if self.staging is None:
            return None
        staged = self.staging.start_upload(client_id, self._encoded)
        return RowRead(None, lambda: staged)

    def facts(self) -> dict[str, Any]:
        """Return the facts, in addition to rows and sum, on which the bits of later results depend."""
        return {"codec": self.codec.name, "seed": self.seed} if self.codec.keyed else {}

    def prepare_rows(
        self,
        how: Calibrate,
        client_ids: Sequence[ClientId],
        accepted: Sequence[bool],
        version: int,
        extremes: Sequence[tuple[float, float]] = (),
    ) -> tuple[CachedDifference | CachedMean, NewRows]:
        """Return the calibration stage of the round that makes `version`, and the new rows of the accepted clients.

        A rejected arrival does not change its client's row. Of a client's accepted arrivals the last one becomes the
        row. Memory, or space on the disk, for new rows is allocated here: if it runs out, the error comes before
        anything is written. `commit` makes the rows effective. `extremes`, (min, max) of each arrival, are for ranged
        codecs.

        Raises:
            StoreError: the disk is full.
        """
        last = {client_id: i for i, client_id in enumerate(client_ids) if accepted[i]}
        read = {client_id: i for i, client_id in enumerate(client_ids)}  # the last arrival that reads the row
        unaliased = {client_id for client_id, i in last.items() if read[client_id] > i}
        old, new = self._allocate(client_ids, last, unaliased)
        inputs: Mapping[ClientId, Row | None] = old
        outputs: Mapping[ClientId, Row] = new
        if self.staging is not None:
            inputs, outputs = self.staging.uploaded_rows(old, new, unaliased), new.staged
        rows = [inputs[client_id] for client_id in client_ids]
        replaced = [outputs[client_id] if last.get(client_id) == i else None for i, client_id in enumerate(client_ids)]
        counted = self.num_clients if how.divide_by == "all" else max(new.clients, 1)
        ranges = extremes if self.codec.ranged else [(0.0, 0.0)] * len(client_ids)
        facts = [
            RowFacts(row_key(self.seed, version, client_id), *both)
            for client_id, both in zip(client_ids, ranges, strict=True)
            if self.codec.keyed
        ]
        stage = CachedDifference if how.direction == "difference" else CachedMean
        how_rows = self.codec, facts, how.quantize_direction
        return stage(self._own_sum, counted, rows, replaced, *how_rows, new.sum_out), new

    def begin_sweep(self, rows: NewRows) -> None:
        """Prepare for the sweep that writes these rows. Must be called before that sweep. May be repeated."""
        if self.staging is not None:
            self.staging.begin_sweep(rows)

    def end_sweep(self, rows: NewRows) -> None:
        """Copy the rows that the sweep has written to the memory that keeps rows. May be repeated."""
        if self.staging is not None:
            self.staging.copy_back(rows)

    def commit(self, rows: NewRows) -> None:
        """Make these rows the clients' rows. May be repeated."""
        self._commit_rows(rows)
        if self.staging is not None:  # last: after this pushes read the rows on the host again
            self.staging.end_round(rows)


def decoded(row: Row, size: int, codec: Codec, device: Device = HOST) -> Row:
    """Return a decoded row, (d,) float64 if that is the codec, else float32; on `device`, the row's device."""
    vector = device.empty(size, decoded_dtype(codec))
    ops.decode(row, vector, codec=codec)
    device.wait()  # the next step may write the row
    return vector


def decoded_dtype(codec: Codec) -> str:
    """Return the dtype of decoded rows."""
    return "float64" if codec == codecs.float64 else "float32"


def row_crc(row: Row, codec: Codec, num_threads: int = 1) -> bytes:
    """Return the checksums of the head, if there is one, and of the code of each superblock."""
    block, head = row_blocks(codec)
    return ops.crc32c(row, block, head=head, num_threads=num_threads)


def row_blocks(codec: Codec) -> tuple[int, int]:
    """Return the bytes of a block of an encoded row, and of its head. Each block and the head have a checksum."""
    head = codec.row_bytes(0)
    return codec.row_bytes(SUPERBLOCK) - head, head


def row_key(seed: int, version: int, client_id: ClientId) -> int:
    """Return the 64-bit key of a row's random bits.

    The key is BLAKE2b of the seed, the version with which the row is committed, and the client, as in docs/codecs.md.

    >>> row_key(0, 1, 7) == row_key(0, 1, "7"), row_key(0, 1, 7) == row_key(0, 2, 7)
    (False, False)
    """
    if isinstance(client_id, str):
        kind, client = b"s", client_id.encode()
    elif client_id < 2**63:
        kind, client = b"i", client_id.to_bytes(8, "little", signed=True)
    else:  # with a prefix of their own: -1 and 2**64 - 1 have the same bytes
        kind, client = b"u", client_id.to_bytes(8, "little")
    numbers = (seed % 2**64).to_bytes(8, "little") + version.to_bytes(8, "little")
    return int.from_bytes(blake2b(numbers + kind + client, digest_size=8).digest(), "little")
