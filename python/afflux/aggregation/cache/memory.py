"""Cached rows in memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afflux.aggregation.cache.rows import RowCache, RowPlane, decoded
from afflux.aggregation.cache.staging import NewRows, Row, RowStaging
from afflux.aggregation.cache.table import SlotCounts
from afflux.arrays.devices import HOST, Device
from afflux.arrays.gpu import Gpu
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId


class MemoryRows(RowPlane):
    """Rows in memory of the device, or in the host's pinned memory. A round allocates the rows that are new."""

    def __init__(self, size: int, codec: Codec, device: Device = HOST, *, pinned: bool = False) -> None:
        """Make an empty memory. `pinned`: rows of a GPU are kept in pinned memory of the host."""
        staging = RowStaging(device, pinned=True) if pinned and isinstance(device, Gpu) else None
        super().__init__(size, codec, device, staging)
        self.sum = device.full(size, 0.0, "float64")
        self._rows: list[Row] = []  # by slot

    def row(self, slot: int) -> Row:
        """Return the row in a slot, encoded."""
        return self._rows[slot]

    def _empty(self, slot: int) -> Row:
        if slot < len(self._rows):  # it has become free
            return self._rows[slot]
        empty = self.device.empty if self.staging is None else self.staging.device.pinned
        return empty(self.codec.row_size(self.size), self.codec.row_dtype)

    def append(self, values: npt.NDArray[np.generic]) -> None:
        """Add a copy of a row, in the next slot."""
        row = self._empty(len(self._rows))
        (self.device if self.staging is None else HOST).fill(row, values)
        self._rows.append(row)

    def publish(self, new: NewRows) -> None:
        """Make these rows the current ones; the sweep has written the sum in place. May be repeated."""
        for slot, row in sorted(new.items()):
            self._rows[slot : slot + 1] = [row]


def with_rows(cache: RowCache, client_ids: Sequence[ClientId], rows: npt.NDArray[np.generic], total: Row) -> RowCache:
    """Return a cache in memory like `cache`, with copies of these clients' rows, (n, row_size), and their sum.

    Raises:
        AffluxError: a row is damaged.
    """
    old, codec = cache.plane, cache.codec
    plane = MemoryRows(old.size, codec, old.device, pinned=old.staging is not None)
    old.device.fill(plane.sum, total)
    other = RowCache(plane, cache.num_clients, cache.seed, SlotCounts(len(client_ids), len(client_ids)))
    for slot, (client_id, row) in enumerate(zip(client_ids, rows, strict=True)):
        what = f"[load_state_dict] the row of client {brief(client_id)}"
        try:
            sound = codec.exact or np.isfinite(decoded(row, old.size, codec)).all()
        except AffluxError as error:
            raise AffluxError(f"{what} cannot be decoded: {error}") from None
        if not sound:
            raise AffluxError(f"{what} has a non-finite value")
        plane.append(row)
        other.slots[client_id] = slot
    return other
