"""A vector that is taken in: one sweep into a slot, and what the server refuses of it."""

from math import sqrt

from afflux import ops
from afflux._engine import RowCheck
from afflux.aggregation.limits import Limits
from afflux.arrays.interop import first_beyond
from afflux.arrays.pools import Vector
from afflux.ops.errors import AffluxError
from afflux.server.inputs import InputAdapter

#: A kind with its article, for messages.
A_KIND = {"update": "an update", "gradient": "a gradient", "model": "a model"}


def take_in(
    what: str,
    adapter: InputAdapter,
    parts: "ops.Array | list[ops.Array]",
    slot: Vector,
    limits: Limits,
    conversion: ops.Conversion | None = None,
    beside: RowCheck | None = None,
) -> tuple[ops.Ingested, float]:
    """The sweep that takes a vector in.

    Args:
        what: for messages.
        adapter: of the server.
        parts: as `InputAdapter.parts` gives them.
        slot: (d,), overwritten.
        limits: on its elements and its norm, after the conversion.
        conversion: to what the rule takes.
        beside: what else is done meanwhile.

    Returns:
        What the sweep found, and the vector's norm.

    Raises:
        AffluxError: it has a value that is not finite, or is beyond a limit.
    """
    facts = adapter.ingest(what, parts, slot, conversion, beside)
    bad, squares, low, high = facts
    if bad is not None:
        made = "" if conversion is None else f" as {A_KIND[conversion.wanted]}"
        raise AffluxError(f"{what} has a non-finite value{made} at index {bad}{adapter.place(bad)}")
    norm = sqrt(squares)
    if not limits.allow(low, high, norm):
        index = first_beyond(slot, limits.max_abs)  # None: it is the norm
        at = "" if index is None else f": at index {index}{adapter.place(index)}"
        raise AffluxError(f"{what} has {limits.reason(low, high, norm)}{at}")
    return facts, norm


def overflow(what: str, facts: ops.Ingested, which: str) -> AffluxError:
    """The error of a vector beyond MOST_SQUARES: `which`, "sums" or "inner products", could overflow."""
    return AffluxError(f"{what} has norm {facts.norm:.3g}: {which} would overflow")
