"""The statistics of a model follow the weights of its rule: against plain float64 NumPy, for every kind of rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import Server
from afflux.aggregation.statistics import mixed_buffers
from afflux.rules import RULES, ca2fl, fadas, fedasync, fedavg, fedbuff
from conftest import bits, preset, ready
from oracle import EPS, statistics
from role_trees import weighted

START = {"w": np.zeros(2), "running_var": np.full(3, 0.1), "num_batches_tracked": np.array(5)}


def model(variance, count=5):
    return {"w": np.ones(2), "running_var": np.asarray(variance, float), "num_batches_tracked": np.array(count)}


def after(rule, clients, **options):
    """The statistics after one round of these models, pushed in canonical order."""
    server = Server(rule, START, **options)
    for number, client in enumerate(clients):
        server.push(client=number, version=0, **{rule.kind: client}, buffers=client, num_examples=1 + number)
    return server.pull().buffers


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["update", "model", "gradient"]),
    st.lists(st.tuples(st.floats(-1, 3), st.lists(st.floats(0, 100), min_size=3, max_size=3)), min_size=1, max_size=4),
    st.sampled_from([0.1, 0.5, 1.0, 3.0]),
)
def test_statistics_against_the_oracle(kind, arrivals, lr):
    weights = np.array([round(weight, 3) for weight, _ in arrivals])
    clients, server = [np.array(values) for _, values in arrivals], np.array([1.0, 0.1, 100.0])
    accepted = weights != 0
    out = mixed_buffers(kind, server, clients, weights, accepted.tolist(), lr)
    chosen = [client for client, yes in zip(clients, accepted, strict=True) if yes]
    expected = statistics(kind, server, chosen, weights[accepted], lr)
    largest = max(np.max(np.abs(values)) for values in (server, *clients))
    assert np.all(np.abs(out - expected) <= 20 * EPS * largest * max(1.0, lr * np.abs(weights).sum()))
    assert (out >= 0).all()  # no variance becomes negative


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_variances_positive_and_what_all_agree_on(name):
    rule = preset(name)
    server = ready(Server(rule, START, num_clients=30))
    tenth = model(np.full(3, 0.1))
    for number in range(2 * rule.buffer_size + 30):
        client = tenth if number % 2 else model([0.1, 1e-30, 7.0], 8)
        server.push(client=number % 30, version=server.version, **{rule.kind: client}, buffers=client, num_examples=3)
        if server.version:
            break
    assert server.version
    found = server.pull().buffers
    assert bits(found[:1]) == bits(np.array([0.1]))  # the mean of ten tenths is another number
    assert (found > 0).all()


def test_weights_of_examples():
    """Clients with 1 and 99 examples: as the params, and as in Flower's FedAvg."""
    server = Server(
        fedavg(buffer_size=2), {"w": np.zeros(1), "running_mean": np.zeros(1), "num_batches_tracked": np.array(0)}
    )
    for client, (examples, value, count) in enumerate(((1, 0.0, 0), (99, 1.0, 99))):
        tree = {"w": np.array([value]), "running_mean": np.array([value]), "num_batches_tracked": np.array(count)}
        server.push(client=client, version=0, model=tree, num_examples=examples)
    assert server.params.tolist() == [np.float32(0.99)]
    assert server.pull().buffers.tolist() == [99 / 100 * 1.0, 98.01]
    assert server.checkout("ann").tree()["num_batches_tracked"] == 98


@pytest.mark.parametrize(
    "rule", [fedbuff(buffer_size=3), fadas(buffer_size=3), ca2fl(buffer_size=3)], ids=lambda r: r.name
)
def test_equal_weights_give_the_plain_mean(rule):
    """The same bits as a sum that is multiplied by 1 / M."""
    rng = np.random.default_rng(0)
    clients = [model(rng.random(3)) for _ in range(3)]
    plain = (0.0 + clients[0]["running_var"] + clients[1]["running_var"] + clients[2]["running_var"]) * (1.0 / 3)
    assert bits(after(rule, clients, num_clients=5)[:3]) == bits(plain)


@pytest.mark.parametrize(
    ("rule", "options"),
    [(fedavg(buffer_size=1), {}), (fedavg(buffer_size=1), {"accumulate": True}), (fedasync(alpha=1.0), {})],
)
def test_one_arrival_replaces_the_servers(rule, options):
    """Bit for bit, and without a sum."""
    own = np.array([3.0, -0.0, 1e-9, 7.0])
    assert bits(after(rule, [model(own[:3], 7)], **options)) == bits(own)


def test_rules_of_models_mix_the_servers_own():
    assert after(fedasync(alpha=0.25), [model(np.full(3, 0.5), 9)])[3] == 6.0
    large = after(weighted("model", [2.0, 6.0]), [model(np.zeros(3)), model(np.ones(3))])
    assert large.tolist() == [0.75] * 3 + [5.0]  # the shares of the clients are at most 1 in all


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [-1.0, 1.0], [-3.0, -1.0]])
@pytest.mark.parametrize("kind", ["update", "model"])
def test_weights_that_are_no_shares_give_the_plain_mean(kind, weights):
    assert after(weighted(kind, weights), [model(np.zeros(3), 4), model(np.ones(3), 8)]).tolist() == [0.5] * 3 + [6.0]
