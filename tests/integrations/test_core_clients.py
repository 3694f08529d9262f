"""Which clients get tasks: slow ones, those that fail or never reply, and many at the same time."""

import random
from functools import partial

import numpy as np
import pytest

from afflux.integrations._appfl_clients import KnownClients
from afflux.integrations._core import Trained, TrainingRun
from afflux.integrations._settings import RunSettings
from afflux.rules import fedasync, fedbuff, gsgm
from conftest import check_error
from core_runs import MODEL, Clock, OutOfMemory, replied, run_of, trained


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("key", "rule"), [(None, fedbuff), ("said", fedbuff), (None, fedasync), ("said", fedasync)])
def test_a_slow_client_does_not_fail(key, rule, delta):
    """Its version is given up by max_staleness."""
    model = {**MODEL, "n": np.zeros((), np.int64)}
    made = RunSettings(server_options={"max_staleness": 1})
    options = {} if rule is fedasync else {"buffer_size": 1}
    run = TrainingRun(rule(**options), model, made, num_clients=4, key=key)
    run.clients.are([1, 77])
    run.sent("slow", run.assign(77), 77)
    for _ in range(4):
        run.sent("a", run.assign(1), 1)
        reply = Trained({name: array + 1 for name, array in model.items()}, client="ann", delta=delta)
        assert run.receive("a", lambda reply=reply: reply).status == "joined"
    slow = Trained(model, client="slow", delta=delta)
    assert run.receive("slow", lambda: slow).status in ("expired", "dropped")
    assert run.server.tasks == ()
    assert run.server.version == 4
    assert 77 in run.choose()


@pytest.mark.parametrize("key", [None, "name"])
def test_a_reply_after_the_timeout_has_no_effect(key):
    """Also one that comes before the run looks for assignments that exceed it, and one that first names its client."""
    run = run_of(fedbuff(buffer_size=1), key=key, clock=(clock := Clock()), timeout=10.0)
    run.clients.are([1, 2])
    for address, now, status in ((1, 9.0, "joined"), (2, 19.0, "expired")):
        run.sent("a", run.assign(address), address)
        clock.now = now
        assert run.receive("a", partial(trained, client=f"client {address}")).status == status
    assert run.server.version == 1
    assert run.server.tasks == ()
    assert set(run.choose()) == {1, 2}  # it is slow, and has not failed
    assert run.lost["failed"] == 0


def test_a_task_that_cannot_be_sent_is_closed():
    run = run_of(clock=(clock := Clock()))
    run.clients.are([1])
    run.sent(None, run.assign(1), 1)
    assert run.server.tasks == ()
    assert run.lost["failed"] == 1
    assert run.choose() == []  # it rests
    clock.now = 0.6
    assert run.choose() == [1]


def test_a_client_without_examples_rests():
    run = run_of()
    run.clients.are([1, 2])
    assert replied(run, 1, partial(trained, num_examples=0)).status == "empty"
    assert run.choose() == [2]


def test_a_client_that_fails_rests_for_longer_each_time():
    run = run_of(clock=(clock := Clock()), retry_after=1.0, max_failures=3)
    run.clients.are([1, 2])
    for rest in (1, 2, 4, 8):
        run.sent("a", run.assign(1), 1)
        run.fail("a", "out of memory")
        assert run.choose() == [2]
        clock.now += rest - 0.1
        assert run.choose() == [2]
        clock.now += 0.2
        assert sorted(run.choose()) == [1, 2]
        run.clients.require_some_of_use()  # 2 has not failed
    assert replied(run, 1).status == "joined"
    run.sent("a", run.assign(1), 1)
    run.fail("a")
    clock.now += 1.1
    assert sorted(run.choose()) == [1, 2]  # the first failure after one that was of use
    for _ in range(3):
        for address in (1, 2):
            run.sent("a", run.assign(address), address)
            run.fail("a", "out of memory")
    text = r"none of 2 clients is of use: .* 3 times in a row or more, .*out of memory"
    check_error(text, run.clients.require_some_of_use, error=RuntimeError)
    run.clients.are([1, 2, 3])
    run.clients.require_some_of_use()


def test_a_client_that_never_replies_holds_a_place_for_a_small_part_of_the_time():
    run = run_of(clock=(clock := Clock()), num_clients=2, concurrency=1, timeout=10.0)
    run.clients.are(["dead", "good"])
    held = {"dead": 0, "good": 0}
    while clock.now < 3000:
        for address in run.choose():
            run.sent(address, run.assign(address), address)
        for key in [*run.assignments]:
            held[key] += 1
            if key == "good":
                run.receive(key, trained)
        clock.now += 1
        run.expire()
    assert held["dead"] < 0.05 * held["good"]
    assert 3 <= run.lost["overdue"] <= 9


def test_more_than_64_clients_at_the_same_time_lose_no_version():
    """Each of them trains from a version of its own."""
    run = run_of(fedasync(), num_clients=100)
    for client in range(100):
        run.sent(str(client), run.assign(client), client)
        assert replied(run, "other").status == "joined"
    assert run.server.versions_held >= 100
    statuses = {run.receive(str(client), trained).status for client in range(100)}
    assert statuses == {"joined"}


def test_open_tasks_and_versions_stay_bounded():
    """10,000 replies in any order; some never come, some clients leave, some replies cannot be read."""
    rng, clock = random.Random(0), Clock()
    run = run_of(fedbuff(buffer_size=3), num_clients=100, concurrency=20, timeout=50.0, clock=clock)
    run.clients.are(range(100))
    silent, came, tasks, versions = set(), 0, 0, 0
    for number in range(10**7):
        for address in run.choose():
            number += 1
            key = None if rng.random() < 0.01 else f"{address}-{number}-{clock.now}"
            run.sent(key, run.assign(address), address)
            if key is not None and rng.random() < 0.01:
                silent.add(key)
        for key in rng.sample([*run.assignments], min(5, len(run.assignments))):
            if key not in silent:
                came += 1
                bad = rng.random() < 0.01
                run.receive(key, OutOfMemory(MemoryError()) if bad else trained)
        clock.now += 1
        run.expire()
        tasks = max(tasks, len(run.server.tasks))
        versions = max(versions, run.server.versions_held)
        if came >= 10_000:
            break
    assert run.server.counts["faulty"] > 50
    assert run.lost["overdue"] > 20
    assert run.lost["failed"] > 50
    assert tasks <= 20
    assert versions <= 20 + 3


def test_the_slowest_reply_is_known():
    run = run_of(clock=(clock := Clock()))
    for key, seconds in (("a", 2.0), ("b", 5.0), ("c", 1.0)):
        run.sent(key, run.assign(1))
        clock.now += seconds
        _ = run.fail(key) if key == "b" else run.receive(key, trained)
    assert run.slowest == 5.0
    run.note_duration(start=1.0)
    assert run.slowest == 7.0


def test_a_client_of_appfl_that_has_entered_gets_the_newest_model_without_a_task():
    run = run_of(gsgm(buffer_size=1), num_clients=2, client_lr=0.1, local_steps=1)
    known = KnownClients(run)
    for client, version in ((1, 0), (1, 1), (2, 1), (1, 2)):
        known.of(client)
        assert known.assign(client).version == version
        is_blocked = client in run.server.entered
        assert (client in run.assignments) is not is_blocked
        assert (run.receive(client, trained) is None) is is_blocked
    assert run.counts["unknown"] == 1
    assert (run.server.version, run.server.entered) == (3, {1})
