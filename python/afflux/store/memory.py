"""Per-client rows in memory: each client's last vector, encoded, and the float64 sum of all of them."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux import codecs, ops
from afflux.codecs import Codec
from afflux.errors import AffluxError
from afflux.ops import CachedDifference, CachedMean, RowFacts
from afflux.rule import Calibrate, ClientId

Row = npt.NDArray[Any]


class Rows(dict[ClientId, Row]):
    """A round's accepted clients, and their rows after it."""


class MemoryRows:
    """Rows in memory, one per client seen; clients never seen take nothing and count as zeros."""

    def __init__(self, size: int, num_clients: int, codec: Codec = codecs.float32, seed: int = 0) -> None:
        self.num_clients = num_clients
        self.codec = codec
        self.seed = seed
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
    def row_size(self) -> int:
        """Elements of an encoded row, of the codec's `row_dtype`."""
        return self.codec.row_bytes(self._sum.size) // np.dtype(self.codec.row_dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held: a row for each client seen and 8 d for the sum."""
        return self._sum.nbytes + len(self.arrays) * self.codec.row_bytes(self._sum.size)

    def values(self) -> Iterable[Row]:
        """All rows, in the order of `client_ids`."""
        return self.arrays.values()

    def row(self, client_id: ClientId) -> Row | None:
        """The client's row decoded, (d,) float32 or float64, or None if it was never seen."""
        row = self.arrays.get(client_id)
        return None if row is None else self._decoded(row)

    def facts(self) -> dict[str, Any]:
        """What the next bits depend on, beside rows and sum."""
        return {"codec": self.codec.name, "seed": self.seed} if self.codec.keyed else {}

    def stage(
        self,
        how: Calibrate,
        client_ids: Sequence[ClientId],
        accepted: Sequence[bool],
        version: int,
        extremes: Sequence[tuple[float, float]] = (),
    ) -> tuple[CachedDifference | CachedMean, Rows]:
        """The calibration of the round that makes `version`, and the rows of the accepted clients after it.

        A rejected arrival leaves its client's row as it is; of a client's accepted arrivals the last one stays. Rows
        of new clients are allocated here, so that a lack of memory shows before anything is written. Nothing counts
        until `commit`. `extremes`, (min, max) of each arrival, are for codecs that are ranged.
        """
        old = [self.arrays.get(client_id) for client_id in client_ids]
        last = {client_id: i for i, client_id in enumerate(client_ids) if accepted[i]}
        new = Rows()
        for client_id, i in last.items():
            row = old[i]
            new[client_id] = self._empty() if row is None else row
        replaced = [new[client_id] if last.get(client_id) == i else None for i, client_id in enumerate(client_ids)]
        counted = self.num_clients if how.divide_by == "all" else max(len(self.arrays.keys() | new.keys()), 1)
        ranges = extremes if self.codec.ranged else [(0.0, 0.0)] * len(client_ids)
        facts = [
            RowFacts(row_key(self.seed, version, client_id), *both)
            for client_id, both in zip(client_ids, ranges, strict=True)
            if self.codec.keyed
        ]
        stage = CachedDifference if how.direction == "difference" else CachedMean
        return stage(self._sum, counted, old, replaced, self.codec, facts, how.quantize_direction), new

    def commit(self, rows: Rows) -> None:
        """Makes the staged rows count."""
        self.arrays.update(rows)

    def loaded(self, rows: Mapping[ClientId, Row], total: Row) -> "MemoryRows":
        """The same kind of store with copies of these rows and their sum.

        Raises:
            AffluxError: a damaged row.
        """
        other = MemoryRows(self._sum.size, self.num_clients, self.codec, self.seed)
        other._sum[:] = total
        for client_id, row in rows.items():
            copy = other.arrays[client_id] = self._empty()
            copy[:] = row
            if not self.codec.exact and not np.isfinite(self._decoded(copy)).all():
                raise AffluxError(f"[load_state_dict] the row of client {client_id!r} has values that are not finite")
        return other

    def _decoded(self, row: Row) -> Row:
        vector = np.empty(self._sum.size, np.float64 if self.codec == codecs.float64 else np.float32)
        ops.decode(row, vector, codec=self.codec)
        return vector

    def _empty(self) -> Row:
        """A row of its own, on a cache line."""
        room = np.empty(self.codec.row_bytes(self._sum.size) + 64, np.uint8)
        start = -room.ctypes.data % 64
        return room[start : start + room.size - 64].view(self.codec.row_dtype)


def row_key(seed: int, version: int, client_id: ClientId) -> int:
    """The 64 bits that key a row's random bits: BLAKE2b of the seed, the version that the row is committed with, and
    the client, as in docs/codecs.md.

    >>> row_key(0, 1, 7) == row_key(0, 1, "7"), row_key(0, 1, 7) == row_key(0, 2, 7)
    (False, False)
    """
    who = (
        client_id.to_bytes(8, "little", signed=True)
        if isinstance(client_id, int)
        else client_id.encode("utf-8", "surrogatepass")
    )
    kind = b"i" if isinstance(client_id, int) else b"s"
    numbers = (seed % 2**64).to_bytes(8, "little") + version.to_bytes(8, "little")
    return int.from_bytes(blake2b(numbers + kind + who, digest_size=8).digest(), "little")
