"""The parts that step: server optimizers and the laws of their learning rate."""

from dataclasses import dataclass

from afflux.ops import Sgd
from afflux.rule import Arrivals


@dataclass(frozen=True, slots=True)
class ConstantSgd:
    """params += server_lr * v."""

    server_lr: float = 1.0

    def __call__(self, arrivals: Arrivals, /) -> Sgd:
        """The same step every round."""
        return Sgd(self.server_lr)
