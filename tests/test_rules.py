"""The contract that every preset keeps, walked over RULES, and each against the float64 oracle."""

import numpy as np
import pytest

import oracle
from afflux import Server
from afflux.errors import AffluxError
from afflux.rules import RULES, ca2fl, fedasync, fedbuff
from afflux.weigh import Constant, Hinge, Polynomial, Staleness
from conftest import THREADS, awkward, bits

SIZE, CLIENTS, BUFFER = 1500, 12, 4


def make(name, **options):
    return RULES[name](**({} if name == "fedasync" else {"buffer_size": BUFFER}), **options)


def trace(seed, rounds, buffer_size, distinct):
    """Buffers of (client, staleness, examples, vector): stale, uneven, and with repeated clients where allowed."""
    rng = np.random.default_rng(seed)
    for version in range(rounds):
        yield [
            (int(client), int(rng.integers(0, min(version, 6) + 1)), int(rng.integers(1, 50)),
             rng.standard_normal(SIZE).astype(np.float32))
            for client in rng.choice(CLIENTS, buffer_size, replace=not distinct)
        ]  # fmt: skip


def push(server, buffer):
    base = server.version
    return [
        server.push(client, vector, version=base - staleness, num_examples=examples)
        for client, staleness, examples, vector in buffer
    ]


@pytest.mark.parametrize("name", RULES)
def test_trajectory_against_the_oracle(name):
    """60 rounds of a linear rule: every round adds at most one float32 rounding per element, carried on with factor 1
    (fedasync: below 1), and float64 errors that are 2^29 times smaller."""
    rule, lr, alpha = make(name), 1.0, 0.6
    start = np.linspace(-1, 1, SIZE).astype(np.float32)
    server, exact = Server(rule, start, num_clients=CLIENTS), oracle.Trajectory(start, CLIENTS)
    allowed = np.zeros(SIZE)
    for buffer in trace(7, 60, rule.buffer_size, distinct=name == "ca2fl"):
        receipts = push(server, buffer)
        assert [r.report is not None for r in receipts] == [False] * (len(buffer) - 1) + [True]
        getattr(exact, name)(buffer, alpha if name == "fedasync" else lr)
        allowed += oracle.U32 * np.abs(server.params) * (1 + 1e-5) + 1e-12
        assert np.all(np.abs(server.params - exact.params) <= allowed)
    assert server.version == 60
    assert np.abs(server.params - start).max() > 1  # it went somewhere


@pytest.mark.parametrize("name", RULES)
def test_one_round_within_its_own_bound(name):
    """From the engine's own state, one round differs by a single rounding."""
    rule = make(name)
    start = np.linspace(-3, 3, SIZE).astype(np.float32)
    server, exact = Server(rule, start, num_clients=CLIENTS), oracle.Trajectory(start, CLIENTS)
    for buffer in trace(8, 20, rule.buffer_size, distinct=name == "ca2fl"):
        exact.params = oracle.f64(server.params)
        push(server, buffer)
        getattr(exact, name)(buffer, 0.6 if name == "fedasync" else 1.0)
        terms = np.abs(exact.params) + sum(np.abs(v) for *_, v in buffer) + 10
        bound = oracle.rounded_bound(exact.params, terms, 2 * len(buffer) + 10)
        assert np.all(np.abs(server.params - exact.params) <= bound)


@pytest.mark.parametrize("name", [name for name in RULES if name != "fedasync"])
def test_permuted_joins_give_the_same_bits(name, rng):
    buffers = list(trace(9, 12, BUFFER, distinct=True))
    results = set()
    for _ in range(4):
        server = Server(make(name), np.ones(SIZE, np.float32), num_clients=CLIENTS)
        for buffer in buffers:
            push(server, [buffer[i] for i in rng.permutation(BUFFER)])
        results.add(bits(server.params))
    assert len(results) == 1


