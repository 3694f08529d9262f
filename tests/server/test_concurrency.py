"""Threads at one server: what happens while a round is made, when slots run out, and after an interrupt."""

import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import afflux.aggregation.round
from afflux import AffluxError, BusyError, Calibrate, Rule, Server, StoreError, ops, replay
from afflux.ops import Step
from afflux.rules import ca2fl, fedbuff
from afflux.rules.weights import Uniform
from afflux.server import concurrency
from afflux.server.inputs import InputAdapter
from checked_out import D, vector
from conftest import bits, check_error, check_raises, push_all, same_state
from held_up import HeldUp, start
from inside import aggregator_of, make_rounds_by, mutex_of, rounds_of, without_fast_path


@pytest.fixture
def slow(monkeypatch):
    """Sweeps wait before they begin."""
    return HeldUp(monkeypatch, ops, "apply")


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


def test_a_step_that_makes_its_round_wakes_who_waits_for_a_slot(monkeypatch):
    """Before on_step is called, which may take long."""
    monkeypatch.setattr(concurrency, "_RECHECK", 60.0)
    woken = []
    server = Server(fedbuff(buffer_size=2), vector(0.0), max_slots=2, on_step=lambda _: woken.append(push.result(10)))
    server.push(client=1, version=0, update=vector(1.0))
    held = aggregator_of(server).plane.reserve()
    push = start(lambda: server.push(client=2, version=0, update=vector(2.0)))
    wait_for(lambda: aggregator_of(server)._bells)
    server.step([(3, 0, vector(3.0))])
    del held
    assert [receipt.status for receipt in woken] == ["joined"]


def test_the_next_buffer_fills_while_a_round_is_made(slow):
    server = Server(fedbuff(buffer_size=2), vector(0.0), log=True)
    server.push(client=0, update=vector(1.0), version=0)
    made = start(lambda: server.push(client=1, update=vector(1.0), version=0))
    assert slow.reached.wait(600)
    # A pull does not wait; an arrival joins the next buffer, and the round that is being made counts as done.
    assert server.pull().version == server.version == 0
    receipt = server.push(client=2, update=vector(2.0), version=0)
    assert (receipt.status, receipt.staleness, receipt.step, receipt.version) == ("joined", 1, 2, 0)
    assert server.arrivals_waiting == 1
    # The one that completes the next buffer waits for this round.
    also_made = start(lambda: server.push(client=3, update=vector(2.0), version=0))
    time.sleep(0.05)
    assert not also_made.done()
    slow.go.set()
    assert made.result(600).report.version == made.result().step == 1
    assert also_made.result(600).report.version == 2
    assert also_made.result().report.staleness.tolist() == [1, 1]
    # One after the other, the same joins give the same bits.
    again = Server(fedbuff(buffer_size=2), vector(0.0))
    replay(server.log, again, lambda join: vector(1.0 + join.client_id // 2))
    assert bits(again.params) == bits(server.params)


def test_push_waits_for_a_slot_or_raises(slow):
    server = Server(fedbuff(buffer_size=2), vector(0.0), max_slots=2)
    server.push(client=0, update=vector(), version=0)
    first = start(lambda: server.push(client=1, update=vector(), version=0))
    assert slow.reached.wait(600)
    for timeout in (0, 0.02):
        check_error("all 2 slots", server.push, client=2, update=vector(), version=0, timeout=timeout, error=BusyError)
    waiting = start(lambda: server.push(client=2, update=vector(), version=0))
    time.sleep(0.05)
    assert not waiting.done()
    slow.go.set()
    assert (waiting.result(600).status, waiting.result().staleness) == ("joined", 1)
    assert first.result(600).status == "joined"
    assert server.counts == dict.fromkeys(server.counts, 0) | {"joined": 3, "refused": 2}


def test_a_refused_push_frees_its_slot_for_one_that_waits(monkeypatch):
    """M = 1 and one slot: the second push sleeps until the first one, which is refused, gives its slot back."""
    server = Server(fedbuff(buffer_size=1), vector(0.0), max_slots=1)
    calls = iter([True])  # the first one is held up
    held = HeldUp(monkeypatch, InputAdapter, "ingest", lambda *_: next(calls, False))
    bad = start(lambda: check_error("non-finite", server.push, client=0, update=vector(np.nan), version=0))
    assert held.reached.wait(600)
    good = start(lambda: server.push(client=1, update=vector(), version=0))
    time.sleep(0.05)
    assert not good.done()
    held.go.set()
    assert bad.result(600)
    assert good.result(600).report.version == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("finish", ["push", "flush", "state_dict", "slots"])
@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), ca2fl(buffer_size=2)], ids=["fedbuff", "ca2fl"])
def test_an_interrupted_step_is_finished_by_the_next_call(monkeypatch, rule, moment, finish):
    def run(interrupted):
        server = Server(rule, vector(0.5), num_clients=4, max_slots=2)
        push_all(server, (0, 1, 2), lambda client: vector(client + 1.0), version=0)
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(ops, "apply", interrupt)
                check_raises(KeyboardInterrupt, server.push, client=3, update=vector(4.0), version=0)
            assert server.counts["joined"] == 4
            assert server.version == (2 if moment == "after" else 1)
        else:
            server.push(client=3, update=vector(4.0), version=0)
        if finish == "push":
            server.push(client=0, update=vector(5.0), version=1)
            server.push(client=1, update=vector(6.0), version=1)
        elif finish == "flush":
            assert server.flush() is None
        elif finish == "slots":
            server.push(client=0, update=vector(5.0), version=1, timeout=0)
        return server.state_dict()

    apply = ops.apply

    def interrupt(*args, **options):
        if moment == "after":
            apply(*args, **options)
        raise KeyboardInterrupt

    disturbed, undisturbed = run(True), run(False)
    same_state(disturbed, undisturbed)


