"""The sweep that copies a pushed vector into a slot, and rejects invalid values."""

from math import sqrt

from afflux import ops
from afflux._engine import RowCheck
from afflux.aggregation.limits import Limits
from afflux.aggregation.plane import Slot, Vector
from afflux.ops.errors import AffluxError
from afflux.server.inputs import InputAdapter

#: A kind with its article, for messages.
A_KIND = {"update": "an update", "gradient": "a gradient", "model": "a model"}


def take_in(
    what: str,
    adapter: InputAdapter,
    parts: "ops.Array | list[ops.Array]",
    slot: Slot | Vector,
    limits: Limits,
    conversion: ops.Conversion | None = None,
    beside: RowCheck | None = None,
) -> tuple[ops.Ingested, float]:
    """Copy a pushed vector into a slot, in one sweep, and check the vector.

    Args:
        what: describes the vector in messages.
        adapter: the server's adapter.
        parts: the result of `InputAdapter.parts`.
        slot: (d,), overwritten.
        limits: the limits on the vector's elements and norm, after the conversion.
        conversion: the conversion to the kind of the rule.
        beside: a check that runs in parallel.

    Returns:
        The result of the sweep, and the vector's norm.

    Raises:
        AffluxError: the vector has a value that is not finite, or is beyond a limit.
    """
    facts = adapter.ingest(what, parts, slot, conversion, beside)
    bad, squares, low, high = facts
    if bad is not None:
        made = "" if conversion is None else f" as {A_KIND[conversion.wanted]}"
        raise AffluxError(f"{what} has a non-finite value{made} at index {bad}{adapter.place(bad)}")
    norm = sqrt(squares)
    if not limits.allow(low, high, norm):
        index = adapter.plane.first_beyond(slot, limits.max_abs)  # None: the norm is too large
        at = "" if index is None else f": at index {index}{adapter.place(index)}"
        raise AffluxError(f"{what} has {limits.reason(low, high, norm)}{at}")
    return facts, norm


def overflow(what: str, facts: ops.Ingested, which: str) -> AffluxError:
    """Return the error of a vector beyond MOST_SQUARES: `which`, "sums" or "inner products", could overflow."""
    return AffluxError(f"{what} has norm {facts.norm:.3g}: {which} would overflow")
