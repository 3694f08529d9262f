"""The loop that sends tasks and takes replies: its steps, its log, its end."""

import logging
import time

import pytest

from afflux import Join, Server
from afflux.integrations._loop import Loop
from afflux.integrations._versions import OncePerVersion
from afflux.rules import ca2fl, dp_fedbuff, fedasync, fedbuff
from conftest import check_error
from core_runs import MODEL, Clock, Echo, looped, replied, run_of, trained
from pairwise import soak


def test_what_is_sent_is_made_once_per_version():
    server, made = Server(fedbuff(buffer_size=1), MODEL), []
    model_of = OncePerVersion(lambda version: made.append(version.version) or object())
    first = server.pull()
    assert model_of(first) is model_of(server.pull())
    server.push(client=1, version=first, update=MODEL)
    assert model_of(server.pull()) is model_of(server.pull())
    assert made == [0, 1]


def test_the_loop_notes_each_step_once():
    transport = Echo()
    run = looped(transport, 7, evaluate_every=3)
    assert transport.steps == [(step, 2) for step in range(1, 8)]
    assert transport.evaluated == [0, 3, 6, 7]
    assert run.server.version == 7
    assert run.server.tasks == ()


@pytest.mark.parametrize("duplicates", ["latest", "reject"])
@pytest.mark.parametrize("evaluate_every", [1, 2])
def test_a_run_ends_when_too_few_clients_may_be_in_another_round(caplog, duplicates, evaluate_every):
    transport, rule = Echo((1, 2, 3)), dp_fedbuff(buffer_size=2, participations=1)
    run = looped(transport, 3, rule, evaluate_every=evaluate_every, server_options={"duplicates": duplicates})
    assert (run.server.version, transport.evaluated, run.server.tasks) == (1, [0, 1], ())
    assert "The run ends after step 1 of 3: a round needs 2 clients" in caplog.text


@pytest.mark.parametrize("hook", ["step_done", "evaluate"])
def test_a_step_becomes_due_while_another_one_is_noted(hook):
    """What is evaluated as a version is that version, and the last one is the result."""

    class Slow(Echo):
        def note(self, name):
            if name == hook:
                server = run.server
                server.push(client=9, version=server.version, update=MODEL)
                time.sleep(0.02)

        def step_done(self, step, metrics):
            super().step_done(step, metrics)
            self.note("step_done")

        def evaluate(self, newest):
            self.evaluated.append((newest.version, float(newest.params[0])))
            self.note("evaluate")

    transport = Slow()
    run = run_of(fedbuff(buffer_size=2), num_clients=3, poll_interval=0.001, server_options={"flush_after": 0.01})
    with Loop(run, transport) as loop:
        loop.run(3)
        versions = {version: value for version, value in transport.evaluated}
        assert len(versions) == len(transport.evaluated), "each once"
        assert {step for step, _ in transport.steps} | {0} == versions.keys()
        assert (loop.result.version, float(loop.result.params[0])) == transport.evaluated[-1]


def test_steps_are_late_also_where_replies_come_in_each_turn():
    class Busy(Echo):
        turns = 0

        def replies(self, keys):
            replies = super().replies(keys)
            assert replies
            self.turns += 1
            assert self.turns < 10, "no step"
            return replies

    transport = Busy()
    run = looped(transport, 3, fedbuff(buffer_size=100), server_options={"flush_after": 1e-9})
    assert ([step for step, _ in transport.steps], run.server.version) == ([1, 2, 3], 3)


def test_the_loop_logs_steps_and_counts(tmp_path, caplog):
    def lines(steps):
        caplog.clear()
        with caplog.at_level(logging.INFO, "afflux"):
            looped(Spoken(), steps, store=tmp_path / "store", concurrency=1)
        return [record.getMessage() for record in caplog.records]

    class Spoken(Echo):
        def step_done(self, step, metrics):
            return f"{len(metrics)} of step {step}"

        def read(self):
            return trained(self.number + 1, metrics={"accuracy": 0.5})

        def finish(self):
            self.logger.info("finished")

    first = lines(2)
    assert [line.split(" staleness")[0] for line in first[:2]] == ["[STEP 1] 2 of step 1", "[STEP 2] 2 of step 2"]
    assert first[0].endswith("staleness: mean 0.0, largest 0")
    assert first[2:] == ["finished", "Made 2 steps: {'joined': 4}"]
    going_on = f"Going on from step 2 of store {tmp_path / 'store'}"
    assert lines(2) == [going_on, "finished", "No step was needed: the store holds step 2 of 2: {'joined': 4}"]
    assert lines(3)[0] == going_on
    assert lines(5)[-1] == "Made 2 steps, after 3 of earlier runs; of all runs: {'joined': 10}"


def test_a_run_that_all_clients_have_left_says_so_at_once_and_each_minute(caplog):
    clock, transport = Clock(), Echo()
    with Loop(run_of(num_clients=3, clock=clock), transport) as loop:
        for there, lines in (
            ([], ["No client is connected: the run waits"]),
            *[([], [])] * 19,
            ([], ["No client is connected: the run waits"]),
            ([1, 2], ["2 clients are connected again"]),
            ([1], []),
            ([], ["No client is connected: the run waits"]),
        ):
            transport.there, clock.now = there, clock.now + 3.0
            caplog.clear()
            with caplog.at_level(logging.INFO, "afflux"):
                loop.send_out()
            assert caplog.messages == lines


