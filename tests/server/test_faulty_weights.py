"""A client's value fails no round: arrivals with weights that are not finite, or too large, are rejected."""

from itertools import chain

import numpy as np
import pytest

from afflux import AffluxError, Needs, Rule, Server, Weights, replay
from afflux.rules import RULES, fedbuff, optimizers, wkafl, zenopp
from afflux.rules.calibration import CACHED_DIFFERENCE, CACHED_MEAN, NONE
from afflux.rules.presets.dialects import DIALECTS
from afflux.rules.presets.gsgm import GradientScheduling
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.staleness import Constant, Exponential
from afflux.rules.weights import Examples, Staleness, Uniform
from checked_out import D, vector
from conftest import bits, check_error, push_all, ready
from pairwise import soak
from steps import STEPS

COUNTS = Staleness(Constant(), None, by_examples=True)


def scored(size, **options):
    rule = Rule("own", "gradient", size, ScoreTest(), NONE, optimizers.Sgd(0.5))
    server = Server(rule, vector(0.0), num_clients=9, **options)
    server.set_rule_vector("validation", vector(1.0))
    return server


@pytest.mark.parametrize("faults", ["raise", "record"])
def test_a_tiny_gradient_is_rejected_and_the_others_are_weighed_again(faults):
    server, twin = scored(3, faults=faults), scored(2)
    for each in (server, twin):
        each.push(client=2, version=0, gradient=vector(2.0))
    server.push(client=1, version=0, gradient=vector(1e-25))
    for each in (server, twin):
        receipt = each.push(client=3, version=0, gradient=vector(4.0), num_examples=3)
        if each is server:
            report = receipt.report
    assert bits(server.params) == bits(twin.params)
    assert server.params.tolist() == [-0.5] * D
    assert report.weights.tolist() == [0.0, 0.25, 0.125]
    assert report.rejected == ("weight 3.33e+24, with which elements of magnitude 1e+15 could overflow", "", "")
    assert (server.version, server.arrivals_waiting) == (1, 0)


def test_a_rule_of_single_arrivals_rejects_this_one_and_goes_on():
    server = Server(zenopp(), vector(0.0), faults="record")
    server.set_rule_vector("validation", vector(1.0))
    report = server.push(client="ann", version=0, gradient=vector(1e-25)).report
    assert (report.stepped, report.version, report.weights.tolist()) == (False, 0, [0.0])
    assert report.rejected[0].startswith("weight 1e+25, with which")
    assert server.push(client="bob", version=0, gradient=vector(1.0)).version == 1


class Inverse:
    """Weights 1 / norm; a rule vector that sums the directions; and the number of accepted arrivals."""

    needs = Needs(gram=True, rule_vectors=("sum",), scalars={"accepted": 0.0})

    def __call__(self, arrivals):
        squares = np.diagonal(arrivals.gram)[1:]
        with np.errstate(divide="ignore"):
            weights = 1.0 / np.sqrt(squares)
        count = len(arrivals)
        scalars = {"accepted": arrivals.scalars["accepted"] + count}
        return Weights(weights, (0.5,), np.array([[1.0, *weights]]), scalars, cosines=np.ones(count))


@pytest.mark.parametrize("calibrate", [NONE, CACHED_DIFFERENCE])
def test_rule_vectors_scalars_and_rows_are_those_without_the_arrival(calibrate):
    def serve(size):
        rule = Rule("own", "update", size, Inverse(), calibrate, optimizers.Momentum(0.25, 0.5))
        return Server(rule, vector(0.0), num_clients=9)

    server, twin = serve(4), serve(3)
    for turn in range(4):
        for client, value in enumerate((0.0, 1.0, -2.0, 3.0)):
            for each in (server, twin):
                if each is server or value:
                    receipt = each.push(client=client, version=turn, update=vector(value * (turn + 1)))
                    if each is server:
                        report = receipt.report
        assert report.rejected == ("weight inf, must be finite", "", "", "")
        assert np.isnan(report.cosines).tolist() == [True, False, False, False]
    assert bits(server.params) == bits(twin.params)
    assert server.scalars == twin.scalars == {"accepted": 12.0}
    for name, each in twin.rule_vectors.items():
        assert bits(server.rule_vectors[name]) == bits(each)
    if calibrate.cached:
        assert list(server.rows.client_ids) == list(twin.rows.client_ids) == [1, 2, 3]


