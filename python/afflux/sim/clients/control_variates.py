"""SCAFFOLD's control variates (Karimireddy et al., 2020)."""

from collections.abc import Mapping, Sequence

import numpy as np

from afflux.aggregation.cache.rows import MemoryRows, RowCache, with_rows
from afflux.ops import Combine, Pass, apply, codecs
from afflux.ops.codecs import Codec
from afflux.rules.calibration import CACHED_MEAN


class ControlVariates:
    """The control variates (option II): c_i of every client, and c of the server; all start at 0.

        client     y <- y - client_lr * (g - c_i + c), with the c that it pulled with the model x
                   c_i+ = c_i - c + (x - y) / (K * client_lr) = gradient - (c - c_i), `gradient` as pushed to such rules
        server     at its step: c <- c + 1/N sum_i (c_i+ - c_i), in the order of client ids

    The c_i are rows of a cache, and c is their mean, from the engine's float64 sum. A client that finishes twice
    between two steps updates its own c_i twice, and c by the sum of both differences.

    With a codec that rounds, the server's step makes c_i = Q(c_i+). The client uses this rounded c_i from then on: the
    server sends c_i along with c, and the mean of all shifts c - c_i stays 0.
    """

    def __init__(self, size: int, num_clients: int, codec: Codec = codecs.float32, seed: int = 0) -> None:
        """Start at zero.

        Args:
            size: elements of the model, d.
            num_clients: all clients, N.
            codec: how the c_i are stored.
            seed: of the codec's random bits.
        """
        # The complement of the seed: the rows of a rule's own cache have keys of the seed itself.
        self._rows = RowCache(MemoryRows(size, codec), num_clients, ~seed)
        self._zeros = np.zeros(size, np.float32)
        self._steps = 0
        self._waiting: dict[int, np.ndarray] = {}
        #: c (d,) after the last step. A step makes a new array; arrays that were returned before do not change.
        self.server = self._zeros

    def client(self, client: int) -> np.ndarray:
        """Return c_i (d,), with the updates that are not yet part of c."""
        if client in self._waiting:
            return self._waiting[client]
        row = self._rows.row(client)
        return self._zeros if row is None else row

    def shift(self, client: int, pulled: np.ndarray) -> np.ndarray:
        """Return c - c_i (d,), for `pulled` the c of the client's dispatch."""
        return np.asarray(pulled - self.client(client))

    def record_gradient(self, client: int, gradient: np.ndarray, shift: np.ndarray) -> None:
        """Update c_i from `gradient` (d,), -update / (K client_lr), of a client that trained with `shift`."""
        self._waiting[client] = gradient - shift

    def step(self) -> None:
        """Update c with all gradients since the last step."""
        clients = sorted(self._waiting)
        moved: Sequence[np.ndarray] = [self._waiting[client] for client in clients]
        self._steps += 1
        extremes = [(float(row.min()), float(row.max())) for row in moved] if self._rows.codec.ranged else []
        plan, moves = self._rows.plan(CACHED_MEAN, clients, [True] * len(clients), self._steps, extremes)
        calibrate, rows = self._rows.memory.prepare(plan)
        server = np.empty_like(self._zeros)
        weights = np.ones(len(clients))  # not read by a cached mean, but 0 would mean rejected
        apply(Pass(self._zeros, server, Combine(moved, weights), calibrate), num_threads=1)
        self._rows.commit(rows, moves)
        self.server = server
        self._waiting = {}

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return the state for `restore`: a row for each client that has finished once, 4 d bytes without rounding."""
        rows, waiting, size = self._rows, self._waiting, self._zeros.size
        return {
            "server": self.server,
            "sum": np.array(rows.sum),
            "clients": np.array(rows.client_ids, np.int64),
            "controls": np.array([*rows.values()], rows.codec.row_dtype).reshape(-1, rows.codec.row_size(size)),
            "steps": np.array(self._steps),
            "waiting_clients": np.array([*waiting], np.int64),
            "waiting": np.array([*waiting.values()], np.float32).reshape(-1, size),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_arrays`."""
        self._rows = with_rows(self._rows, arrays["clients"].tolist(), arrays["controls"], arrays["sum"])
        self._steps = int(arrays["steps"])
        self._waiting = dict(zip(arrays["waiting_clients"].tolist(), arrays["waiting"], strict=True))
        self.server = arrays["server"]
