"""Facts of arrivals: numbers that clients push, from the push to the rule, the log, a replay, a state and a store."""

from dataclasses import replace
from fractions import Fraction
from math import inf, nan
from types import MappingProxyType

import numpy as np
import pytest

import oracle
from afflux import Needs, Rule, Server, replay
from afflux.rules import ca2fl, fedadam, fedavg, fedbuff, gsgm, twafl, weights
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.staleness import Polynomial
from conftest import bits, check_error
from inside import aggregator_of, slots_taken

ONES = np.ones(3)
NAMES = ("tokens", "quality")


class Seen:
    """A weigh part that keeps the arrivals of each round."""

    def __init__(self, needs=()):
        self.needs, self.rounds, self.calls = Needs(facts=needs), [], []

    def __call__(self, arrivals, /):
        self.rounds.append(arrivals)
        return np.full(len(arrivals), 1 / len(arrivals))

    def on_arrival(self, staleness, num_examples, norm, *facts):
        self.calls.append(facts)
        return 1.0

    def factor(self, arrivals):
        return 1 / len(arrivals)


def seen(needs=(), size=2):
    return Rule("seen", "update", size, Seen(needs), NONE, Sgd(1.0))


def given(size=2, **fields):
    return replace(fedbuff(buffer_size=size), weigh=weights.Given("quality"), **fields)


def push(server, client, facts=None, **arguments):
    return server.push(client=client, version=server.version, update=ONES * (client + 1), facts=facts, **arguments)


def refused(server, message, facts, **arguments):
    """The push raises an error, and changes nothing but the count of refused pushes."""
    before = server.arrivals_waiting, server.joins, server.params.tolist()
    check_error(message, push, server, 7, facts, **arguments)
    assert (server.arrivals_waiting, server.joins, server.params.tolist()) == before
    assert slots_taken(server) == aggregator_of(server).admission.slots_held


# What a rule reads


def test_a_rule_reads_the_facts_in_canonical_order():
    server = Server(seen(("tokens",), 3), ONES, facts=("quality",))
    push(server, 2, {"tokens": np.float32(8192), "quality": 0.5}, local_steps=4)
    push(server, 1, MappingProxyType({"tokens": 7}))
    push(server, 0, {"quality": -0.0, "tokens": 1e-320}, local_steps=np.int16(5))
    (arrivals,) = server.rule.weigh.rounds
    assert list(arrivals.facts) == ["tokens", "quality"]
    assert arrivals.facts["tokens"].tolist() == [1e-320, 7.0, 8192.0]
    assert str(arrivals.facts["quality"].tolist()) == "[-0.0, nan, 0.5]"
    assert arrivals.local_steps.tolist() == [5, 0, 4]
    assert {(own.dtype, own.flags.writeable) for own in arrivals.facts.values()} == {(np.dtype(float), False)}
    assert arrivals.local_steps.dtype == np.int64
    assert not arrivals.local_steps.flags.writeable


def test_without_names_there_are_no_facts():
    server = Server(seen(), ONES)
    for client in range(2):
        push(server, client, {} if client else None)
    assert server.rule.weigh.rounds[0].facts == {}
    assert server.rule.weigh.rounds[0].local_steps.tolist() == [0, 0]


def test_streaming_gets_the_facts_of_an_arrival():
    """As a fourth argument of on_arrival, if the part needs facts."""
    for needs, calls in (((), [(), ()]), (("tokens",), [({"tokens": 1.0},), ({"quality": 2.0, "tokens": 3.0},)])):
        server = Server(seen(needs), ONES, accumulate=True, facts=NAMES)
        push(server, 0, {"tokens": 1.0})
        push(server, 1, {"tokens": 3.0, "quality": 2.0})
        assert server.rule.weigh.calls == calls