@pytest.mark.parametrize("name", RULES)
def test_threads_give_the_same_bits(isa, name, rng):
    size = 140_001
    pool = [awkward(rng, size) for _ in range(8)]
    results = set()
    for threads in THREADS:
        server = Server(make(name), pool[0], num_clients=CLIENTS, num_threads=threads)
        for i in range(3 * BUFFER):
            server.push(i % 7, pool[1 + i % 7], version=0, num_examples=i + 1)
        results.add(bits(server.params))
    assert len(results) == 1


def test_fedbuff_with_one_arrival_is_fedasync_when_params_are_current(rng):
    start = rng.standard_normal(SIZE).astype(np.float32)
    local = rng.standard_normal(SIZE).astype(np.float32)
    mixing = Server(fedasync(alpha=0.25), start)
    mixing.push(0, local, version=0)
    adding = Server(fedbuff(buffer_size=1, server_lr=0.25), start)
    adding.push(0, local.astype(np.float64) - start, version=0)  # ingest rounds the difference to float32
    bound = 2 * oracle.U32 * (np.abs(start) + np.abs(local))
    assert np.all(np.abs(mixing.params - adding.params) <= bound)


def test_fedasync_returning_the_pulled_model_changes_nothing(rng):
    start = rng.standard_normal(SIZE).astype(np.float32)
    server = Server(fedasync(alpha=0.37), start)
    server.push(0, server.pull().params, version=0)
    assert bits(server.params) == bits(start)


def test_ca2fl_with_an_empty_cache_is_unweighted_fedbuff(rng):
    buffer = next(trace(10, 1, BUFFER, distinct=True))
    servers = [
        Server(rule, np.ones(SIZE, np.float32), num_clients=CLIENTS)
        for rule in (ca2fl(buffer_size=BUFFER), fedbuff(buffer_size=BUFFER, staleness=Constant()))
    ]
    for server in servers:
        push(server, buffer)
    assert bits(servers[0].params) == bits(servers[1].params)


def test_the_cache_sum_keeps_its_promise_over_10_000_rounds(rng):
    """|h - recomputed mean| <= 1e-12 of the largest row norm so far; a float32 sum would miss it a million times."""
    size, clients = 64, 10
    server = Server(ca2fl(buffer_size=2), np.zeros(size, np.float32), num_clients=clients)
    largest = 0.0
    for i in range(20_000):
        update = (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 4)).astype(np.float32)
        largest = max(largest, float(np.linalg.norm(update)))
        server.push(i % clients, update, version=server.version)
    assert server.version == 10_000
    recomputed = sum(oracle.f64(server.rows.row(c)) for c in range(clients)) / clients
    assert np.linalg.norm(server.rows.sum / clients - recomputed) <= 1e-12 * largest


@pytest.mark.parametrize("a", [0, 0.5, 1, 1.5, 2, 3.5])
def test_polynomial(a):
    staleness = np.arange(300)
    ours = np.array([Polynomial(a)(int(t)) for t in staleness])
    assert np.all(np.abs(ours / oracle.polynomial(staleness, a) - 1) <= 10 * oracle.EPS)


def test_hinge():
    staleness = np.arange(300)
    ours = np.array([Hinge(10, 4)(int(t)) for t in staleness])
    assert np.all(np.abs(ours / oracle.hinge(staleness, 10, 4) - 1) <= 4 * oracle.EPS)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Polynomial(0.3),
        lambda: Polynomial(-0.5),
        lambda: Staleness(Constant(), "sum"),
        lambda: fedbuff(buffer_size=0),
    ],
)
def test_wrong_hyperparameters(wrong):
    with pytest.raises(AffluxError, match=r"\[.*\] .* must be"):
        wrong()


def test_normalise_by_weights():
    server = Server(fedbuff(buffer_size=2, normalise="weights"), np.zeros(1, np.float32))
    for i, update in enumerate([1.0, 5.0]):
        server.push(i, np.array([update]), version=0)
    for i, (update, version) in enumerate([(1.0, 1), (5.0, 0)]):  # weights 1 and 1/sqrt(2)
        report = server.push(i, np.array([update]), version=version).report
    assert np.allclose(report.weights.sum(), 1, rtol=0, atol=4 * oracle.EPS)
    assert report.weights[0] / report.weights[1] == pytest.approx(2**0.5, rel=1e-15)
