"""FADAS's running times: three classes of clients, drawn by a Dirichlet law with the parameter gamma (its Table 1)."""

from dataclasses import dataclass

import numpy as np

from afflux.sim.errors import ConfigError
from afflux.sim.workload.delay_laws.law import Delay

CLASSES = ("small", "medium", "large")
MOST_GAMMA = 1e6


def fadas_classes(num_clients: int, rng: np.random.Generator, gamma: float = 1.0) -> np.ndarray:
    """Return the class of each client, 0 small, 1 medium, 2 large: argmax of p ~ Dirichlet(3g, 2g, g)."""
    shares = rng.dirichlet((3 * gamma, 2 * gamma, gamma), size=num_clients)
    return np.asarray(np.argmax(shares, axis=1))


@dataclass(frozen=True)
class FadasDelays:
    """U(1, 2), U(3, 5) or U(low, high) by the client's class, drawn anew at each dispatch; the unit is 10 s."""

    low: float
    """Bounds of the class of large delays: 50 and 80 (large worst-case), or 5 and 8 (mild)."""
    high: float
    gamma: float = 1.0
    """Smaller: more clients of the class large."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        if not 0 <= self.low <= self.high < float("inf"):
            raise ConfigError(f"low and high are {self.low} and {self.high}, must be 0 <= low <= high and finite")
        if not 1 / MOST_GAMMA <= self.gamma <= MOST_GAMMA:
            raise ConfigError(f"gamma is {self.gamma}, must be from {1 / MOST_GAMMA:g} to {MOST_GAMMA:g}")

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw the class of each client."""
        intervals = ((1.0, 2.0), (3.0, 5.0), (self.low, self.high))
        classes = fadas_classes(num_clients, rng, self.gamma)
        return lambda client, times: float(times.uniform(*intervals[classes[client]]))
