"""Evaluations: in the run's own process, or in workers beside training; in order, and to the same bits."""

import math
from contextlib import closing
from dataclasses import replace

import pytest

import own_tasks
from afflux.sim import ConfigError, Simulation, partitioned
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.runs import workers as pool
from afflux.sim.runs.run_checkpoint import InterruptedRun
from afflux.sim.runs.workers import WorkerPool
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import parse_rule
from conftest import reproducible
from made_runs import resume, run, run_in_store
from pairwise import soak

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=2)
RULE = parse_rule("ca2fl:buffer_size=3")


def simulation(evaluate, training=None, **settings):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    given = {"rules": "fedasync", "arrivals": 30, "concurrency": 6, "eval_every": 10} | settings
    return Simulation(own_tasks.linear, clients, training, evaluate, **given)


@pytest.fixture(scope="module")
def two_workers():
    """Processes that tests share where these are not what the tests check."""
    with closing(WorkerPool(2)) as workers:
        yield workers


@pytest.mark.parametrize(("count", "by_worker"), [(1, [0, 0, 0]), (2, [0, 1, 1])])
def test_workers_evaluate_while_others_train(count, by_worker, tmp_path, monkeypatch):
    """All but the first model, which is evaluated before there are workers."""
    monkeypatch.setenv("AFFLUX_TEST_TRAININGS", str(tmp_path))
    made = simulation(own_tasks.awaits_trainings, own_tasks.counted, arrivals=40, eval_every=20)
    (result,) = made.run(workers=count)
    assert [(row.arrivals, row.accuracy) for row in result.evaluations] == [*zip((0, 20, 40), by_worker, strict=True)]


RETURNS = "evaluate returns None, must return accuracy, loss"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("evaluate", "kind", "message"),
    [
        (own_tasks.returns_nothing_in_a_worker, ConfigError, RETURNS),
        (own_tasks.fails_in_a_worker, pool.WorkerError, "(?s)a worker failed:.*ZeroDivisionError"),
    ],
)
def test_what_fails_in_an_evaluation_is_raised_here(evaluate, kind, message):
    with pytest.raises(kind, match=message):
        simulation(evaluate).run(workers=2)


def test_a_run_stops_at_the_same_target(two_workers):
    config = replace(SMALL, arrivals=200, eval_every=3, target=0.6, stop_at_target=True)
    one, two = (run(RULE, 3, config, workers=workers) for workers in (1, two_workers))
    assert one.evaluations[-1].accuracy >= 0.6
    assert len(one.staleness) < 200
    assert reproducible(one) == reproducible(two)


def test_a_checkpoint_has_the_evaluations_before_it(two_workers, tmp_path):
    config = replace(SMALL, eval_every=4)
    (tmp_path / "audit").mkdir()

    def stop(progress):
        if progress.arrivals == 21:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        output = AuditOutput(tmp_path / "audit")
        run_in_store(tmp_path / "store", RULE, 3, config, output, stop, seconds=0.0, workers=two_workers)
    stored = InterruptedRun(tmp_path / "store")
    assert [row.arrivals for row in stored.notes.history.evaluations] == list(range(0, stored.arrivals + 1, 4))
    assert reproducible(resume(stored, workers=two_workers)) == reproducible(run(RULE, 3, config))


@pytest.mark.parametrize(("values", "name"), [((math.nan, 1.0), "accuracy"), *soak((0.5, math.nan), "loss")])
def test_an_evaluation_that_is_always_nan_is_said_once(values, name, caplog):
    finite = iter([True])
    simulation(lambda module: (0.5, 1.0) if next(finite, False) else values).run()
    assert caplog.messages == []
    simulation(lambda module: values).run()
    said = f"fedasync, seed 0: the {name} of every evaluation is nan; look at the evaluation and its data"
    assert caplog.messages == [said]
