"""The function that is called after each evaluation, for trackers of experiments."""

import json
from concurrent.futures import Future
from functools import partial

import pytest

import made_runs
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.run_history import TrackedRun
from afflux.lab.runs.simulation import simulate
from afflux.rules.specs import parse_rule
from afflux.sim.clients.training import SerialTraining
from afflux.sim.workload.config import SimConfig
from conftest import check_error
from pairwise import soak

RULES = ["fedbuff:buffer_size=3", "fedasync"]
SETTINGS = {"arrivals": 30, "eval_every": 7, "concurrency": 5}


simulation = partial(made_runs.simulation, rules=RULES, seeds=[0, 1], **SETTINGS)


class Calls(dict):
    """Calls by the rule and seed of the run."""

    def __call__(self, run, metrics):
        self.setdefault((run.rule, run.seed), []).append((run, metrics))


class LateFigures(Future):
    """The numbers of an evaluation that is not finished until its result is read, as in a busy worker process."""

    def done(self):
        return False


class LateWorkers(SerialTraining):
    """A pool without processes, which evaluates late."""

    def __init__(self):
        pass

    def for_run(self, setup, task):
        super().__init__(setup.trainer, setup.seed)
        return self

    def evaluate(self, model):
        figures = LateFigures()
        figures.set_result(self._trainer.evaluate(model.params, None))
        return figures


def test_an_evaluation_that_ends_late_has_the_rounds_before_it():
    """Its means had the rounds up to its end as well, with workers."""
    config, spec = SimConfig(model="logreg", num_clients=20, **SETTINGS), parse_rule("fedasync")
    now, late = Calls(), Calls()
    simulate([spec], 0, config, on_evaluation=now)
    simulate([spec], 0, config, pool=LateWorkers(), on_evaluation=late)
    for metrics in (row for calls in (now, late) for _, row in calls["fedasync", 0]):
        del metrics["round/seconds"]
    assert now == late


@pytest.mark.parametrize("options", [{}, {"processes": 2}, *soak({"workers": 2})])
def test_it_gets_every_evaluation_of_every_run(options, tmp_path):
    calls = Calls()
    results = simulation().run(on_evaluation=calls, out=tmp_path / "run", **options)
    assert len(results) == 4
    for result in results:
        rows = calls[result.spec.label, result.seed]
        assert [
            tuple(
                metrics[name] for name in ("arrivals", "run/version", "run/virtual_time", "test/accuracy", "test/loss")
            )
            for _, metrics in rows
        ] == list(result.evaluations[1:])
        (run,) = {json.dumps(run) for run, _ in rows}
        log = tmp_path / "run" / "audit" / f"{json.loads(run)[2]}.jsonl"
        name = log.stem
        assert json.loads(run) == [result.spec.label, result.seed, name, result.settings, result.options, 0]
        means, start = [], 0
        rounds = {line.version: line for line in read_audit_log(log).rounds}
        for row in result.evaluations[1:]:
            values = [max(rounds[version].staleness) for version in range(start + 1, row.version + 1)]
            means.append(sum(values) / len(values) if values else None)
            start = row.version
        assert [metrics.get("round/staleness_max") for _, metrics in rows] == means


def test_its_error_stops_the_run_and_says_where(tmp_path):
    def broken(run, metrics):
        if metrics["arrivals"] > 10:
            raise OSError("no network")

    for options in ({}, {"out": tmp_path / "run"}, {"out": tmp_path / "stored", "store": tmp_path / "store"}):
        run = simulation(rules=["fedasync"], seeds=[0]).run
        notes = check_error("no network", run, error=OSError, on_evaluation=broken, **options).__notes__
        assert "in on_evaluation, after 14 arrivals of fedasync, seed 0" in notes
    calls, whole = Calls(), simulation(rules=["fedasync"], seeds=[0])
    result = whole.run(out=tmp_path / "stored", store=tmp_path / "store", on_evaluation=calls)
    assert result[0].digest == whole.run()[0].digest
    assert [metrics["arrivals"] for _, metrics in calls["fedasync", 0]][-3:] == [21, 28, 30]
    (after,) = {run.resumed_after for run, _ in calls["fedasync", 0]}
    assert 0 <= after <= 14


def test_a_paired_run_is_as_many_runs_as_it_has_rules():
    calls = Calls()
    simulation(seeds=[3], paired=True).run(on_evaluation=calls)
    assert sorted(calls) == sorted((rule, 3) for rule in RULES)
    assert isinstance(calls["fedasync", 3][0][0], TrackedRun)
