"""The models that clients pull at a dispatch: one of the last few versions, with SCAFFOLD's shift if needed."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.ops.codecs import Codec
from afflux.server.server import Server
from afflux.sim.clients.control_variates import ControlVariates
from afflux.sim.clients.training import TrainingResult
from afflux.sim.workload.config import SimConfig


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
