"""Streaming (accumulate=True): each arrival is added to one sum when it joins, so that a server holds no M vectors.

    sum = sum + raw_i u_i    for each arrival, in the order of the joins, in float64
    v = factor * sum         for the round: sum_i w_i u_i with w_i = factor * raw_i, but for rounding

A join puts a term into the server's state. The term needs its slot until it is added. Like the sweep of a round, a term
is added without the mutex, by one thread at a time. If that thread is interrupted, another one adds it. Waiting terms
are added together in one sweep over the sum, with the same bits as one sweep for each term. So a push leaves its term
to a later push, as long as another slot is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

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


class _Sweep(NamedTuple):
    """Terms that are being added: the arguments of a call of `DataPlane.add`, which an interrupted call repeats."""

    terms: "Sequence[Term]"
    slots: list[Slot]
    weights: Float64
    done: list[bool]


@dataclass(slots=True, eq=False)
class Total:
    """The sum of a buffer's terms."""

    vectors: list[Sum]  #: only the sum; a round has this list as its slots, and empties it
    added: int = 0  #: number of arrivals in the sum
    due: Sequence["Term"] = ()  #: the next terms to add, in the order of their joins
    driver: int | None = None  #: the thread that adds them; None: no thread does
    _sweep: _Sweep | None = None

    @classmethod
    def of(cls, plane: DataPlane, added: int = 0, values: Float64 | None = None) -> Self:
        """Return a total of `added` arrivals whose sum is `values`, (d,), copied; by default an empty total."""
        return cls([plane.total(values)], added)

    def make(self, plane: DataPlane) -> None:
        """Add the terms that are due."""
        self.add(self.due, plane)
        self.due = ()

    def add(self, terms: Sequence["Term"], plane: DataPlane) -> None:
        """Add these terms, which are in the order of their joins, in one sweep.

        They must include all earlier terms that are not added yet. Terms that are added already are skipped, so that
        the next call continues after an interrupt.
        """
        self._finish(plane)
        slot_terms = [term for term in terms if term.slot is not None]
        if slot_terms:
            slots, weights = [term.slot for term in slot_terms], np.array([term.weight for term in slot_terms])
            self._sweep = _Sweep(slot_terms, slots, weights, [])
            self._finish(plane)

    def _finish(self, plane: DataPlane) -> None:
        """Make the sweep that has begun."""
        sweep = self._sweep
        if sweep is not None:
            first = not sweep.terms[0].place
            plane.add(self.vectors[0], sweep.slots, sweep.weights, first=first, done=sweep.done)
            for term in sweep.terms:
                term.slot = None
            self.added = max(self.added, sweep.terms[-1].place + 1)
            self._sweep = None


class Term:
    """The term that an arrival adds to the total."""

    __slots__ = ("place", "slot", "total", "weight")

    def __init__(self, total: Total, place: int, weight: float, slot: Slot | None) -> None:
        self.total = total
        self.place = place  #: in the buffer, from 0
        self.weight = weight
        self.slot = slot if place >= total.added else None  #: None once it is added


def term_of(rule: Rule, total: Total, place: int, arguments: tuple[int, int, float, Facts], slot: Slot | None) -> Term:
    """Return the term of the arrival at index `place` of the buffer.

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