def test_arrivals_that_are_left_keep_their_facts():
    """A round without an arrival of an unusable weight."""

    class Divides(Seen):
        def __call__(self, arrivals, /):
            super().__call__(arrivals)
            with np.errstate(divide="ignore"):
                return 1 / arrivals.facts["tokens"]

    server = Server(replace(seen(size=3), weigh=Divides(("tokens",))), ONES)
    for client, tokens in enumerate((0.0, 2.0, 4.0)):
        receipt = push(server, client, {"tokens": tokens}, local_steps=client + 1)
    assert receipt.report.weights.tolist() == [0.0, 0.5, 0.25]
    assert server.rule.weigh.rounds[-1].facts["tokens"].tolist() == [2.0, 4.0]
    assert server.rule.weigh.rounds[-1].local_steps.tolist() == [2, 3]


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_fact_num_examples_replaces_the_number_of_examples(accumulate):
    by_examples = replace(fedbuff(buffer_size=3), weigh=weights.Staleness(Polynomial(0.5), by_examples=True))
    for rule in (fedavg(buffer_size=3), by_examples):
        server = Server(rule, ONES, facts=("num_examples",), accumulate=accumulate)
        for client, share in enumerate((0.25, 0.5)):
            push(server, client, {"num_examples": share})
        receipt = push(server, 2, num_examples=2)  # a whole number needs no fact
        counted = Server(rule, ONES, accumulate=accumulate)
        for client, count in enumerate((1, 2, 8)):
            expected = push(counted, client, num_examples=count)
        assert receipt.report.weights.tolist() == expected.report.weights.tolist()
        assert bits(server.params) == bits(counted.params)


def test_a_rule_of_ones_own_reads_replaced_numbers_of_examples():
    server = Server(seen(), ONES, facts=("num_examples", "tokens"), log=True)
    for facts in ({"num_examples": 0.25}, {"tokens": 3.0}):
        push(server, 1, facts, num_examples=7)
    push(server, 1, num_examples=2**62 + 1)
    push(server, 2, num_examples=3)
    first, second = server.rule.weigh.rounds
    assert first.num_examples.tolist() == [0.25, 7.0]
    assert not first.num_examples.flags.writeable
    assert second.num_examples.tolist() == [2**62 + 1, 3]  # integers, if no arrival has the fact
    again = Server(seen(), ONES, facts=("num_examples", "tokens"))
    replay(server.log, again, lambda join: ONES * (join.client_id + 1))
    assert bits(again.params) == bits(server.params)
    assert again.rule.weigh.rounds[0].num_examples.tolist() == [0.25, 7.0]


# What is refused


@pytest.mark.parametrize("value", [0.0, -0.25, 1e-320, 1e151])
def test_a_replaced_number_of_examples_is_a_weight(value):
    server = Server(fedavg(buffer_size=2), ONES, facts=("num_examples",))
    refused(server, r"client 7's num_examples is .*, must be from 1e-150 to 1e\+150", {"num_examples": value})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (None, r"^\[push\] client 7's facts lack 'tokens', by which seen weighs"),
        ({"quality": 1.0}, "client 7's facts lack 'tokens'"),
        ({"tokens": 1.0, "token": 1.0}, r"'token', which neither seen nor Server\(facts=...\) lists; did you mean 't"),
        ({"tokens": 1.0, 3: 1.0}, "client 7's facts have 3, which neither"),
        ({"tokens": nan}, "client 7's tokens is nan, must be finite"),
        ({"tokens": inf}, "client 7's tokens is inf, must be finite"),
        ({"tokens": 10**400}, "client 7's tokens is .*, must be finite"),
        ({"tokens": True}, "client 7's tokens is True, must be a number"),
        ({"tokens": "8"}, "client 7's tokens is '8', must be a number"),
        ({"tokens": None}, "client 7's tokens is None, must be a number"),
        ([("tokens", 1.0)], r"client 7's facts are \[.*, must be numbers by name"),
        (3.0, "client 7's facts are 3.0, must be numbers by name"),
    ],
)
def test_a_push_of_wrong_facts(facts, message):
    for accumulate in (False, True):
        server = Server(seen(("tokens",)), ONES, facts=("quality",), accumulate=accumulate)
        push(server, 0, {"tokens": 1.0})
        refused(server, message, facts)
    server = Server(seen(("tokens",)), ONES, facts=("quality",), faults="record")
    receipt = push(server, 7, facts)
    assert receipt.status == "faulty"
    assert server.faults[0].client_id == 7


