"""The vectors of a round, for a rule that needs inner products to compute its weights."""

from collections.abc import Callable, Sequence

import numpy as np

from afflux import ops
from afflux.aggregation.plane import NamedVectors, Slot, Vector
from afflux.ops.errors import AffluxError
from afflux.ops.validation import any_number, as_text, brief, reads
from afflux.rules.rule import Float64

#: `DataPlane.inner`.
Inner = Callable[[Sequence[Slot], Float64 | None, Vector | None, float, float], ops.InnerProducts]


class RoundVectors:
    """The function `Arrivals.inner` of one round. After `close` a call raises: other rounds reuse the slots."""

    __slots__ = ("_given",)

    def __init__(self, slots: Sequence[Slot], rule_vectors: NamedVectors, inner: Inner):
        self._given: tuple[Sequence[Slot], NamedVectors, Inner] | None = (slots, rule_vectors, inner)

    def __call__(
        self, weights: Float64 | None, rule_vector: str | None, shift: float, own_weight: float, /
    ) -> ops.InnerProducts:
        """Compute the inner products; see `Arrivals.inner`."""
        if self._given is None:
            raise AffluxError("[Arrivals] inner is for weigh: the round is decided, and its vectors are reused")
        slots, rule_vectors, inner = self._given
        shift, own_weight = any_number("Arrivals", "shift", shift), any_number("Arrivals", "own_weight", own_weight)
        name = None if rule_vector is None else as_text(rule_vector)
        if rule_vector is not None and (name is None or name not in rule_vectors):
            names = f"it has {', '.join(rule_vectors)}" if rule_vectors else "the rule has none"
            raise AffluxError(f"[Arrivals] inner has no rule vector {brief(rule_vector)}: {names}")
        if (rule_vector is not None) != (shift != 0 or own_weight != 0):
            raise AffluxError(
                f"[Arrivals] inner has rule_vector {rule_vector!r}, shift {shift} and own_weight {own_weight}: a rule "
                "vector goes with one of them that is not 0, or none with neither"
            )
        coefficients = None if weights is None else _numbers(weights)
        if coefficients is None and own_weight != 0:
            coefficients = np.zeros(len(slots))
        return inner(slots, coefficients, None if name is None else rule_vectors[name], shift, own_weight)

    def select(self, places: Sequence[int]) -> "RoundVectors":
        """Return the function for the slots at these indices."""
        assert self._given is not None  # it is closed after the round's weights
        slots, rule_vectors, inner = self._given
        return RoundVectors([slots[i] for i in places], rule_vectors, inner)

    def close(self) -> None:
        """Refuse later calls: the rule has returned its weights, or has failed."""
        self._given = None


@reads("[Arrivals] weights of inner")
def _numbers(weights: object) -> Float64:
    """Return the numbers as a float64 array for the engine."""
    array = np.asarray(weights)
    if isinstance(weights, np.ma.MaskedArray) or array.dtype.kind not in "fiub":
        raise AffluxError(f"[Arrivals] weights of inner are {brief(weights)}, must be numbers")
    return np.ascontiguousarray(array, np.float64)
