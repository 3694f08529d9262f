"""The parts that weigh: one float64 weight per arrival, from facts about the round.

On the exact path: + - * / sqrt and afflux.pow on single numbers, in canonical order (see rule.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal, Protocol, cast

import numpy as np

from afflux.ops import exact
from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import check_fields, finite, flag, is_function, not_negative, one_of, one_or_more
from afflux.rule import Arrivals, Float64

Normalise = Literal["count", "weights"] | None

#: e/2, the base of WKAFL's and TWAFL's staleness law.
HALF_E = 1.3591409142295225


class StalenessLaw(Protocol):
    """s(staleness), 1 for a fresh arrival."""

    def __call__(self, staleness: int, /) -> float:
        """The factor for one staleness >= 0."""
        ...


def a_law(part: str, name: str, value: object) -> StalenessLaw:
    """Refuses what is no law of staleness."""
    if not is_function(value):
        raise AffluxError(f"[{part}] the {name} is {value!r}, must be one such as Polynomial(0.5)")
    return cast(StalenessLaw, value)


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
        check_fields(self, not_negative, "a")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        base = 1.0 + staleness
        if self.a > 8 or 2 * self.a != int(2 * self.a):
            return exact.pow(base, -self.a)
        # Up to 8 products and a square root: faster, and the bits of the first versions.
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
        check_fields(self, not_negative, "a", "b")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)


@dataclass(frozen=True, slots=True)
class Exponential:
    """s = base^-staleness, with base e/2 (TWAFL, Chen et al. 2019; WKAFL section 4.3.2)."""

    base: float = HALF_E

    def __post_init__(self) -> None:
        check_fields(self, one_or_more, "base")

    def __call__(self, staleness: int, /) -> float:
        """See the class."""
        return exact.pow(self.base, -float(staleness))


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
        return np.full(len(arrivals), self.factor(arrivals))

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rule.OnArrival."""
        return 1.0

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rule.OnArrival."""
        return 1.0 / len(arrivals)


@dataclass(frozen=True, slots=True)
class Examples:
    """w_i = n_i / sum n, the clients' numbers of training examples (FedAvg)."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        total = self._total(arrivals)
        return np.array([float(n) / total for n in arrivals.num_examples.tolist()])

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rule.OnArrival."""
        return float(num_examples)

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rule.OnArrival."""
        return 1.0 / self._total(arrivals)

    def _total(self, arrivals: Arrivals) -> float:
        return ordered_sum(arrivals.num_examples.tolist())


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
        check_fields(self, a_law, "law")
        check_fields(self, one_of("count", "weights", None), "normalise")
        check_fields(self, finite, "scale")
        check_fields(self, flag, "by_examples")

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        values, divisor = self._shares(arrivals, raw=False)
        return np.array([self.scale * value / divisor for value in values])

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rule.OnArrival."""
        return self.law(staleness) * (float(num_examples) if self.by_examples else 1.0)

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rule.OnArrival."""
        _, divisor = self._shares(arrivals, raw=True)
        return self.scale / divisor

    def _shares(self, arrivals: Arrivals, *, raw: bool) -> tuple[list[float], float]:
        staleness = arrivals.staleness.tolist()
        counts = [float(n) for n in arrivals.num_examples.tolist()] if self.by_examples else [1.0] * len(staleness)
        if self.normalise == "weights":
            return with_sum("Staleness", self.law, staleness, counts, raw=raw)
        law = {tau: self.law(tau) for tau in set(staleness)}
        values = [law[tau] * n for tau, n in zip(staleness, counts, strict=True)]
        return values, ordered_sum(counts) if self.normalise == "count" else 1.0


def with_sum(
    part: str, law: StalenessLaw, staleness: Sequence[int], counts: Sequence[float], *, raw: bool = False
) -> tuple[list[float], float]:
    """What is divided by its own sum, s(staleness_i) counts_i, and that sum.

    An exponential law is counted from the freshest arrival, which gives the same quotients and cannot underflow in all
    of them; not if they are to be `raw`, each from facts about its arrival alone.

    Raises:
        AffluxError: the sum is 0.
    """
    least = min(staleness)
    origin = least if isinstance(law, Exponential) and not raw else 0
    values = [law(tau - origin) * n for tau, n in zip(staleness, counts, strict=True)]
    total = ordered_sum(values)
    if total == 0:
        raise AffluxError(
            f"[{part}] the weights sum to 0 and cannot be divided by their sum: from staleness {least} on, the least "
            f"in the buffer, {law} underflows"
        )
    return values, total
