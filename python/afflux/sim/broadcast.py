"""What clients pull at a dispatch: one of the last few models, and with it what their optimizer needs."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.ops.codecs import Codec
from afflux.server.server import Server
from afflux.sim.clients import Trained, as_kind
from afflux.sim.config import SimConfig
from afflux.sim.local import Controls


class Sent(NamedTuple):
    """What one client got."""

    client: int
    model: Pulled
    shift: np.ndarray | None
    """SCAFFOLD's c - c_i (d,), with the c of that version; None for other client optimizers."""
    after: int
    """Arrivals that were handled when that model was the newest."""


class Broadcast:
    """The models that clients may still start from, and SCAFFOLD's control variates where they are asked for."""

    def __init__(self, server: Server, config: SimConfig, num_clients: int, seed: int) -> None:
        """Models are kept for the protocol of rounds only: elsewhere all clients get the newest one."""
        self._server = server
        self._client_lr = config.client_lr
        #: Each with the server's control variate and the arrivals that were handled when it was the newest.
        self.models: deque[tuple[Pulled, np.ndarray | None, int]] = deque(
            maxlen=config.stale_models if config.protocol == "rounds" else 1
        )
        self._controls = None
        if config.client_optimizer == "scaffold":
            self._controls = Controls(server.params.size, num_clients, Codec(config.control_codec), seed)
        self._version = server.version

    @property
    def oldest(self) -> int:
        """Arrivals that were handled when the oldest model was the newest that may still be sent."""
        return self.models[0][2]

    def pull(self, client: int, age: int = 0, arrivals: int = 0) -> Sent:
        """Send the newest model (age 0), the one sent before it (1), ...; at most the oldest that is kept.

        `arrivals` says how many have been handled so far.
        """
        model = self._server.pull()
        if self.models and self.models[-1][0].version == model.version:
            self.models.pop()
        self.models.append((model, None if self._controls is None else self._controls.server, arrivals))
        model, control, after = self.models[-1 - min(age, len(self.models) - 1)]
        if self._controls is None or control is None:
            return Sent(client, model, None, after)
        return Sent(client, model, self._controls.shift(client, control), after)

    def finished(self, sent: Sent, trained: Trained) -> None:
        """Take in a client's new control variate, after its push; the server's moves when the server has stepped."""
        if self._controls is None or sent.shift is None:
            return
        gradient = as_kind(trained.update, "gradient", sent.model.params, self._client_lr, trained.steps)
        self._controls.arrived(sent.client, gradient, sent.shift)
        if self._server.version != self._version:
            self._version = self._server.version
            self._controls.step()

    def arrays(self) -> dict[str, np.ndarray]:
        """The control variates, between two events; `load` reads them. Empty where there are none."""
        if self._controls is None:
            return {}
        sent = [control for _, control, _ in self.models if control is not None]
        return self._controls.arrays() | ({"sent": np.stack(sent)} if sent else {})

    def load(self, models: Sequence[tuple[Pulled, int]], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on with these models, each with the arrivals before it, oldest first, and with such control variates."""
        sent = iter(arrays.get("sent", ()))
        self.models.extend((model, next(sent, None), after) for model, after in models)
        if self._controls is not None:
            self._controls.load(arrays)
