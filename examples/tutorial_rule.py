"""A rule of your own in a file of its own: fresh updates count more. docs/start/tutorial.md uses it."""

from dataclasses import dataclass

import numpy as np

from afflux import Arrivals, Rule, rules
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd


@rules.register("fresh_first", "weigh")
@dataclass(frozen=True)
class FreshFirst:
    """Weights exp(-rate * staleness), divided by their sum."""

    rate: float = 0.3

    def __call__(self, arrivals: Arrivals, /) -> np.ndarray:
        """The weights, in the order of the arrivals."""
        weights = np.exp(-self.rate * arrivals.staleness)
        return weights / weights.sum()


def fresh_first(rate: float = 0.3, buffer_size: int = 10, server_lr: float = 1.0) -> Rule:
    """x += server_lr * sum_i w_i u_i."""
    return Rule("fresh_first", "update", buffer_size, FreshFirst(rate), NONE, Sgd(server_lr))
