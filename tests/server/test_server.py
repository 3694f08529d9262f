"""The server: pull, push, versions, duplicates, and errors that leave no trace."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from afflux import AffluxError, Calibrate, Rule, Server, UnavailableError
from afflux.ops import Step
from afflux.rules import RULES, ca2fl, fedavg, fedbuff
from checked_out import D, vector
from conftest import FakeCuda, bits, check_error, push_all, ready


def snapshot(server):
    """Everything that the next bits depend on; refused pushes leave a trace in their counter alone."""
    state = server.state_dict()
    del state["meta"]["counts"]["refused"]
    return json.dumps(state["meta"]), {name: bits(array) for name, array in state["arrays"].items()}


def test_pull_is_a_read_only_version_that_never_changes():
    server = Server(fedavg(buffer_size=1), vector(0.0))
    held = server.pull()
    with pytest.raises(ValueError, match="read-only"):
        held.params[0] = 1
    push_all(server, [0] * 5, vector())
    assert held.params.tolist() == [0.0] * D
    assert held.version == 0
    assert server.pull().params.tolist() == [5.0] * D
    assert server.pull().version == server.version == 5


def test_params_are_copied_at_the_start():
    start = vector()
    server = Server(fedavg(), start)
    start[:] = 9
    assert server.params.tolist() == [1.0] * D


@pytest.mark.parametrize("model", [vector(0.0), {"w": vector(0.0)}], ids=["flat", "tree"])
def test_a_vector_may_be_written_to_after_its_push(model):
    server = Server(fedavg(buffer_size=2), model)
    pushed = vector()
    for client in range(2):
        pushed[:] = client + 1
        server.push(client=client, update={"w": pushed} if isinstance(model, dict) else pushed, version=0)
        pushed[:] = np.nan
    assert server.params.tolist() == [1.5] * D


def test_receipts_and_report():
    server = Server(fedbuff(buffer_size=2, server_lr=0.5), vector(0.0))
    first = server.push(client=7, update=vector(3.0), version=0)
    assert (first.status, first.staleness, first.version, first.report) == ("joined", 0, 0, None)
    assert server.arrivals_waiting == 1
    report = server.push(client=2, update=vector(1.0), version=0).report
    assert report.version == 1
    assert report.client_ids == (2, 7)  # canonical order
    assert report.staleness.tolist() == [0, 0]
    assert report.weights.tolist() == [0.5, 0.5]
    assert np.allclose(report.norms, [np.sqrt(D), 3 * np.sqrt(D)], rtol=1e-15)
    assert report.server_lr == 0.5
    assert report.seconds > 0
    assert server.arrivals_waiting == 0
    assert server.params.tolist() == [1.0] * D


def test_staleness_is_counted_at_the_join():
    server = Server(fedbuff(buffer_size=1), vector(0.0))
    push_all(server, [0] * 3, vector())
    assert server.push(client=1, update=vector(), version=1).staleness == 2


def test_gradients_are_subtracted():
    rule = Rule("sgd", "gradient", 2, fedbuff().weigh, Calibrate(cached=False), lambda arrivals: Step("sgd", 0.25))
    server = Server(rule, vector(0.0))
    report = push_all(server, range(2), vector(4.0), version=0).report
    assert server.params.tolist() == [-1.0] * D
    assert report.server_lr == 0.25


def test_uncached_rules_count_a_client_twice():
    server = Server(fedavg(buffer_size=2), vector(0.0))
    server.push(client=1, update=vector(1.0), version=0, num_examples=1)
    server.push(client=1, update=vector(5.0), version=0, num_examples=3)
    assert server.params.tolist() == [4.0] * D


def test_cached_rules_keep_a_clients_newest_arrival():
    server = Server(ca2fl(buffer_size=2), vector(0.0), num_clients=3)
    server.push(client=0, update=vector(1.0), version=0)
    server.push(client=1, update=vector(1.0), version=0)
    assert server.push(client=0, update=vector(1.0), version=0).status == "joined"
    assert server.push(client=0, update=vector(5.0), version=1).status == "replaced"
    assert server.push(client=0, update=vector(9.0), version=0).status == "superseded"
    assert server.arrivals_waiting == 1
    assert server.push(client=0, update=vector(7.0), version=1).status == "replaced"  # the same version: the later join
    before = server.params.copy()
    report = server.push(client=2, update=vector(1.0), version=1).report
    # h = (1 + 1) / 3, v = h + ((7 - 1) + (1 - 0)) / 2
    assert np.allclose(server.params - before, 2 / 3 + 3.5, rtol=1e-6)
    assert report.client_ids == (0, 2)
    assert [server.rows.row(c)[0] for c in range(3)] == [7.0, 1.0, 1.0]
    assert server.rows.sum.tolist() == [9.0] * D


def test_max_staleness_drops_and_counts():
    server = Server(fedavg(buffer_size=1), vector(0.0), max_staleness=1)
    push_all(server, [0] * 3, vector())
    before = bits(server.params)
    receipt = server.push(client=1, update=vector(), version=1)
    assert (receipt.status, receipt.staleness, server.counts["dropped"]) == ("dropped", 2, 1)
    assert bits(server.params) == before
    assert server.push(client=1, update=vector(), version=2).status == "joined"


class Gpu(FakeCuda):
    shape = (D,)


BAD_PUSHES = [
    (dict(client=3, update=Gpu(), version=0), r"client 3's update: .* is on cuda:1"),
    (dict(client=1, update=vector(), version=3), r"client 1 says .* version 3; the server has made 0 to 1"),
    (dict(client=1, update=vector(), version=-1), r"version -1"),
    (dict(client=1, update=vector(), version=0.5), r"version is 0.5, must be an int"),
    (dict(client=1, update=vector(), version=10**5000), r"version of type int; the server has made 0 to 1"),
    (dict(client=1, update=vector(), version=True), r"version is True"),
    (dict(client="a\ud800", update=vector(), version=0), r"client_id 'a\\ud800' is no Unicode text: surrogates"),
    (dict(client=1.5, update=vector(), version=0), r"client_id is 1.5, must be an int or a str"),
    (dict(client=7.0, update=vector(), version=0), r"client_id is 7.0, must be an int or a str"),
    (dict(client=True, update=vector(), version=0), r"client_id is True"),
    (dict(client=np.bool_(1), update=vector(), version=0), r"client_id is np.True_, must be an int or a str"),
    (dict(client=1.0, update=vector(), version=0), r"client_id is 1.0, must be an int or a str"),
    (dict(client=b"a", update=vector(), version=0), r"client_id is b'a', must be an int or a str"),
    (dict(client=2**64, update=vector(), version=0), r"client_id is 18446744073709551616, .* fit into 64 bits"),
    (dict(client=-(2**63) - 1, update=vector(), version=0), r"client_id is -9.*809, .* fit into 64 bits"),
    (dict(client=10**5000, update=vector(), version=0), r"client_id is of type int, which does not fit"),
    (dict(client=1, update=np.ones(D + 1), version=0), r"client 1's update has 6 elements, the server's params have 5"),
    (dict(client=1, update=np.ones((D, 1)), version=0), r"client 1's update has shape \(5, 1\), expected \(d,\)"),
    (dict(client=1, update=[1.0] * D, version=0), r"client 1's update is a list"),
    (dict(client=1, update=np.ones(D, np.int64), version=0), r"client 1's update: .* expected float32"),
    (dict(client=1, update=np.ones(2 * D, np.int64)[::2], version=0), r"client 1's update: .* is strided"),
    (dict(client=1, update=np.array([1, 2, np.nan, 4, np.inf]), version=0), r"client 1's update .* at index 2"),
    (dict(client=1, update=np.array([1, 2, 3, 4, 1e39]), version=0), r"non-finite value at index 4"),
    (dict(client=1, update=vector(), version=0, num_examples=1.5), r"num_examples is 1.5"),
    (dict(client=1, update=vector(), version=0, num_examples=2**70), r"num_examples is .* at most 9223372036854775807"),
    (dict(client=1, update=vector(), version=0, timeout=-1), r"timeout is -1, must be None or a number of seconds"),
    (dict(client=1, update=vector(), version=0, timeout="1"), r"timeout is '1', must be None or a number"),
    (dict(client=1, update=vector(), version=0, loss=10**400), r"loss is of type int, must be a finite number"),
    (dict(client=1, update=np.array([1, -np.inf, 3, 4, 5]), version=0), r"client 1's update .* at index 1"),
    (dict(client=1, update=vector(), version=0, num_examples=-1), r"num_examples is -1, must be an int of at least 0"),
    (dict(client=1, update=vector(), version=0, loss="1"), r"loss is '1', must be a finite number"),
    (dict(client=1, update=vector(), version=0, client_lr=0.0), r"client_lr is 0.0, must be finite and positive"),
    (dict(client=1, update=vector(), version=0, local_steps=0), r"local_steps is 0, must be an int of at least 1"),
    (dict(client=1, update=vector(), version=None), r"give task=, or client= and version="),
    (dict(client=1, update=vector(), version=0, local_steps=10**400, client_lr=1.0), r"local_steps is .* at most"),
    (dict(client=1, update=vector(), model=vector(), version=0), r"not update= and model="),
    (dict(client=1, version=0), r"give one of update=, gradient= and model=, not none of them"),
    (dict(client=1, gradient=vector(), version=0), r"gradient cannot become an update without client_lr="),
    (dict(task="a", client=1, update=vector()), r"task= says who pushes"),
    (dict(task=7, update=vector()), r"task is 7, must be what checkout\(\) gave"),
]  # fmt: skip


@pytest.mark.parametrize(("push", "message"), BAD_PUSHES)
@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), ca2fl(buffer_size=2)], ids=["fedbuff", "ca2fl"])
def test_a_bad_push_leaves_no_trace(rule, push, message):
    def run(disturbed):
        server = Server(rule, vector(0.5), num_clients=4)
        for i in range(7):
            server.push(client=i % 4, update=vector(i + 1.0), version=server.version)
            if disturbed and i == 2:  # version 1, one arrival waits
                before = snapshot(server)
                check_error(message, server.push, **push, error=UnavailableError if "cuda" in message else AffluxError)
                assert snapshot(server) == before
        return snapshot(server)

    assert run(disturbed=True) == run(disturbed=False)


def test_numpy_ids_are_plain_ids():
    server = Server(ca2fl(buffer_size=2), vector(), num_clients=3)
    server.push(client=np.int64(1), update=vector(), version=np.int32(0))
    receipt = server.push(client=1, update=vector(2.0), version=0, num_examples=np.uint8(3))
    assert (receipt.status, type(receipt.staleness)) == ("replaced", int)
    report = server.push(client=np.int32(0), update=vector(), version=0).report
    assert [type(c) for c in report.client_ids] == [int, int]


def test_a_rejected_client_keeps_its_row():
    """A row is replaced iff its arrival was accepted, that is, has a weight."""
    weights = iter([[0.5, 0.5], [0.0, 1.0]])
    server = Server(failing(lambda arrivals: np.array(next(weights))), vector(0.0), num_clients=2)
    for version, values in enumerate([(1.0, 2.0), (100.0, 3.0)]):
        push_all(server, range(2), lambda client, values=values: vector(values[client]), version=version)
    assert [server.rows.row(c)[0] for c in range(2)] == [1.0, 3.0]
    assert server.rows.sum.tolist() == [4.0] * D
    # v = h + (3 - 2) with h = (1 + 2) / 2, after 0 + (1 + 2) / 2
    assert server.params.tolist() == [4.0] * D


def test_weights_of_cached_rules_sum_to_one():
    server = Server(failing(lambda arrivals: np.array([3.0, 1.0])), vector(0.0), num_clients=2)
    server.push(client=0, update=vector(1.0), version=0)
    assert server.push(client=1, update=vector(5.0), version=0).report.weights.tolist() == [0.75, 0.25]
    assert server.params.tolist() == [2.0] * D


def test_threads_push_at_once():
    """Every arrival counts once, whichever thread brings it, and pulls see whole versions."""
    rounds, buffer_size, threads = 60, 7, 6
    server = Server(fedavg(buffer_size=buffer_size), np.zeros(40_000, np.float32), log=True)
    torn = []

    def work(number):
        for _ in range(rounds * buffer_size // threads + 1):
            pulled = server.pull()
            if len(set(pulled.params[::1000].tolist())) != 1:
                torn.append(pulled.version)
            server.push(client=number, update=np.ones(40_000, np.float32), version=pulled.version)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert not torn
    assert (server.version, server.arrivals_waiting) == (rounds, threads)
    assert server.counts["joined"] == server.joins == rounds * buffer_size + threads
    assert [entry.number for entry in server.log] == [*range(server.joins)]
    assert np.abs(server.params - rounds).max() <= rounds * 2.0**-18  # 1/7 seven times, and 60 roundings


def failing(weigh, lr=1.0):
    return Rule("mine", "update", 2, weigh, Calibrate(cached=True), lambda arrivals: Step("sgd", lr))


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (failing(lambda _: np.ones(3)), AffluxError, r"\[mine\] weigh gave weights of shape \(3,\), expected \(2,\)"),
        (failing(lambda _: np.array([1, np.nan])), AffluxError, "weigh gave client 1 the weight nan, must be"),
        (failing(lambda _: 1 / 0), ZeroDivisionError, "division"),
        (failing(fedbuff().weigh, np.nan), AffluxError, r"\[mine\] step gave lr nan, must be finite"),
        (failing(fedbuff().weigh, -np.inf), AffluxError, "lr -inf, must be finite"),
        (failing(fedbuff().weigh, 10**400), OverflowError, "too large"),
        (failing(fedbuff().weigh, "fast"), ValueError, "'fast'"),
    ],
)
def test_a_rule_that_fails_loses_nothing(rule, error, message):
    """The push that would complete the round fails; what was waiting still waits."""
    server = Server(rule, vector(), num_clients=3)
    server.push(client=0, update=vector(), version=0)
    before = snapshot(server)
    check_error(message, server.push, client=1, update=vector(2.0), version=0, error=error)
    assert snapshot(server) == before


def test_a_step_may_be_numpys():
    rule = Rule(
        "mine", "update", 1, fedbuff().weigh, Calibrate(cached=False), lambda arrivals: Step("sgd", np.float32(0.5))
    )
    server = Server(rule, vector(0.0))
    assert server.push(client=0, update=vector(2.0), version=0).report.server_lr == 0.5
    assert server.params.tolist() == [1.0] * D


def test_arrivals_are_frozen():
    seen = []

    def weigh(arrivals):
        seen.append(arrivals)
        return np.full(len(arrivals), 0.5)

    server = Server(failing(weigh), vector(), num_clients=3)
    server.push(client=1, update=vector(2.0), version=0, num_examples=4, loss=0.25)
    server.push(client=0, update=vector(), version=0)
    (arrivals,) = seen
    assert (arrivals.version, arrivals.client_ids, len(arrivals)) == (0, (0, 1), 2)
    assert arrivals.num_examples.tolist() == [1, 4]
    assert np.array_equal(arrivals.losses, [np.nan, 0.25], equal_nan=True)
    with pytest.raises(ValueError, match="read-only"):
        arrivals.staleness[0] = 5


def test_bad_construction():
    check_error(r"params has shape \(2, 2\)", Server, fedbuff(), np.ones((2, 2), np.float32))
    check_error("params has a non-finite value at index 1", Server, fedbuff(), np.array([1.0, np.inf]))
    check_error(r"\[Server\] params: .* is int64, expected float32, float64", Server, fedbuff(), np.zeros(3, int))
    check_error("rule is <function fedbuff.*must be a Rule", Server, fedbuff, vector())
    check_error("num_threads is 0, must be an int of at least 1", Server, fedbuff(), vector(), num_threads=0)
    check_error("push_threads is 0", Server, fedbuff(), vector(), push_threads=0)
    check_error("first_version is -1, must be an int of at least 0", Server, fedbuff(), vector(), first_version=-1)
    text = "first_version is 9007199254740991, must be at most 4503599627370496"
    check_error(text, Server, fedbuff(), vector(), first_version=2**53 - 1)
    check_error("not of models", Rule, "x", "model", 1, fedbuff().weigh, Calibrate(True), fedbuff().step)


def test_state_bytes_count_every_part():
    """4 d for params, 4 M d for slots; cached rules: 8 d for the sum from the start, 4 d per client seen."""
    plain = Server(fedbuff(buffer_size=3), vector())
    assert plain.state_bytes == 4 * D + 3 * 4 * D
    cached = Server(ca2fl(buffer_size=2), vector(), num_clients=9)
    assert cached.state_bytes == 4 * D + 2 * 4 * D + 8 * D
    push_all(cached, range(2), vector(), version=0)
    assert cached.state_bytes == 4 * D + 2 * 4 * D + 8 * D + 2 * 4 * D


@pytest.mark.parametrize("name", RULES)
def test_an_empty_model(name):
    server = ready(Server(RULES[name](), np.empty(0, np.float32), num_clients=20))
    push_all(server, range(20), np.empty(0, np.float32), version=0)
    assert server.version >= 2 or name in ("zenopp", "fltrust")  # which reject gradients of norm 0


def test_versions_nobody_holds_are_used_again():
    server = Server(fedavg(buffer_size=1), vector(0.0))
    addresses = set()
    for i in range(50):
        server.push(client=0, update=vector(), version=i)
        addresses.add(server.params.ctypes.data)
    assert len(addresses) == 2
    assert server.versions_held == 1


def test_a_view_into_a_version_keeps_it():
    server = Server(fedavg(buffer_size=1), vector(0.0))
    slices = []
    for i in range(10):
        slices.append(server.pull().params[1:3])
        server.push(client=0, update=vector(), version=i)
    assert server.versions_held == 11
    assert [part.tolist() for part in slices] == [[i, i] for i in range(10)]
    del slices
    assert server.versions_held == 1


def test_a_version_outlives_its_server_and_stays_read_only():
    server = Server(fedavg(buffer_size=1), vector(3.0))
    held = server.pull().params
    del server
    assert held.tolist() == [3.0] * D
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        held.flags.writeable = True


def test_max_versions_raises_and_loses_nothing():
    server = Server(fedavg(buffer_size=1), vector(0.0), max_versions=3)
    held = []
    for i in range(2):
        held.append(server.pull())
        server.push(client=0, update=vector(), version=i)
    before = snapshot(server)
    check_error("all 3 .*max_versions", server.push, client=0, update=vector(), version=2)
    assert snapshot(server) == before
    held.pop()
    assert server.push(client=0, update=vector(), version=2).report.version == 3