def test_one_share_too_large_is_enough_and_no_other_arrival_is_rejected():
    """Two clients whose weights are only together too large: both are."""
    server = Server(Rule("own", "update", 3, COUNTS, NONE, optimizers.Sgd(1.0)), vector(0.0))
    limit = 3.4e38 / (2e15 * 1e6)
    for client, examples in enumerate((int(limit * 0.6), 1, int(limit * 0.6))):
        receipt = server.push(client=client, version=0, update=vector(1.0), num_examples=examples)
    assert [why[:10] for why in receipt.report.rejected] == ["weight 1.0", "", "weight 1.0"]
    assert server.params.tolist() == [1.0] * D


def test_the_log_replays_to_the_same_bits():
    server = scored(3, log=True)
    values = [1e-25 if i % 4 == 0 else float(i) for i in range(12)]
    for i, value in enumerate(values):
        server.push(client=i % 5, version=server.version, gradient=vector(value))
    new = Server(server.rule, vector(0.0), num_clients=9)
    again = replay(server.log, new, lambda join: vector(values[join.number]), rule_vector=lambda _: vector(1.0))
    assert bits(again.params) == bits(server.params)
    assert again.params.any()


@pytest.mark.parametrize("weigh", [lambda arrivals: np.array([1.0, np.nan]), lambda arrivals: np.full(2, 1e30)])
def test_numbers_that_no_client_has_caused_are_an_error(weigh):
    """They raise also if only one arrival has such a weight: it would have it whatever it sends."""
    server = Server(Rule("own", "update", 2, weigh, NONE, optimizers.Sgd(1.0)), vector(0.0))
    server.push(client=0, version=0, update=vector(1.0))
    for _ in range(2):
        with pytest.raises(AffluxError, match=r"weigh gave client 1 the weight nan|could overflow: make"):
            server.push(client=1, version=0, update=vector(1.0), num_examples=2**62)
    assert (server.version, server.arrivals_waiting) == (0, 1)


def test_an_own_part_that_cannot_weigh_equal_arrivals():
    """Its error then does not say that the rule is at fault."""

    def weigh(arrivals):
        if arrivals.num_examples.tolist() == [1, 1]:
            raise RuntimeError("equal")
        return np.array([float(n) for n in arrivals.num_examples.tolist()])

    server = Server(Rule("own", "update", 2, weigh, NONE, optimizers.Sgd(1.0)), vector(0.0))
    server.push(client=0, version=0, update=vector(1.0), num_examples=2)
    report = server.push(client=1, version=0, update=vector(1.0), num_examples=2**62).report
    assert report.rejected[0] == ""
    assert report.rejected[1].startswith("weight 4.61e+18")


def test_a_rule_that_reads_losses_rejects_an_arrival_without_one():
    """Unless no client has sent one: then the rule lacks it."""
    by_loss = Rule("own", "update", 2, lambda arrivals: 1 / np.array(arrivals.losses), NONE, optimizers.Sgd(1.0))
    server = Server(by_loss, vector(0.0))
    server.push(client=0, version=0, update=vector(9.0))
    report = server.push(client=1, version=0, update=vector(1.0), loss=2.0).report
    assert report.rejected == ("weight nan, must be finite", "")
    assert server.params.tolist() == [0.5] * D
    server.push(client=0, version=1, update=vector(9.0))
    check_error("weigh gave client 0 the weight nan", server.push, client=1, version=1, update=vector(1.0))
    assert (server.version, server.discard()) == (1, 1)


def test_a_loss_too_large_for_a_weight():
    server = Server(Rule("own", "update", 2, lambda a: np.array(a.losses), NONE, optimizers.Sgd(1.0)), vector(0.0))
    server.push(client=0, version=0, update=vector(1.0), loss=1e30)
    report = server.push(client=1, version=0, update=vector(1.0), loss=0.5).report
    assert (report.rejected[0][:12], report.rejected[1]) == ("weight 1e+30", "")
    assert server.params.tolist() == [0.5] * D


