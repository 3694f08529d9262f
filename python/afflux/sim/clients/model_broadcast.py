"""The models that clients pull at a dispatch: one of the last few versions, with SCAFFOLD's shift if needed.

SCAFFOLD is that of Karimireddy et al., 2020.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from afflux.aggregation.cache.rows import MemoryRows, RowCache, with_rows
from afflux.aggregation.reports import Pulled
from afflux.ops import Combine, Pass, apply, codecs
from afflux.ops.codecs import Codec
from afflux.rules.calibration import CACHED_MEAN
from afflux.server.server import Server
from afflux.sim.clients.training import TrainingResult
from afflux.sim.workload.config import SimConfig


class ControlVariates:
    """SCAFFOLD's control variates (option II): c_i of every client, and c of the server; all start at 0.

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
        self.server = self._zeros
        """c (d,) after the last step. A step makes a new array; arrays that were returned before do not change."""

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


class SentModel(NamedTuple):
    """The model that was sent to one client."""

    client: int
    model: Pulled
    shift: np.ndarray | None
    """SCAFFOLD's c - c_i (d,), with the c of that version; None for other client optimizers."""
    after: int
    """Number of arrivals that the server had handled when that model was the newest."""


class ModelBroadcast:
    """The models that clients may still start from, and SCAFFOLD's control variates if it is the client optimizer."""

    def __init__(self, server: Server, config: SimConfig, num_clients: int, seed: int) -> None:
        """Make an empty broadcast; it holds older models only for the protocol of rounds."""
        self._server = server
        self._client_lr = config.client_lr
        #: Each model with the server's control variate and the number of arrivals when the model was the newest.
        self.models: deque[tuple[Pulled, np.ndarray | None, int]] = deque(
            maxlen=config.stale_models if config.protocol == "rounds" else 1
        )
        self._controls = None
        if config.client_optimizer == "scaffold":
            self._controls = ControlVariates(server.params.size, num_clients, Codec(config.control_codec), seed)
        self._version = server.version

    @property
    def oldest(self) -> int:
        """Number of arrivals that the server had handled when the oldest of the held models was the newest."""
        return self.models[0][2]

    def pull(self, client: int, age: int = 0, arrivals: int = 0) -> SentModel:
        """Send a model to a client.

        Args:
            client: the client.
            age: 0: the newest model, 1: the one sent before it, ...; at most the oldest that is held.
            arrivals: number of arrivals that have been handled so far.

        Returns:
            The model, and SCAFFOLD's shift.
        """
        model = self._server.pull()
        if self.models and self.models[-1][0].version == model.version:
            self.models.pop()
        self.models.append((model, None if self._controls is None else self._controls.server, arrivals))
        model, control, after = self.models[-1 - min(age, len(self.models) - 1)]
        if self._controls is None or control is None:
            return SentModel(client, model, None, after)
        return SentModel(client, model, self._controls.shift(client, control), after)

    def record_result(self, sent: SentModel, trained: TrainingResult) -> None:
        """Update the client's control variate after its push; update the server's if the server has stepped.

        A faulty result changes none.
        """
        if self._controls is None or sent.shift is None or not np.isfinite(trained.update).all():
            return
        gradient = trained.update / np.float32(-self._client_lr * trained.steps)
        self._controls.record_gradient(sent.client, gradient, sent.shift)
        if self._server.version != self._version:
            self._version = self._server.version
            self._controls.step()

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return the control variates, between two events, for `restore`; empty for other client optimizers."""
        if self._controls is None:
            return {}
        sent = [control for _, control, _ in self.models if control is not None]
        return self._controls.state_arrays() | ({"sent": np.stack(sent)} if sent else {})

    def restore(self, models: Sequence[tuple[Pulled, int]], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue with these models, oldest first, each with the arrivals before it, and with `state_arrays`."""
        sent = iter(arrays.get("sent", ()))
        self.models.extend((model, next(sent, None), after) for model, after in models)
        if self._controls is not None:
            self._controls.restore(arrays)
