"""A round is decided as data: its plan reads as what the round is about to do, and needs no vectors."""

from types import MappingProxyType

import numpy as np

from afflux import ops
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.table import NO_SLOTS, RowTable
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.reports import Pulled
from afflux.aggregation.round import RoundStart, decide_round
from afflux.aggregation.streaming import term_of
from afflux.ops import codecs
from afflux.rules import ca2fl, fadas, fedasync, fedbuff, wkafl


class NoVectors:
    """A plane that can compute the inner products of vectors of one element, by their handles."""

    def __init__(self, **values):
        self.values, self.calls = values, []

    def inner(self, slots, weights, memory, shift, own_weight):
        self.calls.append((list(slots), memory))
        vectors = [np.array([self.values[slot]]) for slot in slots]
        memory = None if memory is None else np.zeros(1)
        return ops.inner(vectors, weights, memory=memory, shift=shift, memory_weight=own_weight, num_threads=1)


def arrival(client, slot, join, version=3, norm=1.0):
    return PendingArrival(client, version, 1, float("nan"), norm, slot, None, (-1.0, 1.0), 0, (), join, 3 - version)


def decide(rule, arrivals, plane=None, rows=None):
    scalars = MappingProxyType(dict(rule.needs.scalars))
    limits = ServerOptions().limits
    vectors = {name: f"the {name}" for name in rule.rule_vectors}
    start = RoundStart(Pulled(None, 3), vectors, rows, scalars, (), False, 40, limits, (), None)
    return decide_round(rule, start, arrivals, plane)


def test_a_plan_has_the_handles_in_canonical_order_and_their_weights():
    decided = decide(fedbuff(buffer_size=2, server_lr=0.5), [arrival(9, "slot of 9", 0), arrival(7, "slot of 7", 1)])
    plan = decided.plan
    assert (plan.version, plan.slots, plan.weights.tolist()) == (4, ["slot of 7", "slot of 9"], [0.5, 0.5])
    assert (plan.params_weight, plan.step) == (0.0, ops.Step("sgd", 0.5))
    assert (plan.rows, plan.most) == (None, np.inf)
    assert (decided.report.version, decided.report.client_ids, decided.report.seconds) == (4, (7, 9), 0.0)
    assert decided.prepared is None
    parts = "version=4", "slots=['slot of 7', 'slot of 9']", "weights=array([0.5, 0.5])", "Step(kind='sgd', lr=0.5"
    for part in parts:
        assert part in repr(plan)


def test_a_plan_names_the_vectors_of_the_rule():
    decided = decide(fadas(buffer_size=1), [arrival(7, "a", 0)])
    assert (decided.plan.states, decided.plan.rule_vectors) == (list(fadas().states), ())
    mixed = decide(fedasync(alpha=0.5), [arrival(7, "a", 0)]).plan
    assert (mixed.weights.tolist(), mixed.params_weight) == ([0.5], -0.5)
    unchecked = decide(fedbuff(buffer_size=2), [arrival(7, "a", 0), arrival(8, "b", 1, norm=float("nan"))]).plan
    assert unchecked.most < np.inf


def test_rows_are_places_and_the_table_does_not_change():
    rows = RowTable(codecs.affine(4), 5, 0, NO_SLOTS)
    decided = decide(ca2fl(buffer_size=2, codec="affine-4"), [arrival(9, "b", 0), arrival(7, "a", 1)], rows=rows)
    assert (decided.plan.rows.reads, decided.plan.rows.writes, decided.plan.rows.high) == ([None, None], [0, 1], 2)
    assert (decided.moves.slots, len(rows)) == ({7: 0, 9: 1}, 0)
    assert [each.key for each in decided.plan.rows.facts] != [0, 0]


def test_inner_products_are_calls_of_the_plane():
    plane = NoVectors(a=1.0, b=2.0)
    decided = decide(wkafl(buffer_size=2), [arrival(9, "b", 0), arrival(7, "a", 1)], plane)
    assert plane.calls
    assert all(slots == ["a", "b"] for slots, _ in plane.calls)
    assert {memory for _, memory in plane.calls} <= {None, "the estimate"}
    assert decided.plan.rule_vectors == ("estimate",)
    assert decided.plan.next is not None


def test_a_sum_has_its_factor_and_the_terms_that_are_left():
    rule, total = fedbuff(buffer_size=2), ["the sum"]
    known = [term_of(rule, total, place, (0, 1, 1.0, ()), slot) for place, slot in ((0, None), (1, "b"))]
    decided = decide(rule, [arrival(9, known[0], 0), arrival(7, known[1], 1)])
    plan = decided.plan
    assert plan.slots is total
    assert decided.terms == [known[1]]
    assert plan.weights.tolist() == [0.5 / known[0].weight]
