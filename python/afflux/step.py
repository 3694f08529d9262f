"""The parts that step: server optimizers and the laws of their learning rate."""

from dataclasses import dataclass
from math import inf

from afflux.errors import AffluxError
from afflux.ops import Sgd
from afflux.rule import Arrivals


@dataclass(frozen=True, slots=True)
class ConstantSgd:
    """params += server_lr * v."""

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        if not -inf < self.server_lr < inf:
            raise AffluxError(f"[ConstantSgd] server_lr is {self.server_lr}, must be finite")

    def __call__(self, arrivals: Arrivals, /) -> Sgd:
        """The same step every round."""
        return Sgd(self.server_lr)
