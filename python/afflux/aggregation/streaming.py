"""Streaming (accumulate=True): each arrival is added to one sum when it joins, so that a server holds no M vectors.

    sum = sum + raw_i u_i    for each arrival, in the order of the joins, in float64
    v = factor * sum         for the round: sum_i w_i u_i with w_i = factor * raw_i, but for rounding

A join puts a term into the server's state, and the push adds it at once, with the mutex. Therefore the order of the
additions is that of the joins. If an interrupt or an error comes between the two, the next call adds the term first.
"""

from collections.abc import Sequence

from afflux._engine import strict_float_mode
from afflux.aggregation.frames import note_stored_frames
from afflux.aggregation.options import known_on_arrival
from afflux.aggregation.plane import DataPlane, Slot, Sum
from afflux.ops.errors import AffluxError
from afflux.ops.validation import NUMBERS, brief
from afflux.rules.rule import Arrivals, Facts, Float64, Rule, raw_weight

#: The largest magnitude of a raw weight, of the factor and of a vector's norm, so that no sum overflows.
MOST = 1e150
MOST_SQUARES = MOST * MOST


class Term:
    """The term that an arrival adds to the total, the sum of a buffer's terms."""

    __slots__ = ("_done", "place", "slot", "total", "weight")

    def __init__(self, total: list[Sum], place: int, weight: float, slot: Slot | None) -> None:
        self.total = total  #: only the sum; a round has this list as its slots, and empties it
        self.place = place  #: in the buffer, from 0
        self.weight = weight
        self.slot = slot  #: None once it is added
        self._done: list[bool] = []

    def add(self, plane: DataPlane) -> None:
        """Add the slot to the total, after all earlier terms, unless it was added. An interrupted call is repeated."""
        if self.slot is not None:
            plane.add(self.total[0], self.slot, self.weight, first=not self.place, done=self._done)
            self.slot = None


def term_of(
    rule: Rule, total: list[Sum], place: int, arguments: tuple[int, int, float, Facts], slot: Slot | None
) -> Term:
    """Return the term of the arrival at index `place` of the buffer; without a slot it is added already.

    `arguments` are its staleness, num_examples, norm and facts.

    Raises:
        AffluxError: the raw weight is not a number, or is too large.
    """
    # In the engine's floating-point mode, like all weights. ServerOptions.for_rule has checked the part.
    try:
        raw = strict_float_mode(lambda arguments: raw_weight(rule, *arguments), arguments)
    finally:
        note_stored_frames()
    return Term(total, place, bounded(rule.name, "on_arrival", raw), slot)


def factor_of(rule: Rule, arrivals: Arrivals, weights: Float64, terms: Sequence[Term]) -> float:
    """Return the weight of the sum of these terms in their round.

    `weights` are the rule's weights. They and the terms are in canonical order.

    Raises:
        AffluxError: the rule's raw weights and its factor do not give its weights.
    """
    factor = bounded(rule.name, "factor", known_on_arrival(rule).factor(arrivals))
    # The largest difference by rounding; a larger one would exceed the bound that Server states.
    near = (len(terms) + 5) * 2.0**-52
    for client_id, term, weight in zip(arrivals.client_ids, terms, weights, strict=True):
        if not abs(factor * term.weight - weight) <= near * abs(weight) + 1 / MOST:
            raise AffluxError(
                f"[{rule.name}] weigh gave client {brief(client_id)} the weight {weight}, on_arrival and factor gave "
                f"{term.weight} * {factor}"
            )
    return factor


def bounded(name: str, method: str, output: float) -> float:
    """Return the result of this method of weigh; raise an error unless its magnitude is at most MOST."""
    # Converted to a Python float first: NumPy would round MOST to float32 if `output` is a float32.
    if not isinstance(output, NUMBERS) or not abs(value := float(output)) <= MOST:
        raise AffluxError(f"[{name}] weigh's {method} gave {output!r}, must be a number of at most {MOST} in magnitude")
    return value
