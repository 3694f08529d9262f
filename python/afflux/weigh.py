"""The parts that weigh: one float64 weight per arrival, from facts about the round.

On the exact path: + - * / sqrt and afflux.pow on single numbers, in canonical order (see rule.py).
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal, Protocol

import numpy as np

from afflux import elementary
from afflux.algebra import ordered_sum
from afflux.errors import AffluxError
from afflux.rule import Arrivals, Float64

Normalise = Literal["count", "weights"] | None

#: e/2, the base of WKAFL's and TWAFL's staleness law.
HALF_E = 1.3591409142295225


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
    """s = (1 + staleness)^-a (FedAsync section 5.2; FedBuff uses a = 1/2)."""

    a: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.a < inf:
            raise AffluxError(f"[Polynomial] a is {self.a}, must be finite and not negative")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        base = 1.0 + staleness
        if 2 * self.a != int(2 * self.a):
            return elementary.pow(base, -self.a)
        # Products and a square root: faster, and the bits of the first versions.
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


@dataclass(frozen=True, slots=True)
class Exponential:
    """s = base^-staleness, with base e/2 (TWAFL, Chen et al. 2019; WKAFL section 4.3.2)."""

    base: float = HALF_E

    def __post_init__(self) -> None:
        if not 1 <= self.base < inf:
            raise AffluxError(f"[Exponential] base is {self.base}, must be at least 1 and finite")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return elementary.pow(self.base, -float(staleness))


@dataclass(frozen=True, slots=True)
class Inverse:
    """s = 1 / max(staleness, 1) (SASGD, Zhang et al. 2016)."""

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 / max(staleness, 1)


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
    """w_i = scale * s(staleness_i), divided by M ("count"), by the sum of all s ("weights") or by nothing (None).

    With `by_examples` each s is multiplied by the client's number of examples, and "count" divides by their sum.
    """

    law: StalenessLaw
    normalise: Normalise = "count"
    scale: float = 1.0
    by_examples: bool = False

    def __post_init__(self) -> None:
        if self.normalise not in ("count", "weights", None):
            raise AffluxError(f"[Staleness] normalise is {self.normalise!r}, must be 'count', 'weights' or None")
        if not callable(self.law):
            raise AffluxError(f"[Staleness] the law is {self.law!r}, must be one such as Polynomial(0.5)")
        if not -inf < self.scale < inf:
            raise AffluxError(f"[Staleness] scale is {self.scale}, must be finite")

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        counts = [float(n) if self.by_examples else 1.0 for n in arrivals.num_examples]
        staleness = [int(tau) for tau in arrivals.staleness]
        if self.normalise == "weights" and isinstance(self.law, Exponential):
            # The same quotients, and they cannot all underflow.
            least = min(staleness)
            staleness = [tau - least for tau in staleness]
        values = [self.law(tau) * n for tau, n in zip(staleness, counts, strict=True)]
        divisor = 1.0
        if self.normalise == "count":
            divisor = ordered_sum(counts)
        elif self.normalise == "weights":
            divisor = ordered_sum(values)
        return np.array([self.scale * value / divisor for value in values])
