"""Server(clip_norms=k): one update of a large norm cannot dominate a round, and no honest client is locked out."""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from afflux import Rule, Server, replay
from afflux.rules import RULES, fadas, fedadam, fedbuff, gsgm, optimizers, wkafl
from afflux.rules.calibration import NONE
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.staleness import Constant
from conftest import bits, check_error
from pairwise import soak
from test_streaming_threads import Skips

D = 4


def vector(norm):
    """A vector of this norm: each element is half of it."""
    return np.full(D, 0.5 * norm, np.float32)


def serve(rule, **options):
    return Server(rule, np.zeros(D, np.float32), num_clients=100, **options)


def push(server, norms):
    """Push vectors of these norms, from client 0 on; return the reports."""
    receipts = [
        server.push(client=client, version=server.version, **{server.rule.kind: vector(norm)})
        for client, norm in enumerate(norms)
    ]
    return [receipt.report for receipt in receipts if receipt.report is not None]


def test_the_weight_by_hand():
    """The median of the buffer is 1.5, the bound 3; then that of both buffers is 2, and the bound 4."""
    server = serve(fedbuff(buffer_size=4), clip_norms=2)
    (first,) = push(server, [1.0, 2.0, 12.0, 1.0])
    assert first.clips.tolist() == [1.0, 1.0, 0.25, 1.0]
    assert first.weights.tolist() == [0.25, 0.25, 0.0625, 0.25]
    assert first.norms.tolist() == [1.0, 2.0, 12.0, 1.0]
    assert (first.clipped, first.metrics()["clipped"], first.metrics()["rejected"]) == ((2,), 1.0, 0.0)
    assert server.params.tolist() == [0.5 * (1 + 2 + 12 / 4 + 1) / 4] * D
    (second,) = push(server, [2.0, 2.0, 16.0, 8.0])
    assert second.clips.tolist() == [1.0, 1.0, 0.25, 0.5]
    assert second.clipped == (2, 3)


def test_without_it_nothing_is_clipped():
    server = serve(fedbuff(buffer_size=4))
    (report,) = push(server, [1.0, 1.0, 1e6, 1.0])
    assert (report.clips, report.clipped, report.weights.tolist()) == (None, (), [0.25] * 4)
    assert server.state_dict()["meta"]["norms"] == []


def expected_clips(multiple, history, norms):
    """The factors, by the definition."""
    positive = [norm for norm in history[-64:] + norms if norm > 0]
    if len(positive) < 8:
        positive = [norm for norm in norms if norm > 0]
        if len(positive) < 3:
            return [1.0] * len(norms)
    bound = multiple * statistics.median(positive)
    return [min(1.0, bound / norm) if norm else 1.0 for norm in norms]


