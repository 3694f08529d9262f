"""The vectors of a round, for a rule that asks for inner products while it decides."""

from collections.abc import Sequence

import numpy as np

from afflux import ops
from afflux.arrays.pools import Slot, Vector
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import Float64


class RoundVectors:
    """Arrivals.inner of one round. Its vectors are those of later rounds afterwards: a closed one refuses."""

    __slots__ = ("_held", "_slots", "_threads")

    def __init__(self, slots: Sequence[Slot], names: Sequence[str], held: Sequence[Vector], num_threads: int):
        self._slots: Sequence[Slot] | None = slots
        self._held = dict(zip(names, held, strict=True))
        self._threads = num_threads

    def __call__(
        self, weights: Float64 | None, memory: str | None, shift: float, memory_weight: float, /
    ) -> ops.InnerProducts:
        """See Arrivals.inner."""
        if self._slots is None:
            raise AffluxError("[Arrivals] inner is for weigh: the round is decided, and its vectors are given back")
        if memory is not None and memory not in self._held:
            raise AffluxError(f"[Arrivals] inner has no rule vector {brief(memory)}; it has {', '.join(self._held)}")
        given = None if weights is None else np.ascontiguousarray(weights, np.float64)
        vector = None if memory is None else self._held[memory]
        return ops.inner(
            self._slots, given, memory=vector, shift=shift, memory_weight=memory_weight, num_threads=self._threads
        )

    def close(self) -> None:
        """The rule has decided."""
        self._slots = None
        self._held = {}