@pytest.mark.parametrize("call", ["push", "flush", "state_dict", "step"])
def test_a_rule_that_calls_its_server_gets_an_error(call):
    def weigh(arrivals):
        if call == "push":
            server.push(client=9, update=vector(), version=0)
        elif call == "step":
            server.step([])
        else:
            getattr(server, call)()
        return np.ones(len(arrivals))

    server = Server(Rule("mine", "update", 1, weigh, Calibrate(False), lambda arrivals: Step("sgd")), vector())
    check_error(rf"\[{call}\] called from within the rule's weigh", server.push, client=0, update=vector(), version=0)
    refused = 2 if call == "push" else 1  # the rule's push, and the one that has called the rule
    assert (server.version, server.arrivals_waiting, server.counts["refused"]) == (0, 0, refused)


def test_pulls_during_a_round_in_place_wait_for_whole_params(slow):
    server = Server(fedbuff(buffer_size=1), vector(0.0), inplace=True)
    pusher = start(lambda: server.push(client=0, update=vector(), version=0))
    assert slow.reached.wait(600)
    pulled = start(server.pull)
    time.sleep(0.05)
    assert not pulled.done()
    slow.go.set()
    assert pusher.result(600).version == 1
    assert (pulled.result(600).version, pulled.result().params.tolist()) == (1, [1.0] * D)


def test_weights_are_decided_before_others_join():
    """The rule runs on a full buffer while no push can join; the rest of the step runs without the mutex."""
    seen = []

    def weigh(arrivals):
        seen.append(mutex_of(server).owner == threading.get_ident())
        return Uniform()(arrivals)

    server = Server(Rule("mine", "update", 2, weigh, Calibrate(False), lambda arrivals: Step("sgd")), vector())
    push_all(server, range(4), vector(), version=0)
    assert seen == [True, True]


def test_a_push_from_a_version_that_a_load_took_back(monkeypatch):
    """The version is checked before the vector is taken in; a state that is loaded meanwhile may not have made it."""
    server = Server(fedbuff(buffer_size=2), vector(0.0))
    without_fast_path(server)  # whose sweep cannot be held up from here
    old = server.state_dict()
    push_all(server, range(2), vector(), version=0)
    ingest = InputAdapter.ingest

    def load_meanwhile(*arguments):
        server.load_state_dict(old)
        return ingest(*arguments)

    monkeypatch.setattr(InputAdapter, "ingest", load_meanwhile)
    check_error("client 3 .* version 1, which an older state", server.push, client=3, update=vector(), version=1)
    assert (server.version, server.arrivals_waiting, server.counts["refused"]) == (0, 0, 1)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_push_that_began_before_a_close_is_refused(checkpoint, tmp_path, monkeypatch):
    server = Server(fedbuff(buffer_size=1), vector(0.0), store=tmp_path / "store")
    without_fast_path(server)
    held, late = HeldUp(monkeypatch, InputAdapter, "ingest"), partial(server.push, client=1, update=vector(), version=0)
    refused = start(lambda: check_error(r"\[push\] .* is closed", late, error=StoreError))
    assert held.reached.wait(600)
    server.close(checkpoint=checkpoint)
    held.go.set()
    assert refused.result(600)
    assert (server.joins, server.counts["refused"]) == (0, 1)
    monkeypatch.undo()
    with Server.open(tmp_path / "store") as again:
        assert (again.version, again.joins) == (0, 0)


