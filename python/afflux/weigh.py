"""The parts that weigh: one float64 weight per arrival, from facts about the round.

On the exact path: + - * / and sqrt on single numbers, in canonical order (see rule.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal, Protocol

import numpy as np

from afflux.errors import AffluxError
from afflux.rule import Arrivals, Float64

Normalise = Literal["count", "weights"] | None


class StalenessLaw(Protocol):
    """s(staleness), 1 for a fresh arrival."""

    def __call__(self, staleness: int, /) -> float:
        """The factor for one staleness >= 0."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """s = 1."""

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Polynomial:
    """s = (1 + staleness)^-a (FedAsync section 5.2; FedBuff uses a = 1/2).

    `a` is a multiple of 1/2: those powers are products and square roots, the same bits on every CPU.
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        if not (0 <= self.a < inf and 2 * self.a == int(2 * self.a)):
            raise AffluxError(f"[Polynomial] a is {self.a}, must be 0, 0.5, 1, 1.5, ...")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        base = 1.0 + staleness
        power = sqrt(base) if int(2 * self.a) % 2 else 1.0
        for _ in range(int(self.a)):
            power = power * base
        return 1.0 / power


@dataclass(frozen=True, slots=True)
class Hinge:
    """s = 1 up to staleness b, then 1 / (a (staleness - b) + 1) (FedAsync section 5.2)."""

    a: float = 10.0
    b: float = 4.0

    def __post_init__(self) -> None:
        if not (0 <= self.a < inf and 0 <= self.b < inf):
            raise AffluxError(f"[Hinge] a is {self.a} and b is {self.b}, must be finite and not negative")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)


def ordered_sum(values: Iterable[float]) -> float:
    """The sum in the given order (np.sum adds in an order of its own that differs between CPUs)."""
    total = 0.0
    for value in values:
        total = total + float(value)
    return total


@dataclass(frozen=True, slots=True)
class Uniform:
    """w_i = 1 / M."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        return np.full(len(arrivals), 1.0 / len(arrivals))


@dataclass(frozen=True, slots=True)
class Examples:
    """w_i = n_i / sum n, the clients' numbers of training examples (FedAvg)."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        counts = [float(n) for n in arrivals.num_examples]
        total = ordered_sum(counts)
        return np.array([n / total for n in counts])


@dataclass(frozen=True, slots=True)
class Staleness:
    """w_i = scale * s(staleness_i), divided by M ("count"), by the sum of all s ("weights") or by nothing (None)."""

    law: StalenessLaw
    normalise: Normalise = "count"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.normalise not in ("count", "weights", None):
            raise AffluxError(f"[Staleness] normalise is {self.normalise!r}, must be 'count', 'weights' or None")
        if not callable(self.law):
            raise AffluxError(f"[Staleness] the law is {self.law!r}, must be one such as Polynomial(0.5)")
        if not -inf < self.scale < inf:
            raise AffluxError(f"[Staleness] scale is {self.scale}, must be finite")

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        values = [self.law(int(staleness)) for staleness in arrivals.staleness]
        divisor = 1.0
        if self.normalise == "count":
            divisor = float(len(values))
        elif self.normalise == "weights":
            divisor = ordered_sum(values)
        return np.array([self.scale * value / divisor for value in values])
