"""accumulate=True under threads, interrupts and forks: nothing is added twice, lost, or added in another order."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from afflux import AffluxError, BusyError, Calibrate, Rule, Server, ops, replay
from afflux.ops import Step
from afflux.rules import RULES, fadas, fedbuff
from afflux.rules.rule import Weights
from afflux.rules.weights import Uniform
from conftest import check_error, check_raises, push_all, raising, same_state
from held_up import HeldUp, start
from inside import aggregator_of, slots_taken
from test_concurrency import vector, wait_for


def streaming(buffer_size=3, **options):
    return Server(fedbuff(buffer_size=buffer_size), vector(0.5), accumulate=True, log=True, **options)


def same(first, second):
    """Both states, but for the pushes that were refused."""
    first, second = first.state_dict(), second.state_dict()
    first["meta"]["counts"].pop("refused"), second["meta"]["counts"].pop("refused")
    same_state(first, second)


@pytest.mark.parametrize("max_slots", [None, 1])
@pytest.mark.parametrize("name", ["fedbuff", "fedavg", "fedadam", "fedasync"])
def test_threads_push_and_a_replay_gives_the_same_bits(name, max_slots):
    size, rng = 3000, np.random.default_rng(4)
    vectors = [rng.standard_normal(size).astype(np.float32) for _ in range(20)]

    def fresh(**options):
        rule = RULES[name](**({} if name == "fedasync" else {"buffer_size": 7}))
        return Server(
            rule, np.zeros(size), dtype="float64", slot_dtype="bfloat16", accumulate=True, log=True, **options
        )

    server, picks = fresh(max_slots=max_slots), {}

    def client(number):
        own = np.random.default_rng(number)
        for _ in range(60):
            pick = int(own.integers(0, 20))
            version = max(0, server.version - int(own.integers(0, 3)))
            picks[push_all(server, [number], vectors[pick], version=version, num_examples=pick + 1).join] = pick

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(client, range(6)))
    assert server.counts["joined"] == 360
    same(server, replay(server.log, fresh(), lambda join: vectors[picks[join.number]]))
    assert slots_taken(server) == 0  # the states that were compared hold all terms


def test_a_join_waits_until_the_term_before_it_is_added(monkeypatch):
    """So the terms are added in the order of the joins; meanwhile params can be read."""
    server, slow = streaming(max_slots=4), HeldUp(monkeypatch, ops, "apply")
    pushes = [start(lambda i=i: server.push(client=i, update=vector(i + 0.1), version=0)) for i in range(3)]
    assert slow.reached.wait(600)
    wait_for(lambda: slots_taken(server) == 3)
    assert server.pull().version == server.version == 0
    assert server.counts["joined"] == 1
    slow.go.set()
    assert all(push.result(600).status == "joined" for push in pushes)
    assert (server.version, slots_taken(server)) == (1, 0)
    same(server, replay(server.log, streaming(), lambda join: vector(join.client_id + 0.1)))


def of_a_round(sweep, **_):
    """Whether a sweep is a round's own, and adds no term."""
    return sweep.out is not sweep.params and sweep.out.dtype == "float32"


def test_the_next_total_fills_while_a_round_is_made(monkeypatch):
    """It has a vector of its own, and neither disturbs the other."""
    server, held = streaming(2), HeldUp(monkeypatch, ops, "apply", of_a_round)
    server.push(client=0, update=vector(1.0), version=0)
    second = start(lambda: server.push(client=1, update=vector(1.0), version=0))
    assert held.reached.wait(600)
    receipt = server.push(client=2, update=vector(5.0), version=0)
    assert (receipt.status, receipt.staleness, server.version) == ("joined", 1, 0)
    assert server.arrivals_waiting == 1
    held.go.set()
    assert second.result(600).status == "joined"
    server.push(client=3, update=vector(5.0), version=1)
    same(server, replay(server.log, streaming(2), lambda join: vector(1.0 if join.client_id < 2 else 5.0)))


def test_a_single_thread_needs_one_slot():
    server = streaming(5, max_slots=4)
    push_all(server, range(10), vector)
    assert (server.version, aggregator_of(server).plane.slot_pools[0].allocated) == (2, 1)


def test_a_failed_step_with_a_term_for_the_next_one(monkeypatch):
    """A state can be loaded, as the message says: load_state_dict does not wait for the failed round."""
    rule, update = fedbuff(buffer_size=2, server_lr=1e17), vector(1e15)
    server = Server(rule, vector(), accumulate=True, max_slots=6)
    big = server.state_dict()
    big["arrays"]["params"] = vector(np.finfo(np.float32).max)
    server.load_state_dict(big)
    held = HeldUp(monkeypatch, ops, "apply", of_a_round)
    server.push(client=0, update=update, version=0)
    second = start(lambda: check_error("not finite", server.push, client=1, update=update, version=0))
    assert held.reached.wait(600)
    assert server.push(client=2, update=update, version=0).status == "joined"
    held.go.set()
    assert second.result(600)
    state = Server(rule, vector(), accumulate=True).state_dict()
    start(lambda: server.load_state_dict(state)).result(600)
    assert server.push(client=3, update=vector(), version=0).status == "joined"