@pytest.mark.parametrize("size", [1, 2, 3, 5, *soak(70)])
def test_the_median_by_its_definition(rng, size):
    """Norms of several orders of magnitude, zeros among them; flushes make shorter rounds."""
    server, history = serve(fedbuff(buffer_size=size, staleness=Constant()), clip_norms=1.5), []
    clipped = 0
    for turn in range(60):
        count = size if turn % 4 else max(1, size - 1)
        norms = [0.0 if rng.random() < 0.2 else float(np.float32(10 ** rng.uniform(-2, 2))) for _ in range(count)]
        reports = push(server, norms)
        report = reports[0] if reports else server.flush()
        norms = report.norms.tolist()
        assert report.clips.tolist() == pytest.approx(expected_clips(1.5, history, norms), rel=1e-12)
        assert report.weights.tolist() == pytest.approx([clip / count for clip in report.clips], rel=1e-12)
        history += norms
        clipped += len(report.clipped)
    assert clipped > 5


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize(
    "norms",
    [
        [0.0] * 9 + [1.0] * 300,
        [1e-6] * 60 + [1e-3] * 300,
        [1e3] * 90 + [1.0] * 210,
        [1e-4 + i / 1000 for i in range(600)],
        [1.0, 500.0] * 150,
        [1e9] + [1.0] * 299,
    ],
    ids=["first zeros", "a thousand times more", "a thousandth", "warm-up", "1 and 500 local steps", "poison first"],
)
def test_no_honest_client_is_locked_out(size, norms):
    """At most the first 64 arrivals after a change are clipped, and none is rejected.

    Where half of the clients make 500 local steps, the median may be of either half: these count as 10 then.
    """
    server = serve(fedbuff(buffer_size=size), clip_norms=10)
    reports = push(server, norms)
    assert all(min(report.clips) > 0 and not any(report.rejected) for report in reports)
    if 500.0 in norms:
        assert min(min(report.clips) for report in reports) >= 10 / 500
        return
    honest = [report for report in reports if max(report.norms) < 1e9]
    assert sum(len(report.clipped) for report in honest) <= 64
    assert not any(report.clipped for report in reports[-(64 // size) :])
    if norms[0] == 1e9:
        assert np.isfinite(server.params).all()


MOVEMENT = {"fadas": 0.9, "fedyogi": 0.9, "fedadagrad": 0.7, "fedams": 0.9}


@pytest.mark.parametrize("name", MOVEMENT)
@pytest.mark.parametrize("size", [1, 10])
def test_one_poisoned_update_does_not_freeze_an_adaptive_rule(name, size):
    """The movement of 200 rounds after an update of a million times the norm, compared with that without it."""

    def movement(value, **options):
        server = serve(RULES[name](buffer_size=size), **options)
        push(server, [1.0] * 20 * size + [value] + [1.0] * (size - 1))
        before = server.params.copy()
        push(server, [1.0] * 200 * size)
        return float(abs(server.params - before).max())

    plain = movement(1.0)
    assert movement(1e6) < 0.05 * plain
    assert movement(1e6, clip_norms=2) > MOVEMENT[name] * plain


@pytest.mark.parametrize("rule", [gsgm(buffer_size=4), wkafl(buffer_size=4, sim_min=-1.0)], ids=["gsgm", "wkafl"])
def test_a_rule_vector_takes_the_clipped_arrival(rule):
    """The bits of GSGM with a gradient of a quarter; WKAFL's estimate is bounded, too."""
    server, twin = serve(rule, clip_norms=2), serve(rule)
    push(server, [1.0, 1.0, 8.0, 1.0])
    push(twin, [1.0, 1.0, 2.0, 1.0])
    if rule.name == "gsgm":
        assert bits(server.params) == bits(twin.params)
        assert bits(server.rule_vectors["pass_sum"]) == bits(twin.rule_vectors["pass_sum"])
    else:
        assert np.allclose(server.rule_vectors["estimate"], twin.rule_vectors["estimate"], rtol=1e-6)


def test_an_arrival_with_an_unusable_weight_is_not_in_the_median():
    """As if it had been refused. It joins the score test's window neither in its round nor in the next ones."""

    def scored(size):
        rule = Rule("own", "gradient", size, ScoreTest(), NONE, optimizers.Sgd(0.5))
        server = serve(rule, clip_norms=2)
        server.set_rule_vector("validation", vector(1.0))
        return server

    server, twin = scored(4), scored(3)
    for turn in range(8):
        for client, value in enumerate((1e-25, 1.0, 2.0, 8.0 + turn)):
            for each in (server, twin):
                if each is server or value > 1e-20:
                    receipt = each.push(client=client, version=turn, gradient=vector(value))
                    if each is server:
                        report = receipt.report
        assert report.rejected[0].startswith("weight")
        assert report.clipped == (3,)
    assert bits(server.params) == bits(twin.params)
    assert server.state_dict()["meta"]["norms"] == twin.state_dict()["meta"]["norms"]


def test_arrivals_of_a_round_without_a_step_count():
    server = serve(Rule("own", "update", 2, Skips(), NONE, optimizers.Sgd(1.0)), clip_norms=2)
    push(server, [1.0, 2.0])
    push(server, [3.0])
    assert not server.flush().stepped
    assert (server.version, server.state_dict()["meta"]["norms"]) == (0, [1.0, 2.0, 3.0])


def random_norms(rng, count):
    return [float(10 ** rng.uniform(-1, 3)) for _ in range(count)]


def test_a_log_of_24_threads_replays_to_the_same_bits(rng):
    rule = fadas(buffer_size=5)
    server = serve(rule, clip_norms=2, log=True)
    vectors, lock = {}, threading.Lock()
    values = [random_norms(rng, 12) for _ in range(24)]
    reports = []

    def work(client):
        for norm in values[client]:
            pushed = vector(norm)
            receipt = server.push(client=client, version=server.version, update=pushed)
            with lock:
                vectors[receipt.join] = pushed
                reports.append(receipt.report)
            time.sleep(0)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(work, range(24)))
    again_reports = []
    again = serve(rule, clip_norms=2, on_step=again_reports.append)
    replay(server.log, again, lambda join: vectors[join.number])
    assert bits(again.params) == bits(server.params)
    reports = sorted((report for report in reports if report is not None), key=lambda report: report.version)
    assert [report.clips.tolist() for report in reports] == [report.clips.tolist() for report in again_reports]
    assert sum(len(report.clipped) for report in reports) > 10


def test_forged_windows_of_norms():
    server = serve(fedbuff(buffer_size=3), clip_norms=2)
    push(server, [1.0, 1.0, 5.0])
    state = server.state_dict()
    for forged in ([-1.0], [float("inf")], [None], ["1"], 3, [1.0] * 65, {"a": 1}):
        state["meta"]["norms"] = forged
        before = server.state_dict()
        check_error(r"\[load_state_dict\] ", server.load_state_dict, state)
        assert server.state_dict()["meta"] == before["meta"]


ADAPTIVE = [name for name in RULES if len(RULES[name]().rule_vectors) > 1 and RULES[name]().states]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_rule_with_second_moments_warns_once(name, caplog):
    server = serve(RULES[name](buffer_size=2))
    push(server, [1.0] * 20 + [90.0, 1.0])
    assert not caplog.messages
    server.push(client="a poisoner", version=0, update=vector(150.0))
    push(server, [1.0] * 7 + [1e6, 1e6])
    (text,) = caplog.messages
    assert text.startswith("[Server] client 'a poisoner''s vector has the norm 150, and the median is 1. Second")
    assert "Server(clip_norms=10)" in text


def test_no_warning(caplog):
    """Without second moments, with the option, for growing norms and for zeros."""
    push(serve(fedbuff(buffer_size=2)), [1.0] * 20 + [1e6] * 2)
    push(serve(fedadam(buffer_size=2), clip_norms=10), [1.0] * 20 + [1e6] * 2)
    push(serve(fadas(buffer_size=2)), [0.0] * 20 + [1.05**i for i in range(60)])
    assert not caplog.messages


def test_a_flush_warns_too(caplog):
    server = serve(fadas(buffer_size=5))
    push(server, [1.0] * 10 + [1e5])
    server.flush()
    assert len(caplog.messages) == 1
