"""The laws of a server's learning rate: one number per round, from facts about its arrivals; on the exact path."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from afflux.errors import AffluxError
from afflux.rule import Arrivals


class LearningRate(Protocol):
    """The learning rate of one round."""

    def __call__(self, arrivals: Arrivals, /) -> float:
        """The rate for these arrivals."""
        ...


#: What step parts take: a constant, or a law.
Rate = float | LearningRate


def rate(lr: Rate, arrivals: Arrivals) -> float:
    """The learning rate of this round."""
    return lr(arrivals) if callable(lr) else lr


def checked(what: str, lr: object) -> None:
    """Refuses what is neither a law nor a finite number."""
    if not callable(lr) and not (isinstance(lr, int | float) and -inf < lr < inf):
        raise AffluxError(f"[{what}] lr is {lr!r}, must be a finite number or a law such as DelayAdaptive(0.1)")


@dataclass(frozen=True, slots=True)
class DelayAdaptive:
    """Smaller where the stalest arrival of the buffer, tau_max, exceeds a threshold; else lr (FADAS).

    inverse    lr / tau_max         (eq. 77, what the paper's experiments ran)
    minimum    min(lr, 1 / tau_max) (eq. 4)
    """

    lr: Rate
    threshold: int = 1  #: tau_c
    mode: Literal["inverse", "minimum"] = "inverse"

    def __post_init__(self) -> None:
        checked("DelayAdaptive", self.lr)
        if self.mode not in ("inverse", "minimum"):
            raise AffluxError(f"[DelayAdaptive] mode is {self.mode!r}, must be 'inverse' or 'minimum'")
        if not self.threshold >= 0:
            raise AffluxError(f"[DelayAdaptive] threshold is {self.threshold}, must be at least 0")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        lr = rate(self.lr, arrivals)
        tau_max = max(int(staleness) for staleness in arrivals.staleness)
        if tau_max <= self.threshold:
            return lr
        return lr / tau_max if self.mode == "inverse" else min(lr, 1.0 / tau_max)


@dataclass(frozen=True, slots=True)
class MinimumStaleness:
    """lr / (1 + gamma * tau_min), with the freshest arrival's staleness tau_min (WKAFL, eq. 10)."""

    lr: Rate
    gamma: float = 0.1

    def __post_init__(self) -> None:
        checked("MinimumStaleness", self.lr)
        if not 0 <= self.gamma < inf:
            raise AffluxError(f"[MinimumStaleness] gamma is {self.gamma}, must be finite and not negative")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        tau_min = min(int(staleness) for staleness in arrivals.staleness)
        return rate(self.lr, arrivals) / (1.0 + self.gamma * tau_min)


@dataclass(frozen=True, slots=True)
class ByVersion:
    """The rate that stands at the greatest key not above the server's version.

    >>> law = ByVersion({0: 0.1, 100: 0.01})
    """

    rates: Mapping[int, float]

    def __post_init__(self) -> None:
        for lr in self.rates.values():
            checked("ByVersion", lr)
        if not self.rates or min(self.rates) != 0:
            raise AffluxError(f"[ByVersion] the rates begin at version {min(self.rates, default=None)}, must at 0")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        return self.rates[max(first for first in self.rates if first <= arrivals.version)]
