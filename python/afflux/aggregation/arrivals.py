"""Arrivals that wait for their round."""

from typing import NamedTuple

from afflux.aggregation.cache.staging import StagedRow
from afflux.aggregation.plane import Slot
from afflux.aggregation.streaming import Term
from afflux.rules.rule import ClientId, Facts, Float64

#: The facts about an arrival before it joins: the first fields of PendingArrival.
Pushed = tuple[ClientId, int, int, float, float, Slot, Float64 | None, tuple[float, float], int, Facts]


class PendingArrival(NamedTuple):
    """An arrival in the buffer."""

    client_id: ClientId
    version: int
    num_examples: int
    loss: float
    norm: float  #: NaN: a step reads the vector in place, and no push has checked it
    slot: Slot | Term  #: a term if the server accumulates
    buffers: Float64 | None
    extremes: tuple[float, float]  #: the vector's least and largest element; NaN if a step reads it in place
    local_steps: int  #: 0 if not reported
    facts: Facts
    join: int
    staleness: int
    staged_row: StagedRow | None = None  #: the client's row, if rows are kept on the host and rounds are made on a GPU
