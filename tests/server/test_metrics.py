"""Report.metrics: the numbers of a report under names that do not change."""

import json
import math

import numpy as np
import pytest
from msgspec.structs import replace

from afflux import Rule, Server, Weights
from afflux.rules import RULES, afa_cs, fedbuff, wkafl
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from conftest import push_all, ready
from own_parts import Says

D, M = 6, 3
KEYS = [
    *("version", "stepped", "arrivals", "rejected", "clipped", "staleness_mean", "staleness_max", "weight_min"),
    *("weight_max", "effective_arrivals", "norm_mean", "norm_max", "server_lr", "seconds", "bytes"),
]


def gives(*weights, skip=False):
    """A weigh part with fixed weights; with `skip` the round makes no step."""
    return Says(Weights(np.array(weights), skip=skip))


def report_of(weigh, values=(1.0, 2.0, 2.0), **options):
    server = Server(Rule("own", "update", len(values), weigh, NONE, Sgd(0.25)), np.zeros(D, np.float32), **options)
    return push_all(server, range(len(values)), lambda client: np.full(D, values[client], np.float32), version=0).report


def test_all_numbers_of_one_step():
    report = report_of(gives(0.5, 0.0, 0.25))
    metrics = report.metrics()
    assert metrics == {
        "version": 1,
        "stepped": 1,
        "arrivals": 3,
        "rejected": 1,
        "clipped": 0,
        "staleness_mean": 0,
        "staleness_max": 0,
        "weight_min": 0.0,
        "weight_max": 0.5,
        "effective_arrivals": pytest.approx(0.75**2 / (0.25 + 0.0625)),
        "norm_mean": pytest.approx(5 / 3 * math.sqrt(D)),
        "norm_max": pytest.approx(2 * math.sqrt(D)),
        "server_lr": 0.25,
        "seconds": report.seconds,
        "bytes": 3 * D * 4,
    }
    assert [*metrics] == KEYS


def test_staleness_over_the_arrivals():
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32))
    receipt = push_all(server, range(4), np.ones(D, np.float32), version=lambda client: 0 if client < 3 else 1)
    metrics = receipt.report.metrics()
    assert (metrics["staleness_mean"], metrics["staleness_max"], metrics["version"]) == (0.5, 1.0, 2.0)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_these_names_and_plain_floats(name):
    rule = RULES[name]() if name in ("zenopp", "fedasync") else RULES[name](buffer_size=2)
    server = ready(Server(rule, np.zeros(D, np.float32), num_clients=9))
    found = []
    for client in range(8):
        vector = np.random.default_rng(client).standard_normal(D)
        receipt = server.push(client=client, **{rule.kind: vector}, version=server.version, loss=0.5)
        found += [] if receipt.report is None else [receipt.report.metrics()]
    for metrics in found:
        assert [*metrics] == [*KEYS, *(f"rule/{number}" for number in server.scalars)]
        assert all(type(value) is float for value in metrics.values())
        json.dumps(metrics, allow_nan=False)
    assert found


def test_a_rules_own_numbers_have_a_prefix():
    server = Server(wkafl(buffer_size=1), np.zeros(D, np.float32))
    report = server.push(client=0, gradient=np.ones(D), version=0, loss=2.0).report
    assert (
        {name: value for name, value in report.metrics().items() if "/" in name}
        == {f"rule/{name}": value for name, value in server.scalars.items()}
        != {}
    )


def test_a_step_that_the_rule_skips():
    metrics = report_of(gives(0.0, 0.0, 0.0, skip=True)).metrics()
    assert (metrics["version"], metrics["stepped"], metrics["rejected"]) == (0.0, 0.0, 3.0)
    assert (metrics["effective_arrivals"], metrics["weight_max"]) == (0.0, 0.0)


def test_norms_that_are_not_known_are_left_out():
    """Those of vectors that a step reads in place."""
    server = Server(fedbuff(), np.zeros(D, np.float32))
    server.push(client=1, update=np.full(D, 2.0, np.float32), version=0)
    metrics = server.step([(0, 0, np.ones(D, np.float32))])[1].metrics()
    assert metrics["norm_mean"] == metrics["norm_max"] == pytest.approx(2 * math.sqrt(D))
    metrics = server.step([(client, 1, np.ones(D, np.float32)) for client in range(2)])[1].metrics()
    assert math.isnan(metrics["norm_mean"])
    assert math.isnan(metrics["norm_max"])


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_no_number_overflows_or_vanishes(scale):
    report = replace(report_of(gives(1.0, 1.0, 1.0)), weights=np.full(3, scale))
    assert report.metrics()["effective_arrivals"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, 4), ({"slot_dtype": "bfloat16"}, 2), ({"dtype": "float64"}, 8), ({"accumulate": True}, 4)],
)
def test_bytes_of_the_vectors_that_went_in(options, size):
    server = Server(fedbuff(buffer_size=M), np.zeros(D, np.float32), **options)
    push_all(server, range(2), np.ones(D, np.float32), version=0)
    report = server.flush()
    assert report.nbytes == report.metrics()["bytes"] == 2 * D * size


def test_rows_do_not_count():
    server = Server(afa_cs(buffer_size=1), np.zeros(D, np.float32), num_clients=5)
    assert server.push(client=0, gradient=np.ones(D, np.float32), version=0).report.nbytes == 4 * D


@pytest.mark.parametrize(("skip", "stepped"), [(False, True), (True, False)], ids=["weights of 0", "skipped"])
def test_a_round_that_rejects_all_arrivals(skip, stepped):
    """The version grows if and only if `stepped`; params do not change."""
    weigh = gives(0.0, 0.0, skip=skip)
    server = Server(Rule("own", "update", 2, weigh, NONE, Sgd(0.25)), np.ones(D, np.float32))
    receipt = push_all(server, range(2), lambda client: np.full(D, 1.0 + client, np.float32), version=0)
    metrics = receipt.report.metrics()
    assert (metrics["stepped"], metrics["rejected"], metrics["version"]) == (float(stepped), 2.0, float(stepped))
    assert (server.version, server.params.tolist(), all(receipt.report.rejected)) == (stepped, [1.0] * D, True)
