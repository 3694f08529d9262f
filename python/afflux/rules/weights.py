"""Weights: one float64 weight per arrival, from facts about the round.

On the exact path: + - * / sqrt and afflux.pow on single numbers, in canonical order (see rule.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import check_fields, finite, flag, one_of
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Float64
from afflux.rules.staleness import Exponential, StalenessLaw, a_law

Normalise = Literal["count", "weights"] | None


@register("uniform", "weigh")
@dataclass(frozen=True, slots=True)
class Uniform:
    """w_i = 1 / M."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        return np.full(len(arrivals), self.factor(arrivals))

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return 1.0

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return 1.0 / len(arrivals)


@register("examples", "weigh")
@dataclass(frozen=True, slots=True)
class Examples:
    """w_i = n_i / sum n, the clients' numbers of training examples (FedAvg)."""

    def __call__(self, arrivals: Arrivals, /) -> Float64:
        """See the class."""
        total = self._total(arrivals)
        return np.array([float(n) / total for n in arrivals.num_examples.tolist()])

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return float(num_examples)

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return 1.0 / self._total(arrivals)

    def _total(self, arrivals: Arrivals) -> float:
        return ordered_sum(arrivals.num_examples.tolist())


@register("staleness", "weigh")
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
        """See afflux.rules.rule.OnArrival."""
        return self.law(staleness) * (float(num_examples) if self.by_examples else 1.0)

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        _, divisor = self._shares(arrivals, raw=True)
        return self.scale / divisor

    def _shares(self, arrivals: Arrivals, *, raw: bool) -> tuple[list[float], float]:
        staleness = arrivals.staleness.tolist()
        counts = [float(n) for n in arrivals.num_examples.tolist()] if self.by_examples else [1.0] * len(staleness)
        if self.normalise == "weights":
            return with_sum("Staleness", self.law, staleness, counts, raw=raw)
        law = {tau: self.law(tau) for tau in set(staleness)}
        if self.by_examples:
            values, total = [law[tau] * n for tau, n in zip(staleness, counts, strict=True)], ordered_sum(counts)
        else:
            values, total = [law[tau] for tau in staleness], float(len(staleness))
        return values, total if self.normalise == "count" else 1.0


def with_sum(
    part: str, law: StalenessLaw, staleness: Sequence[int], counts: Sequence[float], *, raw: bool = False
) -> tuple[list[float], float]:
    """Return the values s(staleness_i) counts_i, and their sum, by which the caller divides them.

    For an exponential law, staleness is counted from the freshest arrival. This gives the same quotients, and they
    cannot all underflow. With `raw` it is counted from 0, because each value may depend only on its own arrival.

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
