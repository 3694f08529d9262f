"""Clients whose training raises or gives NaN: faulty arrivals, which change nothing but counts and log."""

import math
import re
import sys
from functools import partial
from itertools import count

import msgspec
import numpy as np
import pytest
import torch

import made_runs
import own_tasks
from afflux.aggregation.limits import RoundError
from afflux.lab import read_audit_log
from afflux.lab.results.run_folder import describe_setting
from afflux.lab.runs import run_record, workers
from afflux.rules.specs import parse_rule
from afflux.sim import TrainingError, scaffold
from afflux.sim.errors import DivergedError
from conftest import check_error, check_raises
from made_runs import run_paired

#: What the clients 0, 1 and 2 do; all others train.
KINDS = ("raises", "nan", "inf")
REASONS = {
    0: r"ZeroDivisionError: no \[31m examples \(test_faulty_trainings.py, line [0-9]+\)",
    1: r"client 1's loss is nan",
    2: r"client 2's update .*(inf|finite)",
}
CLIENTS = [(own_tasks.X[i::12], own_tasks.Y[i::12], KINDS[i] if i < len(KINDS) else "") for i in range(12)]


def train(model, data, rng, *, client_lr, local_steps):
    x, y, kind = data
    loss, *counts = own_tasks.momentum(model, (x, y), rng, client_lr=client_lr, local_steps=local_steps)
    if kind == "raises":
        raise ZeroDivisionError("no\n\x1b[31m\ud800 examples")
    if kind == "inf":
        with torch.no_grad():
            model.bias[0] = math.inf
    return (math.nan if kind == "nan" else loss, *counts)


simulation = partial(made_runs.simulation, clients=CLIENTS, rules="fedbuff:buffer_size=3", concurrency=6, eval_every=20)
simulation = partial(simulation, training=train, arrivals=40)


def test_they_are_counted(tmp_path, caplog):
    made = simulation()
    specs = [made.jobs[0].spec, parse_rule("fedasync")]
    results = run_paired(specs, 0, made.config, output=tmp_path, task=made.task)
    log = read_audit_log(tmp_path / "fedbuff_buffer_size=3-seed0.jsonl")
    faulty = [line for line in log.arrivals if line.client < len(KINDS)]
    assert {line.client for line in faulty} == {0, 1, 2}
    for line in log.arrivals:
        assert (line.status == "faulty") == (line in faulty) == (line.reason is not msgspec.UNSET)
    for line in faulty:
        assert re.search(REASONS[line.client], line.reason), line.reason
        assert (line.examples, line.steps) == ((0, 0) if line.client == 0 else (20, 3))
    assert not {0, 1, 2} & {client for line in log.rounds for client in line.client_ids}
    for result in results:
        assert result.decisions == {"faulty": len(faulty), "joined": 40 - len(faulty)}
        assert np.isfinite(result.params).all()
        assert result.final_accuracy > 0.8
    texts = [record.getMessage() for record in caplog.records]
    first, *_, last = [text for text in texts if not text.startswith("[push]")]  # the server logs the first one, too
    assert re.search(r"seed 0: client . .* at arrival [0-9]+.*; such arrivals are counted as faulty, and the", first)
    assert f"{len(faulty)} of 40 arrivals are faulty" in last


def test_the_server_logs_what_a_training_raised(caplog):
    """Not a loss, which there never was."""
    calls = count()

    def fails_at_first(model, data, rng):
        return (1.0 if next(calls) else 1 / 0), 1, 1

    simulation(training=fails_at_first).run()
    (text,) = [text for text in caplog.messages if text.startswith("[push]")]
    assert re.search(r"loss is 'of a training that raised ZeroDivisionError: division by", text), text


def test_a_pass_ends_without_the_clients_whose_updates_are_faulty(tmp_path):
    made = simulation(rules="gsgm:buffer_size=4", selection="blocked-until-pass-ends", arrivals=36)
    (result,) = run_paired([made.jobs[0].spec], 0, made.config, output=tmp_path, task=made.task)
    assert result.decisions == {"faulty": 9, "joined": 27}
    log = read_audit_log(next(tmp_path.glob("*.jsonl")))
    assert [len(line.client_ids) for line in log.rounds] == [4, 4, 1] * 3


