"""The check and the copy of a vector that the user sets for the rule."""

from dataclasses import replace
from math import inf

from afflux import ops
from afflux.aggregation.plane import Vector
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter
from afflux.server.vectors import overflow, take_in


def rule_vector(aggregator: Aggregator, adapter: InputAdapter, name: str, vector: "ops.Array | Tree") -> Vector:
    """Return a checked copy of the vector of `Server.set_rule_vector`."""
    needs, rule = aggregator.rule.needs, aggregator.rule.name
    if as_text(name) not in needs.handed_in:
        known = ", ".join(needs.handed_in) or "none"
        raise AffluxError(f"[set_rule_vector] {brief(name)} is not a vector that is set for {rule}; known: {known}")
    what = f"[set_rule_vector] {name}"
    new = aggregator.plane.vector()
    limits = replace(aggregator.admission.limits, max_norm=inf)  # max_norm is for clients' vectors
    facts, _ = take_in(what, adapter, adapter.parts(what, vector), new, limits)
    if facts.sum_of_squares > MOST_SQUARES:
        raise overflow(what, facts, "inner products")
    return new
