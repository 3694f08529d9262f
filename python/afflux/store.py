"""Per-client rows: each client's last vector, and the float64 sum of all of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afflux.ops import CachedDifference
from afflux.rule import ClientId

Float32 = npt.NDArray[np.float32]


class MemoryRows:
    """Float32 rows in memory, one per client seen; clients never seen take nothing and count as zeros."""

    def __init__(self, size: int, num_clients: int) -> None:
        self.num_clients = num_clients
        self.sum = np.zeros(size, np.float64)
        self._rows: dict[ClientId, Float32] = {}

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes held: 4 d per client seen and 8 d for the sum."""
        return self.sum.nbytes + sum(row.nbytes for row in self._rows.values())

    def row(self, client_id: ClientId) -> Float32 | None:
        """A copy of the client's row, or None if it was never seen."""
        row = self._rows.get(client_id)
        return None if row is None else row.copy()

    def stage(
        self, client_ids: Sequence[ClientId], accepted: Sequence[bool]
    ) -> tuple[CachedDifference, dict[ClientId, Float32]]:
        """The calibration of a round of these distinct clients, and the rows of the accepted ones after it.

        A rejected client's row stays as it is. Rows of new clients are allocated here, so that a lack of memory shows
        before anything is written. Nothing counts until `commit`.
        """
        old = [self._rows.get(client_id) for client_id in client_ids]
        new: dict[ClientId, Float32] = {}
        for client_id, row, accept in zip(client_ids, old, accepted, strict=True):
            if accept:
                new[client_id] = np.empty(self.sum.size, np.float32) if row is None else row
        replaced = [new.get(client_id) for client_id in client_ids]
        return CachedDifference(self.sum, self.num_clients, old, replaced), new

    def commit(self, rows: dict[ClientId, Float32]) -> None:
        """Makes the staged rows count."""
        self._rows.update(rows)
