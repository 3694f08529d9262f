"""Arrivals.inner: ops.inner over a round's vectors, for rules that need it and as long as they decide."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from afflux import Server, ops
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Needs, Rule, Weights
from conftest import check_error, push_all

D = 300


@dataclass(frozen=True)
class Asking:
    """A weigh part that does something with the arrivals."""

    do: object
    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("goal",), handed_in=("goal",))

    def __call__(self, arrivals):
        self.do(arrivals)
        return Weights(np.full(len(arrivals), 1 / len(arrivals)))


@dataclass(frozen=True)
class Needless(Asking):
    """The same without the need."""

    needs: ClassVar[Needs] = Needs()


def served(part, vectors, **options):
    """A server whose buffer these vectors fill, and the error that a push raises."""
    server = Server(Rule("asking", "gradient", len(vectors), part, NONE, Sgd(1.0)), np.zeros(D, np.float32), **options)
    if part.needs.handed_in:
        server.set_rule_vector("goal", np.linspace(-1, 1, D))
    push_all(server, range(len(vectors)), vectors.__getitem__, version=0)
    return server


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_ops_inner(rng, threads):
    vectors, found = rng.standard_normal((3, D)).astype(np.float32), []
    weights = np.array([0.5, -1.0, 0.25])

    def ask(arrivals):
        found.append(arrivals.inner())
        found.append(arrivals.inner(weights, rule_vector="goal", shift=0.5))
        found.append(arrivals.inner(rule_vector="goal", own_weight=1.0))

    served(Asking(ask), vectors, num_threads=threads)
    goal = np.linspace(-1, 1, D).astype(np.float32)
    expected = [
        ops.inner(vectors),
        ops.inner(vectors, weights, memory=goal, shift=0.5),
        ops.inner(vectors, np.zeros(3), memory=goal, memory_weight=1.0),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert [np.asarray(x).tolist() for x in ours] == [np.asarray(x).tolist() for x in theirs]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Asking(lambda a: a.inner(rule_vector="aim", shift=1.0)), "inner has no rule vector 'aim': it has goal"),
        (Asking(lambda a: a.inner(np.ones(3))), r"\[inner\] weights has 3 entries, expected 2, one for each vector"),
        (Asking(lambda a: a.inner(shift=1.0)), "inner has rule_vector None, shift 1.0 and own_weight 0.0"),
        (Asking(lambda a: a.inner(rule_vector="goal")), "inner has rule_vector 'goal', shift 0.0 and own_weight 0.0"),
        (Asking(lambda a: a.inner(rule_vector=["goal"])), r"\[Arrivals\] inner has no rule vector \['goal'\]"),
        (Asking(lambda a: a.inner(["a", "b"])), r"\[Arrivals\] weights of inner"),
        (Asking(lambda a: a.inner(np.array([1j, 2]))), r"\[Arrivals\] weights of inner"),
        (Asking(lambda a: a.inner(np.ma.array([1.0, 2.0], mask=[0, 1]))), r"\[Arrivals\] weights of inner"),
        (Needless(lambda a: a.inner()), r"\[Arrivals\] inner is for rules whose weigh part has needs = Needs\(inner"),
    ],
)
def test_wrong_questions_raise(rng, part, message):
    check_error(message, served, part, rng.standard_normal((2, D)))


def test_a_decided_round_is_closed(rng):
    kept = []
    served(Asking(kept.append), rng.standard_normal((2, D)))
    check_error("the round is decided, and its vectors are reused", kept[0].inner)


def test_a_rule_that_fails_gives_its_vectors_back(rng):
    kept = []

    def fail(arrivals):
        kept.append(arrivals)
        if len(kept) == 1:
            raise ValueError("once")

    server = Server(Rule("asking", "gradient", 2, Asking(fail), NONE, Sgd(1.0)), np.zeros(D, np.float32), max_slots=2)
    server.set_rule_vector("goal", np.ones(D))
    server.push(client=0, version=0, gradient=rng.standard_normal(D))
    check_error("once", server.push, client=1, version=0, gradient=rng.standard_normal(D), error=ValueError)
    check_error("the round is decided", kept[0].inner)
    server.flush()
    push_all(server, range(4), lambda _: rng.standard_normal(D), timeout=0)
    assert server.version == 3


def test_vectors_are_not_streamed(rng):
    server = served(Asking(lambda arrivals: None), rng.standard_normal((2, D)))
    check_error("come from the inner products of a full buffer", Server, server.rule, np.zeros(D), accumulate=True)


def test_models_have_no_inner_products():
    message = "inner products and rule vectors are of updates or gradients, not of models"
    check_error(message, Rule, "asking", "model", 2, Asking(print), NONE, Sgd(1.0))
