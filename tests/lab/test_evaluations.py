"""Evaluations: in the run's own process, or in workers beside training. tests/lab/test_workers.py compares bits."""

import math
from functools import partial

import pytest

import made_runs
import own_tasks
from afflux.lab.runs import workers as pool
from afflux.sim import ConfigError
from conftest import check_error
from pairwise import soak

simulation = partial(made_runs.simulation, rules="fedasync", arrivals=30, concurrency=6, eval_every=10)


@pytest.mark.parametrize(("count", "by_worker"), [(1, [0, 0, 0]), (2, [0, 1, 1])])
def test_workers_evaluate_while_others_train(count, by_worker, tmp_path, monkeypatch):
    """All but the first model, which is evaluated before there are workers."""
    monkeypatch.setenv("AFFLUX_TEST_TRAININGS", str(tmp_path))
    made = simulation(own_tasks.counted, evaluate=own_tasks.awaits_trainings, arrivals=40, eval_every=20)
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
    check_error(message, simulation(evaluate=evaluate).run, workers=2, error=kind)


@pytest.mark.parametrize(("values", "name"), [((math.nan, 1.0), "accuracy"), *soak((0.5, math.nan), "loss")])
def test_an_evaluation_that_is_always_nan_is_said_once(values, name, caplog):
    finite = iter([True])
    simulation(evaluate=lambda module: (0.5, 1.0) if next(finite, False) else values).run()
    assert caplog.messages == []
    simulation(evaluate=lambda module: values).run()
    said = f"fedasync, seed 0: the {name} of every evaluation is nan; look at the evaluation and its data"
    assert caplog.messages == [said]