def test_a_sum_cannot_lose_an_arrival():
    """With accumulate=True its weight is an error, as before, and the waiting arrivals can be discarded."""
    rule = Rule("own", "update", 2, COUNTS, NONE, optimizers.Sgd(1.0))
    server = Server(rule, vector(0.0), accumulate=True)
    server.push(client=0, version=0, update=vector(1.0), num_examples=2**62)
    check_error("could overflow", server.push, client=1, version=0, update=vector(1.0))
    assert server.discard() == 1
    push_all(server, (0, 1), vector(1.0), version=0)
    assert server.params.tolist() == [2.0] * D


WEIGHS = {
    "uniform": Uniform(),
    "examples": Examples(),
    "counts": COUNTS,
    "exponential": Staleness(Exponential(), "weights", by_examples=True),
    "selection": CosineSelection(),
    "stage two": CosineSelection(stage_two_loss=0.0, memory="aggregate"),
    "scheduling": GradientScheduling(),
    "score": ScoreTest(),
    "unscaled score": ScoreTest(scaled=False),
}


def composed(weigh, calibrate, step):
    return Rule("own", "gradient", 3, WEIGHS[weigh], calibrate, STEPS[step](0.1))


def preset(name):
    return RULES[name](buffer_size=3) if "buffer_size" in RULES[name].__annotations__ else RULES[name]()


EACH = {
    **{name: lambda name=name: preset(name) for name in RULES},
    **{f"fedbuff {name}": lambda name=name: fedbuff(buffer_size=3, dialect=name) for name in DIALECTS},
    "wkafl without momentum": lambda: wkafl(buffer_size=3, momentum=False, staleness=False),
    **{
        f"{weigh} {step} {calibrate.direction if calibrate.cached else 'none'}": (
            lambda weigh=weigh, calibrate=calibrate, step=step: composed(weigh, calibrate, step)
        )
        for weigh in WEIGHS
        for step in STEPS
        for calibrate in (NONE, CACHED_DIFFERENCE, CACHED_MEAN)
    },
}
NOW = [name for name in EACH if name.endswith(("sgd none", "adagrad difference")) or name.count(" ") < 2]
EXAMPLES, LOSSES = (1, 2**63 - 1), (None, 0.0, -1e308, 1e308)


@pytest.mark.parametrize("name", [*NOW, *chain.from_iterable(soak(each) for each in EACH if each not in NOW)])
def test_no_value_of_a_client_fails_a_round(name):
    """One client of three, then all, with each magnitude, number of examples and loss; then honest rounds move."""
    rule = EACH[name]()
    server = Server(rule, vector(0.0), num_clients=9, faults="record")
    ready(server, vector(1.0))
    turn = 0

    def push(client, value, **facts):
        receipt = server.push(client=client, version=server.version, **{rule.kind: vector(value)}, **facts)
        assert receipt.status != "faulty", receipt.reason

    for magnitude in (1e-44, 1e-25, 1e-10, 1.0, 1e8, 9e14):
        for examples in EXAMPLES:
            for loss in LOSSES:
                for others in (1.0, magnitude):
                    turn += 1
                    sign = 1 if turn % 3 else -1
                    push(turn * 3 % 9, sign * magnitude, num_examples=examples, loss=loss)
                    push((turn * 3 + 1) % 9, others, loss=1.0)
                    push((turn * 3 + 2) % 9, others, loss=1.0)
    assert np.isfinite(server.params).all()
    version = server.version
    for client in range(9):
        push(client, 1.0, loss=1.0)
    assert server.version > version


def test_no_value_of_a_client_fails_a_round_of_a_sum():
    """With accumulate=True, each preset that streams: the least and the largest values, counts and losses."""
    streamed = set()
    for name, preset in RULES.items():
        rule = preset() if name in ("fedasync", "zenopp") else preset(buffer_size=2)
        try:
            server = Server(rule, vector(0.0), num_clients=9, accumulate=True)
        except AffluxError:
            continue
        streamed.add(name)
        for value in (1e-44, 1e-25, 1.0, -9e14):
            for examples in EXAMPLES:
                for loss in LOSSES:
                    facts = {"num_examples": examples, "loss": loss}
                    server.push(client=0, version=server.version, **{rule.kind: vector(value)}, **facts)
                    server.push(client=1, version=server.version, **{rule.kind: vector(1.0)})
        assert np.isfinite(server.params).all()
        assert server.version >= 32
    assert len(streamed) == 14
