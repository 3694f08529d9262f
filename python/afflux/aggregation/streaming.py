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

import numpy as np

from afflux import ops
from afflux._engine import Buffer, Pool, strict_float_mode
from afflux.aggregation.frames import note_stored_frames
from afflux.aggregation.options import known_on_arrival
from afflux.arrays.devices import HOST, Device
from afflux.arrays.pools import Slot
from afflux.ops.errors import AffluxError
from afflux.ops.validation import NUMBERS, brief
from afflux.rules.rule import Arrivals, Facts, Float64, Rule, raw_weight

#: The largest magnitude of a raw weight, of the factor and of a vector's norm, so that no sum overflows.
MOST = 1e150
MOST_SQUARES = MOST * MOST


@dataclass(slots=True, eq=False)
class Total:
    """The sum of a buffer's terms."""

    vectors: list[Slot]  #: only the sum, (d,) float64; a round has this list as its slots, and empties it
    zeros: ops.Array  #: (d,), the initial value; on a GPU this is the sum itself, which begins as zeros
    added: int = 0  #: number of arrivals in the sum
    due: Sequence["Term"] = ()  #: the next terms to add, in the order of their joins
    driver: int | None = None  #: the thread that adds them; None: no thread does

    def make(self, num_threads: int) -> None:
        """Add the terms that are due."""
        self.add(self.due, num_threads)
        self.due = ()

    def add(self, terms: Sequence["Term"], num_threads: int) -> None:
        """Add these terms, which are in the order of their joins, in one sweep.

        They must include all earlier terms that are not added yet. Terms that are added already are skipped, so that
        the next call continues after an interrupt.
        """
        left = [term for term in terms if not term.done]
        if left:
            done: list[bool] = []  # shared by these terms
            for term in left:
                term.done = done
            (vector,) = self.vectors
            before = vector if left[0].place else self.zeros
            updates, weights = [term.slot for term in left], np.array([term.weight for term in left])
            if len(left) == 1:  # a fifth faster
                sweep = ops.Pass(before, vector, ops.Combine(updates, weights))
            else:  # term by term to the sum, so that no bit depends on which terms are added together
                sweep = ops.Pass(before, vector, ops.Combine(updates, weights, 1.0), step=ops.Assign())
            ops.apply(sweep, num_threads=num_threads, done=done)
        for term in terms:
            term.slot = None
        self.added = max(self.added, terms[-1].place + 1)


class Term:
    """The term that an arrival adds to the total."""

    __slots__ = ("done", "place", "slot", "total", "weight")

    def __init__(self, total: Total, place: int, weight: float, slot: Slot | None) -> None:
        self.total = total
        self.place = place  #: in the buffer, from 0
        self.weight = weight
        self.slot = slot  #: None once it is added
        self.done: list[bool] = []  #: not empty once it is added; terms that are added together share one list


class Streaming:
    """The sums and the terms of one server's arrivals."""

    def __init__(self, size: int, device: Device = HOST) -> None:
        """Prepare for vectors of `size` elements."""
        self._size = size
        self._device = device
        if device is HOST:  # on a GPU a sum is filled with zeros when it is made
            self._pool = Pool(size, "float64", 0)
            self._zeros = np.zeros(size)  # never written: the system may map all of it to one page of zeros

    def total(self, added: int = 0, values: Float64 | None = None) -> Total:
        """Return a total of `added` arrivals whose sum is `values`, (d,), copied; without arguments an empty total."""
        if self._device is HOST:
            total = Total([Buffer(self._pool)], self._zeros, added)
        else:
            vector = self._device.full(self._size, 0.0, "float64")
            total = Total([vector], vector, added)
        if values is not None:
            self._device.fill(total.vectors[0], values)
        return total

    def term(
        self, rule: Rule, total: Total, place: int, known: tuple[int, int, float, Facts], slot: Slot | None
    ) -> Term:
        """Return the term of the arrival at index `place` of the buffer.

        `known` are its staleness, num_examples, norm and facts.

        Raises:
            AffluxError: the raw weight is not a number, or is too large.
        """
        # In the engine's floating-point mode, like all weights. ServerOptions.for_rule has checked the part.
        try:
            raw = strict_float_mode(lambda known: raw_weight(rule, *known), known)
        finally:
            note_stored_frames()
        term = Term(total, place, bounded(rule.name, "on_arrival", raw), slot)
        if place < total.added:
            term.slot, term.done = None, [True]
        return term


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


def bounded(name: str, what: str, given: float) -> float:
    """Return the result of weigh's method `what`; raise an error unless its magnitude is at most MOST."""
    # Converted to a Python float first: NumPy would round MOST to float32 if `given` is a float32.
    if not isinstance(given, NUMBERS) or not abs(value := float(given)) <= MOST:
        raise AffluxError(f"[{name}] weigh's {what} gave {given!r}, must be a number of at most {MOST} in magnitude")
    return value
