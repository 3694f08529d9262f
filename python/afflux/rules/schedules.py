"""Laws of the server's learning rate: one number per round, from facts about its arrivals. On the exact path."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, check_fields, finite, integer, is_function, not_negative, one_of, unreadable
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals


class LearningRate(Protocol):
    """The learning rate of one round."""

    def __call__(self, arrivals: Arrivals, /) -> float:
        """Return the rate for these arrivals."""
        ...


#: The learning rate of a step part: a constant, or a law.
Rate = float | LearningRate


def rate(lr: Rate, arrivals: Arrivals) -> float:
    """Return the learning rate of this round."""
    return lr(arrivals) if callable(lr) else lr


def a_rate(part: str, name: str, value: object) -> Rate:
    """Return a law or a finite number; raise AffluxError for any other value."""
    if is_function(value):
        return cast(LearningRate, value)
    try:
        return finite(part, name, value)
    except AffluxError:
        raise AffluxError(
            f"[{part}] {name} is {brief(value)}, must be a finite number or a law such as DelayAdaptive(0.1)"
        ) from None


@register("delay_adaptive", "schedule")
@dataclass(frozen=True, slots=True)
class DelayAdaptive:
    """lr; at most lr if the largest staleness of the buffer, tau_max, exceeds a threshold (FADAS).

    inverse    lr / tau_max         (eq. 77, used in the paper's experiments)
    minimum    min(lr, 1 / tau_max) (eq. 4)
    """

    lr: Rate
    threshold: int = 1  #: tau_c
    mode: Literal["inverse", "minimum"] = "inverse"

    def __post_init__(self) -> None:
        check_fields(self, a_rate, "lr")
        check_fields(self, integer(0), "threshold")
        check_fields(self, one_of("inverse", "minimum"), "mode")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        lr = rate(self.lr, arrivals)
        tau_max = int(max(arrivals.staleness.tolist()))
        if tau_max <= self.threshold:
            return lr
        return lr / tau_max if self.mode == "inverse" else min(lr, 1.0 / tau_max)


@register("minimum_staleness", "schedule")
@dataclass(frozen=True, slots=True)
class MinimumStaleness:
    """lr / (1 + gamma * tau_min), with the freshest arrival's staleness tau_min (WKAFL, eq. 10)."""

    lr: Rate
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self, a_rate, "lr")
        check_fields(self, not_negative, "gamma")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        tau_min = int(min(arrivals.staleness.tolist()))
        return rate(self.lr, arrivals) / (1.0 + self.gamma * tau_min)


@register("by_version", "schedule")
@dataclass(frozen=True, slots=True)
class ByVersion:
    """The rate of the greatest key that is not above the server's version.

    >>> law = ByVersion({0: 0.1, 100: 0.01})
    """

    rates: Mapping[int, float]

    def __post_init__(self) -> None:
        check_fields(self, _schedule, "rates")

    def __call__(self, arrivals: Arrivals, /) -> float:
        """See the class."""
        return self.rates[max(first for first in self.rates if first <= arrivals.version)]


def _schedule(part: str, name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise AffluxError(f"[{part}] {name} is {brief(value)}, must be a mapping such as {{0: 0.1, 100: 0.01}}")
    version = integer(0)
    try:
        rates = {version(part, "a version", key): finite(part, f"{name}[{key!r}]", lr) for key, lr in value.items()}
    except Exception as error:
        unreadable(f"[{part}] {name}", error)
    if 0 not in rates:
        raise AffluxError(f"[{part}] {name} begins at version {min(rates, default=None)}, must begin at 0")
    return rates
