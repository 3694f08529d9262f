"""Per-client rows in memory: each client's last vector, and the float64 sum of all of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.ops import CachedDifference, CachedMean
from afflux.rule import Calibrate, ClientId

Row = npt.NDArray[Any]


class Rows(dict[ClientId, Row]):
    """A round's accepted clients, and their rows after it."""


class MemoryRows:
    """Rows in memory, one per client seen; clients never seen take nothing and count as zeros."""

    def __init__(self, size: int, num_clients: int, dtype: str = "float32") -> None:
        self.num_clients = num_clients
        self.dtype = np.dtype(dtype)
        self._sum = np.zeros(size, np.float64)
        self.arrays: dict[ClientId, Row] = {}

    def __contains__(self, client_id: object) -> bool:
        return client_id in self.arrays

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def sum(self) -> npt.NDArray[np.float64]:
        """The sum of all rows, (d,), read-only; the next step changes it."""
        view = self._sum.view()
        view.flags.writeable = False
        return view

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order in which they came."""
        return list(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes held: a row for each client seen and 8 d for the sum."""
        return self._sum.nbytes + len(self.arrays) * self._sum.size * self.dtype.itemsize

    def values(self) -> Iterable[Row]:
        """All rows, in the order of `client_ids`."""
        return self.arrays.values()

    def row(self, client_id: ClientId) -> Row | None:
        """A copy of the client's row, or None if it was never seen."""
        row = self.arrays.get(client_id)
        return None if row is None else row.copy()

    def stage(
        self, how: Calibrate, client_ids: Sequence[ClientId], accepted: Sequence[bool]
    ) -> tuple[CachedDifference | CachedMean, Rows]:
        """The calibration of a round, and the rows of the accepted clients after it.

        A rejected arrival leaves its client's row as it is; of a client's accepted arrivals the last one stays. Rows
        of new clients are allocated here, so that a lack of memory shows before anything is written. Nothing counts
        until `commit`.
        """
        old = [self.arrays.get(client_id) for client_id in client_ids]
        last = {client_id: i for i, client_id in enumerate(client_ids) if accepted[i]}
        new = Rows()
        for client_id, i in last.items():
            row = old[i]
            new[client_id] = np.empty(self._sum.size, self.dtype) if row is None else row
        replaced = [new[client_id] if last.get(client_id) == i else None for i, client_id in enumerate(client_ids)]
        counted = self.num_clients if how.divide_by == "all" else max(len(self.arrays.keys() | new.keys()), 1)
        stage = CachedDifference if how.direction == "difference" else CachedMean
        return stage(self._sum, counted, old, replaced), new

    def commit(self, rows: Rows) -> None:
        """Makes the staged rows count."""
        self.arrays.update(rows)

    def loaded(self, rows: Mapping[ClientId, Row], total: Row) -> "MemoryRows":
        """The same kind of store with copies of these rows and their sum."""
        other = MemoryRows(self._sum.size, self.num_clients, self.dtype.name)
        other._sum[:] = total
        other.arrays = {client_id: row.copy() for client_id, row in rows.items()}
        return other
