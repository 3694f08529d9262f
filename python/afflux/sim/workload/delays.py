"""Laws of the clients' running times, as the papers state them; the unit is the law's own."""

import numpy as np

from afflux.sim.workload.delay_laws.fadas import FadasDelays, fadas_classes
from afflux.sim.workload.delay_laws.half_normal import HalfNormalDelays
from afflux.sim.workload.delay_laws.law import Delay, DelayLaw

__all__ = ["DELAYS", "Delay", "DelayLaw", "constant", "exponential", "fadas_classes"]


def constant(num_clients: int, rng: np.random.Generator) -> Delay:
    """Every dispatch takes 1: the staleness depends only on the concurrency."""
    return lambda client, times: 1.0


def exponential(num_clients: int, rng: np.random.Generator) -> Delay:
    """Exponential(1) at each dispatch (Anarchic FL's wall-clock)."""
    return lambda client, times: float(times.exponential())


DELAYS: dict[str, DelayLaw] = {
    "constant": constant,
    "exponential": exponential,
    "fadas-large": FadasDelays(50.0, 80.0),
    "fadas-mild": FadasDelays(5.0, 8.0),
    "ca2fl": HalfNormalDelays(),
    "ca2fl-1": HalfNormalDelays(upper=1.0),
    "ca2fl-0.5": HalfNormalDelays(upper=0.5),
    "ca2fl-fixed": HalfNormalDelays(s=5.0),
}
