"""The server's own validation gradient, for rules that score updates by it (Zeno++)."""

import numpy as np

from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim.clients import Trainer

MEMORY = "validation"


def wants(rule: Rule) -> bool:
    """Whether the rule's weigh part asks for a validation gradient to be handed in."""
    return MEMORY in rule.needs.handed_in


class Validation:
    """Hands the mean gradient over a few examples to the server, at the start and every so many versions.

    The examples are drawn without replacement from the whole training part, by a stream of their own: clients may hold
    them too, and no shard depends on how many there are.
    """

    def __init__(
        self, server: Server, trainer: Trainer, num_train: int, count: int, every: int, rng: np.random.Generator
    ) -> None:
        """Draw `count` of `num_train` examples and hand in the first gradient."""
        self._server = server
        self._trainer = trainer
        self._examples = np.sort(rng.choice(num_train, min(count, num_train), replace=False))
        self._every = every
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Hand in the gradient at the current params if their version is a new one, and a multiple of `every`."""
        version = self._server.version
        if version != self._version and version % self._every == 0:
            gradient = self._trainer.gradient(self._server.params, self._examples)
            self._server.set_memory(MEMORY, gradient)
        self._version = version