def test_a_close_without_a_checkpoint_waits_for_the_round_that_is_made(slow, tmp_path):
    server = Server(fedbuff(buffer_size=1), vector(0.0), store=tmp_path / "store")
    made = start(lambda: server.push(client=1, update=vector(), version=0))
    assert slow.reached.wait(600)
    closed = start(lambda: server.close(checkpoint=False))
    time.sleep(0.1)
    assert not closed.done()
    slow.go.set()
    assert closed.result(600) is None
    assert made.result(600).report.version == 1
    with Server.open(tmp_path / "store") as again:
        assert again.version == 1


@pytest.mark.parametrize("call", ["push", "flush"])
def test_a_close_just_before_the_round_is_published(call, tmp_path):
    """The closing thread publishes it; the call that has made it returns what it did."""
    server = Server(fedbuff(buffer_size=1 if call == "push" else 2), vector(0.0), store=tmp_path / "store")
    run = rounds_of(server)

    def closed_after(job):
        run(job)
        job.driver = None  # its frames have ended
        start(lambda: server.close(checkpoint=False)).result(600)
        assert aggregator_of(server).admission.closed

    if call == "flush":
        server.push(client=1, update=vector(), version=0)
    make_rounds_by(server, closed_after)
    report = server.flush() if call == "flush" else server.push(client=1, update=vector(), version=0).report
    assert report.version == 1
    with Server.open(tmp_path / "store") as again:
        assert again.version == 1


@pytest.mark.parametrize("meanwhile", ["load", "close"])
def test_a_failed_step_is_reported_to_the_push_that_made_it(meanwhile, tmp_path):
    """Also if another thread publishes the failure first, and then loads a state or closes the server."""
    store = None if meanwhile == "load" else tmp_path / "store"
    server = Server(fedbuff(buffer_size=1), vector(0.0), store=store)
    saved, run = server.state_dict(), rounds_of(server)

    def failed(job):
        run(job)
        job.done[0], job.saved, job.driver = False, True, None  # as after a value that is not finite
        act = (lambda: server.load_state_dict(saved)) if meanwhile == "load" else (lambda: server.close())
        make_rounds_by(server, run)
        start(act).result(600)

    make_rounds_by(server, failed)
    check_error(r"\[push\] the step to version 1 wrote", server.push, client=1, update=vector(), version=0)
    assert server.counts["refused"] == 0 if meanwhile == "load" else aggregator_of(server).admission.closed


def test_the_push_that_completes_a_round_makes_it(slow, monkeypatch):
    """Another thread that waits for a slot does not take the round away from it."""
    server = Server(fedbuff(buffer_size=1), vector(0.0), max_slots=1)
    threads = []
    made = start(lambda: threads.append(threading.get_ident()) or server.push(client=1, update=vector(), version=0))
    assert slow.reached.wait(600)
    check_raises(BusyError, server.push, client=2, update=vector(), version=0, timeout=0)
    assert aggregator_of(server).admission.round.driver == threads[0]
    slow.go.set()
    assert made.result(600).report.version == 1


def test_a_signal_handler_amid_any_call_is_refused_or_served(monkeypatch):
    """A handler that runs while this thread holds the mutex must not wait for itself."""
    server = Server(fedbuff(buffer_size=10), vector(0.0))
    seen = []

    def handler():
        try:
            server.push(client=2, update=vector(), version=0, timeout=0)
            seen.append("served")
        except AffluxError:
            seen.append("refused")

    count_push = type(aggregator_of(server).admission).count_push
    calls = iter([handler])  # one signal
    monkeypatch.setattr(
        type(aggregator_of(server).admission),
        "count_push",
        lambda self, *facts: (next(calls, int)(), count_push(self, *facts)),
    )
    check_error("num_examples", server.push, client=1, update=vector(), version=0, num_examples=-1)
    assert seen == ["refused"]


def test_a_stored_traceback_of_an_interrupt_holds_no_version(monkeypatch):
    """The frame of the sweep is in it: with max_versions=2 the next steps need what it used."""
    server = Server(fedbuff(buffer_size=1), vector(0.0), max_versions=2)
    held = []
    with monkeypatch.context() as patch:

        def interrupt():
            if sys._getframe(1).f_code.co_name == "make" and aggregator_of(server).admission.round.done:
                raise KeyboardInterrupt
            return time.perf_counter()

        patch.setattr(afflux.aggregation.round, "perf_counter", interrupt)
        try:
            server.push(client=0, update=vector(), version=0)
        except KeyboardInterrupt as error:
            held.append(error)
    push_all(server, [0] * 3, vector(), timeout=1)
    assert server.version == 4
    assert held