def test_a_run_ends_if_all_fail_or_many_in_a_row(monkeypatch):
    text = r"client . failed to train at arrival 1: Zero.*; 10 of 10 arrivals are"
    assert type(check_error(text, simulation(clients=[CLIENTS[0]] * 12).run)) is TrainingError
    text = r"client . diverged at arrival 1: its loss is nan; .*; 4 of 4 arrivals are faulty"
    check_error(text, simulation(clients=[CLIENTS[1]] * 12, arrivals=4).run, error=DivergedError)
    monkeypatch.setattr(run_record, "FAULTS_IN_A_ROW", 5)
    calls = count()

    def later(model, data, rng):
        number = next(calls)
        return (math.nan if number in (3, 7) or number >= 20 else 1.0), 1, 1

    text = "diverged at arrival 4: .*; 7 of 25 arrivals are faulty, the last 5 in a row"
    check_error(text, simulation(training=later).run, error=DivergedError)


@pytest.mark.parametrize(("client", "error"), [(0, ZeroDivisionError), (1, DivergedError), (2, DivergedError)])
def test_faults_raise_ends_the_run(client, error):
    check_raises(error, simulation(clients=[CLIENTS[client]] * 2 + [CLIENTS[-1]] * 10, faults="raise").run)


def test_numbers_of_a_rule_that_could_overflow_end_its_run_alone(caplog):
    """As a divergence does; what the user has written wrong still ends all runs, before the first one."""
    wrong, right = "wrong=fedbuff:buffer_size=3:server_lr=1e30", "fedbuff:buffer_size=3"
    results = simulation(rules=[wrong, right]).run()
    assert [run.spec.label for run in results] == [right]
    assert [str(failure) for failure in results.failures] == ["wrong, seed 0 diverged"]
    assert "wrong, seed 0 diverged: [fedbuff] with lr 1e+30 and weights" in caplog.text
    check_error("could overflow", simulation(rules=wrong).run, error=RoundError)


def test_the_heading_counts_the_seeds_that_paired_rules_share():
    calls = count()

    def fails_in_the_second_run(model, data, rng):
        return (1 / (next(calls) - 50) and 1.0), 1, 1

    rules = ["fedbuff:buffer_size=3", "fedasync"]
    results = simulation(
        training=fails_in_the_second_run, rules=rules, seeds=[0, 1, 2], paired=True, faults="raise"
    ).run()
    (failure,) = map(str, results.failures)
    assert failure == "fedbuff:buffer_size=3 + fedasync, seed 1 failed"
    text = describe_setting(results.config, results, results.failures)
    assert text.endswith(f", 2 of 3 seeds, all on the updates of fedbuff:buffer_size=3; {failure}")
    assert [row.seeds for row in results.paired_differences()] == [2]
    assert ", 2 seeds, " in describe_setting(results.config, results)


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


def test_an_exception_without_a_readable_message_is_one_too():
    def fails(model, data, rng):
        if rng.random() < 0.25:
            raise UnreadableError
        return 1.0, 1, 1

    (result,) = simulation(training=fails).run()
    assert 0 < result.decisions["faulty"] < 20


def test_a_worker_names_what_ends_it():
    """Also what is no Exception: sys.exit() in a client's training."""
    check_error(r"(?s)a worker failed:.*SystemExit: 3", workers._reported, sys.exit, 3, error=workers.WorkerError)


def test_control_variates_leave_them_out():
    clients = [(x * math.nan if kind else x, y) for x, y, kind in CLIENTS]
    (result,) = simulation(training=scaffold(0.1), clients=clients).run()
    assert result.decisions["faulty"] == sum(client < 3 for client in result.clients) > 0
    assert np.isfinite(result.params).all()
    assert result.final_accuracy > 0.8
