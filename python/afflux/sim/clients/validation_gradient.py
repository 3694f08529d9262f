"""The server's own validation gradient, for rules that score updates by it (Zeno++)."""

import numpy as np

from afflux.server.server import Server
from afflux.sim.clients.training import Trainer
from afflux.sim.workload.rule_specs import VALIDATION_VECTOR


class ValidationGradient:
    """The server's validation vector: the mean gradient over a few examples, which is refreshed during the run.

    The examples are drawn without replacement from the validation data; for images, from the whole training part.
    Clients may hold these examples, too; the shards of the clients do not depend on them.
    """

    def __init__(
        self, server: Server, trainer: Trainer, available: int, count: int, every: int, rng: np.random.Generator
    ) -> None:
        """Draw the examples and set the first gradient.

        Args:
            server: of a rule that needs the gradient.
            trainer: computes it.
            available: examples of the validation data.
            count: examples to draw.
            every: versions of params between two gradients.
            rng: stream for the draw.
        """
        self._server = server
        self._trainer = trainer
        self._examples = np.sort(rng.choice(available, min(count, available), replace=False))
        self._every = every
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Set the gradient at the current params if their version is new and a multiple of `every`."""
        version = self._server.version
        if version != self._version and version % self._every == 0:
            buffers = None if self._server.layout is None else self._server.pull().buffers
            gradient = self._trainer.gradient(self._server.params, self._examples, buffers)
            self._server.set_rule_vector(VALIDATION_VECTOR, gradient)
        self._version = version
