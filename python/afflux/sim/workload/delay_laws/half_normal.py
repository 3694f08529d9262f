"""CA2FL's running times: half-normal laws, one for each client (its appendix D)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from afflux.sim.errors import ConfigError
from afflux.sim.workload.delay_laws.law import Delay


@dataclass(frozen=True)
class HalfNormalDelays:
    """halfnorm(s): s + |N(0, 1)| if s is the location, s |N(0, 1)| if s is the scale; drawn anew at each dispatch.

    The paper writes halfnorm(s) without naming the parameter. The location is right: docs/data.md has the numbers.
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
