"""Cached rows in memory."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from afflux.aggregation.cache.new_rows import NewRows, Row
from afflux.aggregation.cache.rows import RowCache, decoded
from afflux.aggregation.cache.staging import RowStaging
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.arrays.interop import on_host
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId


class MemoryRows(RowCache):
    """Rows in memory, one per client that has pushed: in memory of the device, or in the host's pinned memory."""

    def __init__(
        self,
        size: int,
        num_clients: int,
        codec: Codec = codecs.float32,
        seed: int = 0,
        device: Device = HOST,
        *,
        pinned: bool = False,
    ) -> None:
        """Make an empty cache. `pinned`: rows of a GPU are kept in pinned memory of the host."""
        staging = RowStaging(device, pinned=True) if pinned and isinstance(device, Gpu) else None
        super().__init__(size, num_clients, codec, seed, device, staging)
        self._rows_device = device if staging is None else HOST
        self._sum = device.full(size, 0.0, "float64")
        self.arrays: dict[ClientId, Row] = {}

    def __contains__(self, client_id: ClientId) -> bool:
        return client_id in self.arrays

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""
        return list(self.arrays)

    def values(self) -> Iterable[Row]:
        """Return all rows, encoded, in the order of `client_ids`."""
        return self.arrays.values()

    def _commit_rows(self, rows: NewRows) -> None:
        self.arrays.update(rows)

    def loaded(self, rows: Mapping[ClientId, Row], total: Row) -> "MemoryRows":
        """Return a cache of the same kind, with copies of these rows and their sum.

        Raises:
            AffluxError: a row is damaged.
        """
        pinned = self.staging is not None
        other = MemoryRows(self.size, self.num_clients, self.codec, self.seed, self.device, pinned=pinned)
        self.device.fill(other._sum, total)
        for client_id, row in rows.items():
            copy = other.arrays[client_id] = other._empty()
            self._rows_device.fill(copy, row)
            if self.codec.exact:
                continue
            if not np.isfinite(on_host(decoded(copy, self.size, self.codec, self._rows_device))).all():
                raise AffluxError(
                    f"[load_state_dict] the row of client {brief(client_id)} has values that are not finite"
                )
        return other

    @property
    def _own_sum(self) -> Row:
        return self._sum

    def _encoded(self, client_id: ClientId) -> Row | None:
        return self.arrays.get(client_id)

    def _allocate(
        self, client_ids: Collection[ClientId], accepted: Collection[ClientId], unaliased: Collection[ClientId]
    ) -> tuple[Mapping[ClientId, Row | None], NewRows]:
        old = {client_id: self.arrays.get(client_id) for client_id in client_ids}
        new = NewRows()
        for client_id in accepted:
            row = old[client_id]
            new[client_id] = self._empty() if row is None or client_id in unaliased else row
        new.clients = len(self.arrays) + sum(old[client_id] is None for client_id in new)
        return old, new

    def _empty(self) -> Row:
        """Return memory for one row."""
        empty = self.device.empty if self.staging is None else self.staging.device.pinned
        return empty(self.row_size, self.codec.row_dtype)