def test_a_plain_push_never_passes_a_rule_that_needs_a_fact():
    """Nor does one with a task."""
    server = Server(seen(("tokens",), 3), np.ones(3, np.float32))
    task = server.checkout(7)
    update = np.ones(3, np.float32)
    for arguments in ({"client": 7, "version": 0}, {"task": task}):
        check_error("client 7's facts lack 'tokens'", server.push, update=update, **arguments)
    assert (server.arrivals_waiting, server.counts["refused"]) == (0, 2)
    assert server.push(update=update, task=task, facts={"tokens": 1.0}).status == "joined"


@pytest.mark.parametrize("steps", [0, -1, 2**53, 2**63, 1.5, "3", True])
def test_a_push_of_wrong_local_steps(steps):
    refused(Server(seen(), ONES), "client 7's local_steps is ", None, local_steps=steps)


@pytest.mark.parametrize(
    "names", ["tokens", ("a", "a"), ("",), ("a" * 65,), ("a\n",), ("\ud800",), (3,), tuple(map(str, range(17))), {"a"}]
)
def test_wrong_names(names):
    message = "must be at most 16 different names, each a str of 1 to 64 printable characters"
    check_error(rf"\[Server\] facts is .*, {message}", Server, fedbuff(), ONES, facts=names)
    check_error(rf"\[Rule\] needs.facts is .*, {message}", seen, names)


def test_the_rule_and_the_options_have_16_names_together():
    names = tuple(map(str, range(16)))
    assert Server(seen(names), ONES, facts=names).options.facts == names
    check_error("must be at most 16 different names", Server, seen(("more",)), ONES, facts=names)


def test_a_rule_that_needs_other_facts_cannot_replace_one():
    server = Server(given(), ONES)
    check_error(r"facts is \['quality'\] of the rule in force, \[\] of", server.replace_rule, fedbuff(buffer_size=2))
    assert server.replace_rule(given(3))


# Weights of the caller's own


def test_given_weights_are_the_facts_divided_by_their_sum(rng):
    """Beside the same in exact arithmetic; the step beside the oracle's."""
    for _ in range(20):
        size = int(rng.integers(1, 6))
        server = Server(given(size), np.zeros(3), dtype="float64")
        facts = rng.choice([0.0, 1e-150, 1e150, 0.1, *rng.uniform(0, 100, 4)], size)
        facts[0] = facts[0] or 3.0
        updates = rng.standard_normal((size, 3))
        for client in range(size):
            server.push(client=client, version=0, update=updates[client], facts={"quality": facts[client]})
        total = sum(map(Fraction, facts))
        assert server.version == 1
        direction = sum(w * u for w, u in zip([float(Fraction(q) / total) for q in facts], updates, strict=True))
        bound = (2 * size + 4) * oracle.EPS * np.abs(updates).sum(0)
        assert np.all(np.abs(server.params - direction) <= bound)


def test_given_weights_of_a_round():
    server = Server(given(3), np.zeros(3))
    for client, quality in enumerate((1.0, 0.0, 3.0)):
        receipt = push(server, client, {"quality": quality})
    assert receipt.report.weights.tolist() == [0.25, 0.0, 0.75]
    assert receipt.report.rejected == ("", "weight 0", "")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("value", [-1.0, 1e-151, 1e151])
def test_given_weights_out_of_range_are_rejected(value, accumulate):
    server = Server(given(), np.zeros(3), accumulate=accumulate)
    push(server, 0, {"quality": 2.0})
    report = push(server, 1, {"quality": value}).report
    assert report.weights.tolist() == [1.0, 0.0]
    assert report.rejected == ("", f"quality is {value:g}, must be 0, or from 1e-150 to 1e+150")
    assert server.params.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_round_without_a_positive_weight_is_skipped(accumulate):
    server = Server(given(), np.zeros(3), accumulate=accumulate)
    for client, value in enumerate((0.0, -1.0)):
        receipt = push(server, client, {"quality": value})
    assert (receipt.report.stepped, server.version, server.arrivals_waiting) == (False, 0, 0)
    assert receipt.report.rejected == tuple(
        f"quality is {value}, and no arrival has a positive one" for value in (0, -1)
    )
    for client in range(2):
        push(server, client, {"quality": 1.0})
    assert (server.version, server.params.tolist()) == (1, [1.5, 1.5, 1.5])


