"""flush_after: a step with the arrivals that have waited for too long, made by the next `poll`."""

from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import Cut, Server, StoreError, replay
from afflux.aggregation.round import Round
from afflux.rules import ca2fl, fadas, fedbuff, gsgm, zenopp
from checked_out import D, push, vector
from conftest import bits, check_error, check_raises, raising
from held_up import start
from inside import aggregator_of, mutex_of, stopped_clock, store_of

CLIENTS = 9


def waiting(set_time, now=1000.0):
    """A function that lets the time of servers go on."""

    def wait(seconds):
        nonlocal now
        now += seconds
        set_time(now)

    return wait


@pytest.fixture
def wait():
    with stopped_clock(1000.0) as set_time:
        yield waiting(set_time)


CALLS = {
    "push": lambda server: push(server, 8),
    "checkout": lambda server: server.checkout(8),
    "tasks": lambda server: server.tasks,
    "pull": lambda server: server.pull(),
    "params": lambda server: server.params,
    "pull(out)": lambda server: server.pull(out=vector()),
    "rows": lambda server: server.rows,
    "rule_vectors": lambda server: server.rule_vectors,
    "scalars": lambda server: server.scalars,
    "state_dict": lambda server: server.state_dict(),
    "replace_rule": lambda server: server.replace_rule(fedbuff(buffer_size=4)),
}


@pytest.mark.parametrize("call", CALLS)
def test_only_poll_makes_the_step_that_is_late(wait, call):
    seen = []
    server = Server(fedbuff(buffer_size=5), vector(0.0), flush_after=10, on_step=seen.append)
    push(server, 1, 1.0)
    wait(6)
    push(server, 2, 3.0)
    wait(4)
    assert server.poll() is None  # ten seconds are not longer than ten seconds
    wait(0.5)
    CALLS[call](server)
    assert (server.version, seen) == (0, [])
    assert server.poll() is seen[0]
    assert (server.version, seen[0].client_ids[:2]) == (1, (1, 2))
    assert server.poll() is None


def test_the_time_counts_from_the_first_arrival_in_the_buffer(wait):
    server = Server(fedbuff(buffer_size=2), vector(0.0), flush_after=10.0)
    wait(100)
    push(server)
    wait(9)
    assert server.poll() is None
    push(server)  # a full buffer
    wait(9)
    push(server)
    wait(9)
    assert server.poll() is None
    assert server.discard() == 1
    wait(100)
    assert server.poll() is None
    push(server)
    wait(11)
    assert server.poll().version == 2


def test_a_client_that_replaces_its_arrival_does_not_put_the_step_off(wait):
    server = Server(fedbuff(buffer_size=5), vector(0.0), duplicates="latest", flush_after=10)
    for value in range(4):
        push(server, 1, value)
        wait(3)
    assert server.poll().client_ids == (1,)
    assert server.params[0] == 3.0


def test_a_rule_that_pulls_while_a_late_step_is_decided(wait):
    pulled = []

    def weigh(arrivals):
        pulled.append(server.pull().version)
        return np.ones(len(arrivals))

    server = Server(replace(fedbuff(buffer_size=5), weigh=weigh), vector(0.0), flush_after=10)
    push(server)
    wait(11)
    assert server.poll().version == 1
    assert pulled == [0]


def test_pulls_do_not_wait_for_the_weigh_part_of_another_thread(wait):
    """It holds the mutex."""
    started, go_on, slow = Event(), Event(), Event()

    def weigh(arrivals):
        if slow.is_set():
            started.set()
            assert go_on.wait(600)
        return np.ones(len(arrivals))

    server = Server(replace(fedbuff(buffer_size=2), weigh=weigh), vector(0.0), flush_after=10)
    push(server, "first")
    slow.set()
    other = start(lambda: push(server, "other"))
    assert started.wait(600)
    wait(11)
    assert (server.pull().version, server.arrivals_waiting) == (0, 1)
    assert not other.done()
    go_on.set()
    assert other.result(30).status == "joined"
    assert server.version == 1


def test_an_interrupt_of_a_late_step_leaves_the_mutex_free(wait, monkeypatch):
    server = Server(replace(fedbuff(buffer_size=2), weigh=raising(KeyboardInterrupt)), vector(0.0), flush_after=10)
    push(server)
    wait(11)
    check_raises(KeyboardInterrupt, server.poll)
    assert not mutex_of(server).locked()
    assert server.discard() == 1


def test_a_round_that_was_interrupted_does_not_hold_up_a_late_step(wait, monkeypatch):
    server = Server(fedbuff(buffer_size=2), vector(0.0), flush_after=10)
    with monkeypatch.context() as patch:
        patch.setattr(Round, "make", raising(KeyboardInterrupt))
        push(server, 0)
        check_raises(KeyboardInterrupt, push, server, 1)
    assert push(server, 2).status == "joined"
    wait(11)
    assert server.poll().version == 2


def test_none_waits_for_a_full_buffer(wait):
    server = Server(fedbuff(buffer_size=5), vector(0.0))
    push(server)
    wait(1e9)
    assert server.poll() is None
    assert server.version == 0