def test_clients_get_tasks_when_dispatch_size_places_are_free():
    """With M and the concurrency, all replies of a step are of its version."""
    transport = Echo(clients=range(6))
    transport.replies = lambda keys, replies=transport.replies: replies(keys[:1])  # one at a time
    for size, stale in ((4, False), (1, True)):
        run = looped(
            transport, 5, fedbuff(buffer_size=4), concurrency=4, dispatch_size=size, server_options={"log": True}
        )
        assert any(entry.staleness for entry in run.server.log if isinstance(entry, Join)) is stale
    check_error("dispatch_size is 5, must be at most concurrency, 4", run_of, concurrency=4, dispatch_size=5)
    run = run_of(num_clients=2, dispatch_size=9)  # at most as many as may train
    run.clients.are([1, 2])
    assert sorted(run.choose()) == [1, 2]


@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), fedasync(), *soak(ca2fl(buffer_size=2))])
def test_updates_that_are_all_0_are_said_once(rule, caplog):
    for value, said in ((0.0, True), (1.0, False)):
        run = run_of(rule, client_lr=0.1, local_steps=1)
        for _ in range(2):
            for client in (1, 2):
                model = run.server.pull().params[0] + value  # the newest model's elements are equal
                assert replied(run, client, lambda model=model: trained(model)).status == "joined"
        lines = [line for line in caplog.messages if "exactly 0" in line]
        assert (
            lines == ["All updates of step 1 are exactly 0: its clients replied with the models that they got"] * said
        )
        caplog.clear()


def test_a_reply_without_examples_says_so(caplog):
    transport = Echo()
    transport.read = lambda: trained(num_examples=0)
    check_error("num_examples is 0", looped, transport, 3, max_failures=2, retry_after=0.001, error=RuntimeError)
    assert "its reply is empty. num_examples is 0" in caplog.text


def test_clients_that_fail_at_once_do_not_end_the_run_of_the_others():
    transport = Echo(fails={2}, gone={3})
    run = looped(transport, 300)
    assert run.server.version == 300
    assert 2 <= run.lost["failed"] <= 10


def test_the_loop_ends_when_nobody_is_of_use():
    transport = Echo(fails={1, 2}, gone={3})
    check_error("none of 3 clients is of", looped, transport, 3, max_failures=2, retry_after=0.001, error=RuntimeError)


class Timed(Echo):
    """Clients that reply within a second; the server does something slow, 100 s each time."""

    def __init__(self, clock, slow="", silent=()):
        super().__init__()
        self.clock, self.slow, self.silent, self.sent_at = clock, slow, set(silent), {}

    def take_time(self, name):
        self.clock.now += 100.0 * (name == self.slow)

    def send(self, address, task):
        key = super().send(address, task)
        self.sent_at[key] = self.clock.now
        if address in self.silent:
            del self.waiting[key]
        return key

    def replies(self, keys):
        return super().replies([key for key in keys if self.clock.now >= self.sent_at[key] + 1.0])

    def wait(self, seconds):
        self.clock.now += 0.4

    def step_done(self, step, metrics):
        self.take_time("step_done")

    def evaluate(self, newest):
        self.take_time("evaluate")

    def notes(self):
        self.take_time("checkpoint")
        return {}


@pytest.mark.parametrize("slow", ["step_done", "evaluate", "checkpoint", "commit", "choose"])
def test_the_time_of_the_server_is_no_clients(slow, tmp_path, monkeypatch):
    """Of metrics, evaluations, checkpoints, steps and choices that take longer than the timeout."""
    clock = Clock()
    transport = Timed(clock, slow, silent=[3])
    run = run_of(num_clients=3, clock=clock, timeout=10.0, store=tmp_path / "store", checkpoint_every=1)
    push = run.server.push
    monkeypatch.setattr(run.server, "push", lambda **reply: transport.take_time("commit") or push(**reply))
    run.clients.select = lambda idle, count: transport.take_time("choose") or idle[:count]
    with Loop(run, transport) as loop:
        loop.run(30)
    assert run.server.counts["joined"] == 60
    assert run.server.counts["expired"] == run.lost["failed"] == run.lost["unknown"] == 0
    assert 1 <= run.lost["overdue"] <= 3  # of the silent client
    assert clock.now > 3000.0


def test_a_reply_that_is_there_is_taken_before_its_client_is_judged():
    """One look finds nothing just before the timeout, and the next one a reply just after it."""
    clock = Clock()
    transport = Timed(clock)
    with Loop(run_of(fedbuff(buffer_size=3), num_clients=3, clock=clock, timeout=1.1), transport) as loop:
        loop.send_out()
        for _ in range(4):  # at 0, .4, .8 and 1.2 s
            loop.take_replies(1)
        assert loop.training.counts["joined"] == 3
        assert loop.training.lost == {"unknown": 0, "failed": 0, "overdue": 0}
