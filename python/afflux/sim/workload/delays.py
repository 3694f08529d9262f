"""Laws of the clients' running times, as the papers state them; the unit is the law's own."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Delay: TypeAlias = Callable[[int, np.random.Generator], float]
"""Running time of one dispatch of a client, drawn from the given stream."""
DelayLaw: TypeAlias = Callable[[int, np.random.Generator], Delay]
"""(number of clients, stream for what is fixed per client) -> Delay."""

Interval: TypeAlias = tuple[float, float]


def constant(num_clients: int, rng: np.random.Generator) -> Delay:
    """Every dispatch takes 1: staleness comes from the concurrency alone."""
    return lambda client, times: 1.0


def exponential(num_clients: int, rng: np.random.Generator) -> Delay:
    """Exponential(1) at each dispatch (Anarchic FL's wall-clock)."""
    return lambda client, times: float(times.exponential())


def fadas_classes(num_clients: int, rng: np.random.Generator, gamma: float = 1.0) -> np.ndarray:
    """Class of each client, 0 small, 1 medium, 2 large: argmax of p ~ Dirichlet(3g, 2g, g)."""
    shares = rng.dirichlet((3 * gamma, 2 * gamma, gamma), size=num_clients)
    return np.asarray(np.argmax(shares, axis=1))


def fadas(large: Interval) -> DelayLaw:
    """FADAS, Table 1: U(1,2), U(3,5) or U(`large`) by the client's class; the unit is 10 s."""
    intervals: tuple[Interval, ...] = ((1.0, 2.0), (3.0, 5.0), large)

    def law(num_clients: int, rng: np.random.Generator) -> Delay:
        classes = fadas_classes(num_clients, rng)
        return lambda client, times: float(times.uniform(*intervals[classes[client]]))

    return law


def ca2fl(num_clients: int, rng: np.random.Generator) -> Delay:
    """CA2FL: s + |N(0,1)| with the location s ~ U(0,5) fixed per client."""
    location = rng.uniform(0.0, 5.0, size=num_clients)
    return lambda client, times: float(location[client] + abs(times.standard_normal()))


DELAYS: dict[str, DelayLaw] = {
    "constant": constant,
    "exponential": exponential,
    "fadas-large": fadas((50.0, 80.0)),
    "fadas-mild": fadas((5.0, 8.0)),
    "ca2fl": ca2fl,
}