def test_arrivals_in_a_sum(wait):
    server = Server(fedbuff(buffer_size=5), vector(0.0), accumulate=True, flush_after=10)
    push(server, 1, 1.0)
    push(server, 2, 3.0)
    wait(11)
    assert server.poll().client_ids == (1, 2)
    assert server.params.tolist() == [2.0] * D


def test_a_step_that_cannot_be_made_raises(wait):
    """Zeno++ has no validation gradient yet."""
    server = Server(replace(zenopp(), buffer_size=3), vector(0.0), flush_after=10)
    push(server, 1)
    wait(11)
    for client in (2, 3):
        if server.arrivals_waiting < 2:
            assert push(server, client).status == "joined"
        assert server.checkout(client).version == 0
        assert len(server.tasks) == client - 1
        check_error("the rule vector 'validation' was never handed in", server.poll)
    assert (server.version, server.arrivals_waiting) == (0, 2)
    server.set_rule_vector("validation", vector(0.1))
    assert server.poll().client_ids == (1, 2)


def test_poll_closes_tasks_also_where_it_raises(wait):
    server = Server(fedbuff(buffer_size=3), vector(0.0), flush_after=10)
    server.checkout(1, lease=60)
    task = server.checkout(2)
    server.replace_rule(replace(server.rule, weigh=lambda arrivals: "abc"))
    push(server)
    wait(61)
    check_error("must be numbers", server.poll)
    assert [each.task for each in aggregator_of(server).admission.opened_tasks()] == [task.id]


def test_after_a_reopen_the_time_counts_from_there(wait, tmp_path):
    path = tmp_path / "store"
    with Server(fedbuff(buffer_size=5), vector(0.0), store=path, flush_after=10) as server:
        push(server)
        wait(9)
    wait(100)
    with Server.open(path) as server:
        assert server.options.flush_after == 10.0
        assert server.poll() is None
        wait(11)
        assert server.poll().version == 1
    with Server.open(path) as server:
        assert (server.version, server.arrivals_waiting) == (1, 0)


def test_a_late_step_that_cannot_be_saved(wait, tmp_path, monkeypatch):
    server = Server(fedbuff(buffer_size=5), vector(0.0), store=tmp_path / "store", flush_after=10)
    push(server, 1)
    wait(11)
    with monkeypatch.context() as patch:
        patch.setattr(type(store_of(server)), "save_round", raising(StoreError, "[store] the disk is full"))
        check_error("the disk is full", server.poll, error=StoreError)
        assert push(server, 2).status == "joined"
        assert server.version == 0
    assert server.flush().client_ids == (2,)
    assert server.version == 2
    server.close()


# Random histories, and their replays, which have no clock


RULES = {
    "fedbuff": lambda: fedbuff(buffer_size=3),
    "streaming": lambda: fedbuff(buffer_size=3),
    "ca2fl": lambda: ca2fl(buffer_size=4),
    "fadas": lambda: fadas(buffer_size=3),
    "gsgm": lambda: gsgm(buffer_size=2),
}
MOVES = st.one_of(
    *[st.tuples(st.just("push"), st.integers(0, CLIENTS - 1), st.integers(0, 2))] * 4,
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["poll", "flush", "discard", "checkout", "tasks"])),
)


@given(moves=st.lists(MOVES, max_size=40), name=st.sampled_from(sorted(RULES)))
@settings(max_examples=100, deadline=None)
def test_a_replay_makes_the_same_steps_without_a_clock(moves, name):
    def fresh():
        options = {"num_clients": CLIENTS, "log": True, "accumulate": name == "streaming", "flush_after": 10}
        return Server(RULES[name](), vector(0.5), **options)

    vectors = {}
    with stopped_clock(1000.0) as set_time:
        wait = waiting(set_time)
        server = fresh()
        for move, *facts in moves:
            late, before = aggregator_of(server).admission.late, server.version
            if move == "wait":
                wait(facts[0])
            elif move == "push":
                client, back = facts
                value = np.random.default_rng([client, server.joins]).standard_normal(D).astype(np.float32)
                receipt = server.push(client=client, **{server.rule.kind: value}, version=max(0, server.version - back))
                vectors[receipt.join] = value
            elif move == "checkout":
                server.checkout(CLIENTS)  # never blocked in a pass: it has not pushed
            elif move == "tasks":
                _ = server.tasks
            else:
                getattr(server, move)()
            if late and move in ("poll", "flush"):
                assert server.version > before
            if move in ("checkout", "tasks", "discard"):
                assert server.version == before
        again = fresh()

        def pushed(join):
            wait(20)
            return vectors[join.number]

        replay(server.log, again, pushed)
        assert again.options.flush_after == 10
    assert bits(again.params) == bits(server.params)
    assert again.version == server.version
    assert again.state_dict()["meta"]["scalars"] == server.state_dict()["meta"]["scalars"]
    assert again.arrivals_waiting == server.arrivals_waiting
    assert [entry for entry in again.log if isinstance(entry, Cut)] == [e for e in server.log if isinstance(e, Cut)]