def test_an_interrupt_after_a_sweep_leaves_no_slot_behind(monkeypatch):
    server, apply = streaming(2, max_slots=4), ops.apply

    def interrupt(*args, **options):
        apply(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "apply", interrupt)
    check_raises(KeyboardInterrupt, server.push, client=0, update=vector(), version=0)
    monkeypatch.setattr(ops, "apply", apply)
    server.push(client=1, update=vector(), version=0)
    assert (server.version, slots_taken(server)) == (1, 0)


class Skips(Uniform):
    """No buffer is good enough for a step."""

    def __call__(self, arrivals):
        return Weights(super().__call__(arrivals), skip=True)


def test_a_buffer_without_a_step_leaves_no_term():
    rule = Rule("skips", "update", 3, Skips(), Calibrate(cached=False), lambda arrivals: Step("sgd"))
    server = Server(rule, vector(0.5), accumulate=True, max_slots=4)
    statuses = [server.push(client=client, update=vector(), version=0).status for client in range(3)]
    assert statuses == ["joined"] * 3
    assert (server.version, server.arrivals_waiting, server.params[0]) == (0, 0, 0.5)
    assert slots_taken(server) == 0


def test_push_waits_for_a_slot_or_raises():
    server = streaming(max_slots=1)
    slot = aggregator_of(server).plane.reserve()  # as of a push in progress
    check_error("all 1 .*max_slots", server.push, client=1, update=vector(), version=0, timeout=0.02, error=BusyError)
    del slot
    assert server.push(client=1, update=vector(), version=0, timeout=0).status == "joined"


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("hit", [1, 2, 3, 4], ids=["first term", "second term", "last term", "the round"])
@pytest.mark.parametrize("finish", ["push", "flush", "discard", "state_dict", "slots"])
def test_an_interrupted_term_is_added_by_the_next_call(monkeypatch, moment, hit, finish):
    """Sweep by sweep of a round: the arrival has joined, and counts once."""
    apply, sweeps = ops.apply, []

    def interrupt(*args, **options):
        sweeps.append(None)
        if len(sweeps) != hit:
            return apply(*args, **options)
        if moment == "after":
            apply(*args, **options)
        raise KeyboardInterrupt

    def run(interrupted):
        server = Server(fadas(buffer_size=3), vector(0.5), accumulate=True, max_slots=1)
        caught = 0
        with monkeypatch.context() as patch:
            if interrupted:
                patch.setattr(ops, "apply", interrupt)
            for client in range(3 if hit > 2 else hit):
                try:
                    server.push(client=client, update=vector(client + 1.0), version=0)
                except KeyboardInterrupt:
                    caught += 1
        assert caught == interrupted
        assert server.counts["joined"] == (3 if hit > 2 else hit)
        if finish == "slots":
            server.push(client=7, update=vector(5.0), version=0, timeout=0)
        elif finish == "push":
            push_all(server, range(4), vector(6.0), version=0)
        elif finish != "state_dict":
            getattr(server, finish)()
        server.state_dict()
        assert slots_taken(server) == 0
        return server

    same(run(True), run(False))


def test_an_interrupt_by_an_error_of_the_sweep(monkeypatch):
    """Out of memory, say, after the join: the push raises, the arrival has joined, and is added before the next one."""
    server, twin = streaming(), streaming()

    with monkeypatch.context() as patch:
        patch.setattr(ops, "apply", raising(MemoryError))
        for _ in range(2):
            check_raises(MemoryError, server.push, client=0, update=vector(1.0), version=0)
    assert (server.counts["joined"], server.counts["refused"], slots_taken(server)) == (1, 1, 1)
    for each, first in (server, 1), (twin, 0):
        push_all(each, range(first, 3), lambda client: vector(client + 1.0), version=0)
    same(server, twin)


@pytest.mark.parametrize("call", ["push", "flush", "state_dict"])
def test_a_call_from_amid_a_term_gets_an_error(monkeypatch, call):
    """As a signal handler would make it."""
    server, apply, said = streaming(), ops.apply, []

    def handler(*args, **options):
        with pytest.raises(AffluxError, match=rf"\[{call}\] called from within .* amid another call") as caught:
            server.push(client=9, update=vector(), version=0) if call == "push" else getattr(server, call)()
        said.append(caught)
        apply(*args, **options)

    monkeypatch.setattr(ops, "apply", handler)
    server.push(client=0, update=vector(), version=0)
    assert len(said) == server.arrivals_waiting == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_while_a_term_is_added_raises_in_the_child_and_one_at_rest_goes_on():
    from test_fork import run

    run("""
    server = Server(fedbuff(buffer_size=3), np.zeros(d, np.float32), num_threads=2, accumulate=True)
    server.push(client=0, update=one, version=0)
    child = os.fork()
    if child == 0:
        server.push(client=1, update=one, version=0)
        server.push(client=2, update=one, version=0)
        os._exit(int(server.params[7]) + 10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    pusher, go = amid_a_sweep(lambda: server.push(client=1, update=one, version=0))
    child = os.fork()
    if child == 0:
        refuses("", lambda: server.push(client=2, update=one, version=0))
        os._exit(0)
    go.set()
    pusher.join(600)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    server.push(client=2, update=one, version=0)
    assert server.version == 1 and server.params[7] == 1
    """)
