"""Weights: one float64 weight per arrival, from facts about the round.

On the exact path: + - * / sqrt and afflux.pow on single numbers, in canonical order (see rule.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from msgspec import structs

from afflux.ops.errors import AffluxError
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import brief, check_fields, finite, flag, one_of
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Float64, Needs, Scalars, Weigh, Weights, names_of_facts
from afflux.rules.staleness import Exponential, StalenessLaw, a_law

Normalise = Literal["count", "weights"] | None
#: The range of a positive weight that a caller gives: no sum of such weights overflows, nor its inverse.
LEAST_GIVEN, MOST_GIVEN = 1e-150, 1e150


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


@register("given", "weigh")
@dataclass(frozen=True, slots=True)
class Given:
    """w_i = q_i / sum q, where q_i is a fact that the caller pushes: push(facts={fact: q_i}), 0 or 1e-150 to 1e150.

    An arrival with another q_i is rejected, with a reason in the report. If no q_i is positive, the round is skipped.
    """

    fact: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "fact", *names_of_facts("Given", "fact", (self.fact,)))

    @property
    def needs(self) -> Needs:
        """See afflux.rules.rule.Needs."""
        return Needs(facts=(self.fact,))

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        values = arrivals.facts[self.fact].tolist()
        raw = [self._raw(value) for value in values]
        total = ordered_sum(raw)
        why = f"must be 0, or from {LEAST_GIVEN:g} to {MOST_GIVEN:g}" if total else "and no arrival has a positive one"
        rejected = {
            i: f"{self.fact} is {value:g}, {why}" for i, value in enumerate(values) if raw[i] != value or not total
        }
        return Weights(np.array([value / (total or 1.0) for value in raw]), rejected=rejected, skip=not total)

    def on_arrival(self, staleness: int, num_examples: int, norm: float, facts: Scalars, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return self._raw(facts[self.fact])

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        total = ordered_sum(map(self._raw, arrivals.facts[self.fact].tolist()))
        return 1.0 / total if total else 0.0

    def _raw(self, value: float) -> float:
        """Return a value within the limits; 0 for any other."""
        return value if LEAST_GIVEN <= value <= MOST_GIVEN else 0.0


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
        scale = self.scale
        return np.array([scale * value / divisor for value in values])

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return self.law(staleness) * (float(num_examples) if self.by_examples else 1.0)

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        _, divisor = self._shares(arrivals, raw=True)
        return self.scale / divisor

    def _shares(self, arrivals: Arrivals, *, raw: bool) -> tuple[list[float], float]:
        staleness = arrivals.staleness.tolist()
        total = float(len(staleness))
        if self.normalise == "weights":
            counts = [float(n) for n in arrivals.num_examples.tolist()] if self.by_examples else [1.0] * len(staleness)
            return with_sum("Staleness", self.law, staleness, counts, raw=raw)
        taus = {*staleness}
        values = [*map(dict(zip(taus, map(self.law, taus), strict=True)).__getitem__, staleness)]
        if self.by_examples:
            counts = [float(n) for n in arrivals.num_examples.tolist()]
            values, total = [value * n for value, n in zip(values, counts, strict=True)], ordered_sum(counts)
        return values, total if self.normalise == "count" else 1.0


@register("trimmed", "weigh")
@dataclass(frozen=True, slots=True)
class Trimmed:
    """The weights of another part, and a share of them that is cut at both ends, element by element: `Weights.trim`.

    0.5 gives the mean of lower and upper median. A buffer takes each client once. Weights count as votes, and do not
    scale values. So a part that needs norms is rejected: it would not clip long updates. Rule vectors that the part
    renews, such as the velocity of DelayedNesterov, get the updates untrimmed: hostile clients move them.
    """

    weigh: Weigh
    trim: float

    def __post_init__(self) -> None:
        if isinstance(self.weigh, type) or not callable(self.weigh):
            raise AffluxError(f"[Trimmed] weigh is {brief(self.weigh)}, must be a part such as Uniform()")
        check_fields(self, finite, "trim")
        if not 0 <= self.trim <= 0.5:
            raise AffluxError(f"[Trimmed] trim is {self.trim}, must be from 0 to 0.5")

    @property
    def needs(self) -> Needs:
        """See afflux.rules.rule.Needs."""
        needs = getattr(self.weigh, "needs", Needs())
        if needs.norms:
            raise AffluxError(
                f"[Trimmed] weigh is {brief(self.weigh)}, whose weights depend on norms: weights of a trimmed mean are "
                "votes, and do not scale values. Clip the updates before you push them"
            )
        return replace(needs, trim=True, once=True)

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        output = self.weigh(arrivals)
        weights = output if isinstance(output, Weights) else Weights(output)
        return structs.replace(weights, trim=self.trim)


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
