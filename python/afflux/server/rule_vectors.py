"""A vector that the user hands in for the rule, checked and copied."""

from afflux import ops
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.layout import Tree
from afflux.arrays.pools import Vector
from afflux.ops.errors import AffluxError
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter


def rule_vector(
    aggregator: Aggregator, adapter: InputAdapter, options: ServerOptions, name: str, vector: "ops.Array | Tree"
) -> Vector:
    """The vector of `Server.set_rule_vector`, checked and copied."""
    needs, rule = aggregator.rule.needs, aggregator.rule.name
    if name not in needs.handed_in:
        known = ", ".join(needs.handed_in) or "none"
        raise AffluxError(f"[set_rule_vector] {name!r} is not handed in to {rule}; known: {known}")
    what = f"[set_rule_vector] {name}"
    new = aggregator.device.empty(adapter.size, options.dtype)
    facts = adapter.ingest(what, adapter.parts(what, vector), new)
    bad = facts.first_nonfinite
    if bad is not None:
        raise AffluxError(f"{what} has a non-finite value at index {bad}{adapter.place(bad)}")
    limits = options.limits
    if facts.max > limits.max_abs or -facts.min > limits.max_abs:
        raise AffluxError(f"{what} has {limits.reason(facts.min, facts.max, facts.norm)}")
    refuse_overflow(what, facts, "inner products")
    return new


def refuse_overflow(what: str, facts: ops.Ingested, which: str) -> None:
    """Rejects a vector whose norm is so large that `which`, "sums" or "inner products", could overflow."""
    if facts.sum_of_squares > MOST_SQUARES:
        raise AffluxError(f"{what} has norm {facts.norm:.3g}: {which} would overflow")
