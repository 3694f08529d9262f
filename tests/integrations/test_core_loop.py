"""The loop that sends tasks and takes replies: its steps, its log, its end."""

import logging

import pytest

from afflux import Server
from afflux.integrations._versions import OncePerVersion
from afflux.rules import fedbuff
from core_runs import MODEL, Echo, looped


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


def test_the_loop_logs_steps_and_counts(tmp_path, caplog):
    def lines(steps):
        caplog.clear()
        with caplog.at_level(logging.INFO, "afflux"):
            looped(Spoken(), steps, store=tmp_path / "store", concurrency=1)
        return [record.getMessage() for record in caplog.records]

    class Spoken(Echo):
        def step_done(self, step, metrics):
            return f"{len(metrics)} of step {step}"

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


def test_clients_that_fail_at_once_do_not_end_the_run_of_the_others():
    transport = Echo(fails={2}, gone={3})
    run = looped(transport, 300)
    assert run.server.version == 300
    assert 2 <= run.lost["failed"] <= 10


def test_the_loop_ends_when_nobody_is_of_use():
    transport = Echo(fails={1, 2}, gone={3})
    with pytest.raises(RuntimeError, match="none of 3 clients is of use"):
        looped(transport, 3, max_failures=2, retry_after=0.001)
