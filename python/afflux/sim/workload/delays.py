"""Laws of the clients' running times, as the papers state them; the unit is the law's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from afflux.sim.errors import ConfigError

Delay: TypeAlias = Callable[[int, np.random.Generator], float]
"""(client, stream) -> running time of one dispatch of the client, drawn from the stream."""
DelayLaw: TypeAlias = Callable[[int, np.random.Generator], Delay]
"""(number of clients, random stream for values that are fixed per client) -> Delay."""

MOST_GAMMA = 1e6


@dataclass(frozen=True)
class ConstantDelays:
    """Every dispatch takes 1: the staleness depends only on the concurrency."""

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw nothing."""
        return lambda client, times: 1.0


@dataclass(frozen=True)
class ExponentialDelays:
    """Exponential(1) at each dispatch (Anarchic FL's wall-clock)."""

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw nothing for the clients."""
        return lambda client, times: float(times.exponential())


def fadas_classes(num_clients: int, rng: np.random.Generator, gamma: float = 1.0) -> np.ndarray:
    """Return the class of each client, 0 small, 1 medium, 2 large: argmax of p ~ Dirichlet(3g, 2g, g)."""
    shares = rng.dirichlet((3 * gamma, 2 * gamma, gamma), size=num_clients)
    return np.asarray(np.argmax(shares, axis=1))


@dataclass(frozen=True)
class FadasDelays:
    """FADAS's running times (its Table 1): three classes of clients, drawn by a Dirichlet law.

    U(1, 2), U(3, 5) or U(low, high) by the client's class, drawn anew at each dispatch; the unit is 10 s.
    """

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


@dataclass(frozen=True)
class HalfNormalDelays:
    """CA2FL's running times (its appendix D): half-normal laws, one for each client.

    halfnorm(s): s + |N(0, 1)| if s is the location, s |N(0, 1)| if s is the scale; drawn anew at each dispatch. The
    paper writes halfnorm(s) without naming the parameter. The location is right: docs/data.md has the numbers.
    """

    upper: float = 5.0
    """s ~ U(0, upper), drawn for each client at the start: 5, 1 or 0.5 in the paper."""
    s: float | None = None
    """The same s for all clients: 5 in the paper's fixed law."""
    reading: Literal["location", "scale"] = "location"

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        if not 0 < self.upper < float("inf"):
            raise ConfigError(f"upper is {self.upper}, must be positive and finite")
        if self.s is not None and not 0 <= self.s < float("inf"):
            raise ConfigError(f"s is {self.s}, must be 0 or more and finite")
        if self.reading not in ("location", "scale"):
            raise ConfigError(f"reading is {self.reading!r}, must be location or scale")

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Draw the s of each client."""
        s = rng.uniform(0.0, self.upper, size=num_clients) if self.s is None else np.full(num_clients, self.s)
        if self.reading == "scale":
            return lambda client, times: float(s[client] * abs(times.standard_normal()))
        return lambda client, times: float(s[client] + abs(times.standard_normal()))
