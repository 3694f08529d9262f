"""Evaluations: in the run's own process, or in workers beside training; in order, and to the same bits."""

from dataclasses import replace

import pytest

import own_tasks
from afflux.sim import AuditOutput, ConfigError, SimConfig, Simulation, parse_rule, partitioned, run
from afflux.sim.runs import workers as pool
from afflux.sim.runs.resume import resume, run_in_store
from afflux.sim.runs.run_checkpoint import InterruptedRun
from conftest import reproducible

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=2)
RULE = parse_rule("ca2fl:buffer_size=3")


def simulation(evaluate, training=None, **settings):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    given = {"rules": "fedasync", "arrivals": 30, "concurrency": 6, "eval_every": 10} | settings
    return Simulation(own_tasks.linear, clients, training, evaluate, **given)


@pytest.mark.parametrize(("count", "by_worker"), [(1, [0, 0, 0, 0]), (2, [0, 1, 1, 1])])
def test_workers_evaluate(count, by_worker):
    """All but the first model, which is evaluated before there are workers."""
    result = simulation(own_tasks.is_worker).run(workers=count)[0]
    assert [row.arrivals for row in result.evaluations] == [0, 10, 20, 30]
    assert [row.accuracy for row in result.evaluations] == by_worker


def test_training_goes_on_beside_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("AFFLUX_TEST_TRAININGS", str(tmp_path))
    made = simulation(own_tasks.awaits_trainings, own_tasks.counted, arrivals=40, eval_every=20)
    assert [row.arrivals for row in made.run(workers=2)[0].evaluations] == [0, 20, 40]


@pytest.mark.parametrize(
    ("evaluate", "kind", "message"),
    [
        (own_tasks.fails_in_a_worker, pool.WorkerError, "(?s)a worker failed:.*ZeroDivisionError"),
        (own_tasks.returns_nothing_in_a_worker, ConfigError, "evaluate returns None, must return accuracy, loss"),
    ],
)
def test_what_fails_in_an_evaluation_is_raised_here(evaluate, kind, message):
    with pytest.raises(kind, match=message):
        simulation(evaluate).run(workers=2)


def test_more_evaluations_than_workers_can_hold(monkeypatch):
    """One after each arrival, results without room, and a rule that steps at some arrivals only."""
    monkeypatch.setattr(pool, "WAITING_BYTES", 0)
    monkeypatch.setattr(pool, "WAITING_LEAST", 0)
    monkeypatch.setattr(pool, "QUEUE", 1)
    config = replace(SMALL, eval_every=1, concurrency=15, delays="exponential")
    one, two = (run(RULE, 3, config, workers=count) for count in (1, 2))
    assert len(two.evaluations) == 37
    assert reproducible(one) == reproducible(two)


def test_a_run_stops_at_the_same_target():
    config = replace(SMALL, arrivals=200, eval_every=3, target=0.6, stop_at_target=True)
    one, two = (run(RULE, 3, config, workers=count) for count in (1, 2))
    assert one.evaluations[-1].accuracy >= 0.6
    assert len(one.staleness) < 200
    assert reproducible(one) == reproducible(two)


def test_a_checkpoint_has_the_evaluations_before_it(tmp_path):
    config = replace(SMALL, eval_every=4)
    (tmp_path / "audit").mkdir()

    def stop(progress):
        if progress.arrivals == 21:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_store(tmp_path / "store", RULE, 3, config, AuditOutput(tmp_path / "audit"), stop, seconds=0.0, workers=2)
    stored = InterruptedRun.of(tmp_path / "store")
    assert [row.arrivals for row in stored.history.evaluations] == list(range(0, stored.arrivals + 1, 4))
    assert reproducible(resume(stored, workers=2)) == reproducible(run(RULE, 3, config))
