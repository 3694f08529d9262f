"""Server(on_step=...): called once for each step, in order, without any lock; whatever it does, the server goes on."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from afflux import Server, Weights, ops, replay
from afflux.rules import fedbuff
from checked_out import push, vector
from conftest import bits, check_error, check_raises, needs_fork, push_all, raising
from inside import slots_taken


def test_each_step_is_reported_once_its_version_can_be_pulled():
    seen = []
    server = Server(fedbuff(buffer_size=2), vector(0.0), on_step=lambda r: seen.append((r, server.pull().version)))
    receipts = [push(server, client) for client in range(5)]
    assert [report for report, _ in seen] == [receipt.report for receipt in receipts if receipt.report is not None]
    assert [(report.version, pulled) for report, pulled in seen] == [(1, 1), (2, 2)]
    assert server.flush() is seen[2][0]
    assert server.flush() is None
    assert len(seen) == 3


def test_a_step_that_the_rule_skips_is_reported_too():
    seen = []
    rule = replace(fedbuff(buffer_size=1), weigh=lambda arrivals: Weights(np.zeros(1), skip=arrivals.version == 1))
    server = Server(rule, vector(0.0), on_step=seen.append)
    reports = [push(server).report for _ in range(3)]
    assert seen == reports
    assert [(report.version, report.stepped) for report in seen] == [(1, True), (1, False), (1, False)]


def test_it_may_call_the_server():
    """One push of a client leads to three more steps; none of them is reported inside another one."""
    events, depth = [], []

    def on_step(report):
        assert not depth, "two calls overlap"
        depth.append(1)
        events.append((report.version, server.pull().version))
        if report.version < 4:
            assert push(server, client=7).status == "joined"
            assert push(server, client=8).report.version == report.version + 1
            server.state_dict()
        depth.pop()

    server = Server(fedbuff(buffer_size=2), vector(0.0), max_slots=2, max_versions=2, on_step=on_step)
    push(server)
    assert push(server).report.version == 1
    assert events == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_it_holds_neither_slot_nor_version_of_the_push():
    free = []
    server = Server(
        fedbuff(buffer_size=1),
        vector(0.0),
        on_step=lambda report: free.append((slots_taken(server), server.versions_held)),
    )
    pulled = server.pull()
    server.push(client=1, model=vector(), version=pulled.version)
    server.push(client=1, model=vector(), version=server.version)
    del pulled
    server.push(client=1, model=vector(), version=server.version)
    assert free == [(0, 2), (0, 2), (0, 1)]


def test_an_exception_is_logged_and_nothing_is_lost(caplog):
    seen = []

    def on_step(report):
        seen.append(report.version)
        raise ValueError("no such disk")

    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=on_step)
    with caplog.at_level(logging.ERROR, "afflux"):
        receipt = push(server)
    assert (receipt.status, receipt.report.version, server.version) == ("joined", 1, 1)
    (record,) = caplog.records
    assert record.name == "afflux"
    assert "[on_step] raised for version 1" in record.message
    assert "no such disk" in caplog.text
    push(server)
    assert (seen, server.counts["joined"], server.counts["refused"]) == ([1, 2], 2, 0)


def test_an_interrupt_in_it_leaves_the_server_sound():
    seen = []

    def on_step(report):
        seen.append(report.version)
        if report.version == 1:
            raise KeyboardInterrupt

    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=on_step)
    check_raises(KeyboardInterrupt, push, server)
    assert (server.version, server.counts["joined"]) == (1, 1)
    push(server)
    assert seen == [1, 2]


@pytest.mark.parametrize("how", ["push", "poll"])
def test_a_step_that_an_interrupt_left_is_reported_later(monkeypatch, how):
    seen = []
    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=lambda report: seen.append(report.version))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "apply", raising(KeyboardInterrupt))
        check_raises(KeyboardInterrupt, push, server)
    assert server.discard() == 0  # which makes the step
    assert (server.version, seen) == (1, [])
    push(server) if how == "push" else server.poll()
    assert seen == [1, 2][: server.version]


def test_threads_report_every_step_once_and_in_order():
    seen, inside = [], threading.Lock()

    def on_step(report):
        assert inside.acquire(blocking=False), "two calls overlap"
        seen.append(report.version)
        inside.release()

    server = Server(fedbuff(buffer_size=2), vector(0.0), on_step=on_step)

    def client(number):
        push_all(server, [number] * 100, vector())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    assert seen == [*range(1, 201)]


def test_no_push_waits_for_another_ones_call():
    """The step of a second thread is reported by the first one, which is inside its own call."""
    entered, go, seen = threading.Event(), threading.Event(), []

    def on_step(report):
        seen.append((report.version, threading.current_thread()))
        if report.version == 1:
            entered.set()
            assert go.wait(600)

    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=on_step)
    first = threading.Thread(target=push, args=(server,), daemon=True)
    first.start()
    assert entered.wait(600)
    assert push(server).report.version == 2
    assert len(seen) == 1
    go.set()
    first.join(600)
    assert seen == [(1, first), (2, first)]


@needs_fork
def test_a_forked_child_reports_its_own_steps():
    """Forked inside on_step, whose call goes on in the parent alone."""
    seen, children = [], []

    def on_step(report):
        seen.append(report.version)
        if report.version == 1:
            children.append(os.fork())
            if not children[0]:
                push(server)
                os._exit(0 if seen == [1, 2] else 1)

    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=on_step)
    push(server)
    assert os.waitpid(children[0], 0)[1] == 0
    assert seen == [1]


def test_a_store_and_a_replay_report_as_any_server(tmp_path):
    seen = {"first": [], "opened": [], "replayed": []}
    path = tmp_path / "store"
    server = Server(
        fedbuff(buffer_size=2), vector(0.0), log=True, store=path, on_step=lambda r: seen["first"].append(r.version)
    )
    push_all(server, range(3), vector())
    server.close()
    with Server.open(path, on_step=lambda r: seen["opened"].append(r.version)) as server:
        push(server, 3)
        log, params = server.log, bits(server.params)
    fresh = Server(fedbuff(buffer_size=2), vector(0.0), on_step=lambda r: seen["replayed"].append(r.version))
    assert bits(replay(log, fresh, lambda join: vector()).params) == params
    assert seen == {"first": [1], "opened": [2], "replayed": [1, 2]}


def test_a_loaded_state_has_no_reports():
    seen = []
    server = Server(fedbuff(buffer_size=1), vector(0.0), on_step=lambda report: seen.append(report.version))
    state = server.state_dict()
    push(server)
    server.load_state_dict(state)
    push(server)
    assert seen == [1, 1]


@pytest.mark.parametrize("wrong", [3, "print", Server])
def test_something_that_is_no_function(wrong, tmp_path):
    check_error("on_step is .* a function", Server, fedbuff(), vector(), on_step=wrong, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()
