"""Client-side optimizers: what is added to the stochastic gradient before y <- y - client_lr * gradient.

sgd        weight_decay * y
fedprox    mu * (y - x), x the pulled model: the gradient of mu |y - x|^2 / 2 (Li et al., 2020)
fedasync   the same term, which FedAsync (Xie et al., 2019) calls its proximal rho
scaffold   c - c_i, constant during one local training (Karimireddy et al., 2020; `Controls`)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from afflux.aggregation.cache.memory import MemoryRows
from afflux.ops import Combine, Pass, apply, codecs
from afflux.ops.codecs import Codec
from afflux.rules.calibration import CACHED_MEAN

if TYPE_CHECKING:
    from torch import Tensor

CLIENT_OPTIMIZERS = ("sgd", "fedprox", "fedasync", "scaffold")
PROXIMAL = ("fedprox", "fedasync")

Part: TypeAlias = Callable[["Tensor", "Tensor"], object]
"""Adds to the gradient (d,), its first argument, in place; the second is the local model y (d,)."""


def decay(weight: float) -> Part:
    """Weight decay: gradient += weight * y."""
    return lambda gradient, local: gradient.add_(local, alpha=weight)


def proximal(mu: float, pulled: "Tensor") -> Part:
    """FedProx's mu and FedAsync's rho: gradient += mu * (y - pulled)."""
    return lambda gradient, local: gradient.add_(local - pulled, alpha=mu)


def shifted(shift: "Tensor") -> Part:
    """SCAFFOLD: gradient += shift, which is c - c_i."""
    return lambda gradient, local: gradient.add_(shift)


class Controls:
    """SCAFFOLD's control variates (option II): c_i of every client, and c of the server; all start at 0.

        client     y <- y - client_lr * (g - c_i + c), with the c that it pulled with the model x
                   c_i+ = c_i - c + (x - y) / (K * client_lr) = gradient - (c - c_i), `gradient` the kind of that name
        server     at its step: c <- c + 1/N sum_i (c_i+ - c_i), in the order of client ids

    The server's c_i are rows of a cache and c is their mean, kept by the engine's float64 sum. A client that comes
    twice between two steps moves its own c_i twice, and c by the whole way: the terms telescope.

    With a codec that rounds, the server's step makes c_i = Q(c_i+), and that is what the client gets from then on: the
    server sends c_i along with c, and the mean of all shifts c - c_i stays 0.
    """

    def __init__(self, size: int, num_clients: int, codec: Codec = codecs.float32, seed: int = 0) -> None:
        """Zeros for N = `num_clients` clients and models of `size` elements; `seed` of the codec's random bits."""
        # The complement, as a rule's own rows have keys of this seed, too.
        self._rows = MemoryRows(size, num_clients, codec, ~seed)
        self._zeros = np.zeros(size, np.float32)
        self._steps = 0
        self._waiting: dict[int, np.ndarray] = {}
        self.server = self._zeros
        """c (d,) as of the last step; a step makes a new array, so that who pulled this one keeps it."""

    def client(self, client: int) -> np.ndarray:
        """c_i (d,), the client's own: also what has not entered c yet."""
        if client in self._waiting:
            return self._waiting[client]
        row = self._rows.row(client)
        return self._zeros if row is None else row

    def shift(self, client: int, pulled: np.ndarray) -> np.ndarray:
        """Return c - c_i (d,), for `pulled` the c of the client's dispatch."""
        return np.asarray(pulled - self.client(client))

    def arrived(self, client: int, gradient: np.ndarray, shift: np.ndarray) -> None:
        """The client finished with `gradient` (d,), -update / (K client_lr), having trained with `shift`."""
        self._waiting[client] = gradient - shift

    def step(self) -> None:
        """Moves c by all who have arrived since the last step."""
        clients = sorted(self._waiting)
        moved: Sequence[np.ndarray] = [self._waiting[client] for client in clients]
        self._steps += 1
        extremes = [(float(row.min()), float(row.max())) for row in moved] if self._rows.codec.ranged else []
        calibrate, rows = self._rows.prepare_rows(CACHED_MEAN, clients, [True] * len(clients), self._steps, extremes)
        server = np.empty_like(self._zeros)
        weights = np.ones(len(clients))  # not read by a cached mean, but 0 would mean rejected
        apply(Pass(self._zeros, server, Combine(moved, weights), calibrate), num_threads=1)
        self._rows.commit(rows)
        self.server = server
        self._waiting = {}

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it; `load` reads them. A row for each client that has finished once, 4 d bytes if nothing rounds."""
        rows, waiting, size = self._rows, self._waiting, self._zeros.size
        return {
            "server": self.server,
            "sum": np.array(rows.sum),
            "clients": np.array(rows.client_ids, np.int64),
            "controls": np.array([*rows.values()], rows.codec.row_dtype).reshape(-1, rows.row_size),
            "steps": np.array(self._steps),
            "waiting_clients": np.array([*waiting], np.int64),
            "waiting": np.array([*waiting.values()], np.float32).reshape(-1, size),
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from there."""
        rows = dict(zip(arrays["clients"].tolist(), arrays["controls"], strict=True))
        self._rows = self._rows.loaded(rows, arrays["sum"])
        self._steps = int(arrays["steps"])
        self._waiting = dict(zip(arrays["waiting_clients"].tolist(), arrays["waiting"], strict=True))
        self.server = arrays["server"]