def test_given_weights_stream(rng):
    """Within the bound that Server states."""
    buffered, streamed = (Server(given(5), np.zeros(3), dtype="float64", accumulate=on) for on in (False, True))
    for client in range(10):
        facts = {"quality": float(rng.choice([0.0, 1e-3, 7.0, 1e9]))} if client % 5 else {"quality": 1.0}
        vector = rng.standard_normal(3)
        for server in (buffered, streamed):
            server.push(client=client, version=server.version, update=vector, facts=facts)
    assert buffered.version == streamed.version == 2
    assert np.all(np.abs(buffered.params - streamed.params) <= 2 * 4 * 10 * oracle.EPS * 20)


@pytest.mark.parametrize("rule", [ca2fl, fedadam, gsgm, twafl])
def test_given_weights_combine_with_other_parts(rule):
    own = replace(rule(buffer_size=2), weigh=weights.Given("quality"))
    server = Server(own, np.zeros(3), num_clients=5)
    for client, quality in enumerate((0.0, 2.0, 1.0, 3.0)):
        receipt = server.push(client=client, version=server.version, facts={"quality": quality}, **{own.kind: ONES})
    assert (server.version, receipt.report.weights.tolist()) == (2, [0.25, 0.75])


# Log, replay, state and store


def some_pushes(server):
    pushes = [({"quality": 0.1}, None), ({"quality": 2.0, "tokens": 5e-324}, 7)]
    pushes += [({"quality": 3.0}, 1), ({"quality": 1e9}, None)]
    for client, (facts, steps) in enumerate(pushes):
        push(server, client, facts, local_steps=steps)


def test_the_log_has_the_facts_and_a_replay_repeats_them():
    first, second = (Server(given(3), ONES, log=True, facts=("tokens",)) for _ in range(2))
    some_pushes(first)
    joins = [(entry.facts, entry.local_steps) for entry in first.log]
    assert joins[:2] == [((("quality", 0.1),), 0), ((("quality", 2.0), ("tokens", 5e-324)), 7)]
    again = replay(first.log, second, lambda join: ONES * (join.client_id + 1))
    assert bits(again.params) == bits(first.params)
    assert again.log == first.log
    check_error("'tokens', which neither", replay, first.log, Server(given(3), ONES), lambda join: ONES)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_state_with_other_facts_is_refused(accumulate):
    first, second = (Server(given(5), ONES, log=True, facts=("tokens",), accumulate=accumulate) for _ in range(2))
    some_pushes(first)
    state = first.state_dict()
    for damage, message in (
        (lambda record: record[:-2], "arrival 1 lacks the fact 'quality', by which fedbuff weighs"),
        (lambda record: record[:-1], "the state is damaged"),
        (lambda record: [*record[:-1], {"quality": inf}], "inf is not a finite number"),
        (lambda record: [*record[:-1], {"quality": 1.0, "num_examples": 0.0}], "num_examples is 0.0, must be from 1e-"),
        (lambda record: [*record[:-1], {"quality": "x"}], "'x' is not a finite number"),
        (lambda record: [*record[:-1], [1.0]], r"facts are \[1.0\], must be numbers by name"),
        (lambda record: [*record[:-1], dict.fromkeys(map(str, range(17)), 1.0)], "at most 16 different names"),
        (lambda record: [*record[:-2], -1, {"quality": 1.0}], "-1 is not a count"),
    ):
        waiting = [damage(record) if i == 1 else record for i, record in enumerate(state["meta"]["waiting"])]
        check_error(message, second.load_state_dict, {**state, "meta": {**state["meta"], "waiting": waiting}})
