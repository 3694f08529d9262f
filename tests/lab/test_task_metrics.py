"""Metrics that a task declares, from the evaluation to tables, figures, grids and targets; evaluations of clients."""

import copy
import pickle
from dataclasses import replace
from math import exp, inf, nan

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.nn.functional import cross_entropy, mse_loss, one_hot

import own_tasks
from afflux.cli.lab.terminal import describe, results_table
from afflux.lab import Simulation, read_results, tune
from afflux.lab.results import figures, report_html, statistics
from afflux.lab.results.report_html import render_report
from afflux.lab.results.run_folder import _configuration
from afflux.lab.results.run_history import RunProgress
from afflux.lab.results.run_result import Evaluation, RunResult
from afflux.lab.results.simulation_results import SimulationResults
from afflux.lab.results.statistics import summary_rows
from afflux.rules.specs import RuleSpec
from afflux.sim import ConfigError, Metric, Task, sgd
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_refused, reproducible
from made_runs import CLIENTS

PERPLEXITY = Metric("perplexity", lower_is_better=True, range=(1.0, None))
MSE = Metric("mse", "m²", lower_is_better=True)
AUC = Metric("auc", range=(0.0, 1.0))
BEST = {"perplexity": 1.0, "mse": 0.0, "auc": 1.0}
RULES = ["fedbuff:buffer_size=3", "fedasync"]


def values_of(model, x=own_tasks.TEST.x, y=own_tasks.TEST.y):
    """All three; the squared error has a size of hundreds."""
    output, positive = model(x), y == 0
    auc = (output[positive, :1] > output[~positive, 0]).double().mean()
    mse = 1000 * mse_loss(output, one_hot(y, own_tasks.CLASSES).float())
    return {"auc": auc, "mse": mse, "perplexity": torch.exp(cross_entropy(output, y))}


def simulation(*metrics, **more):
    def evaluate(model):
        values = values_of(model)
        return {metric.name: values[metric.name] for metric in metrics}

    settings = {"rules": RULES, "seeds": [0, 1], "arrivals": 24, "eval_every": 6, "concurrency": 4}
    settings |= {"metrics": metrics} if metrics else {}
    return Simulation(own_tasks.linear, CLIENTS, sgd(), **{"evaluate": evaluate} | settings | more)


def heights(chart):
    """The heights of all curves of a chart."""
    _, axes = chart
    return {y for line in axes.lines if line.get_label()[1:].isdecimal() for y in line.get_ydata()}


@pytest.fixture
def charts(monkeypatch):
    """Title and axes of all charts of the pages that a test makes."""
    drawn, chart = [], report_html._chart

    def recorded(title, draw, labels):
        def draw_and_record(axes):
            draw(axes)
            drawn.append((title, axes))

        return chart(title, draw_and_record, labels)

    monkeypatch.setattr(report_html, "_chart", recorded)
    return drawn


def test_perplexity_squared_error_and_auc(tmp_path, charts):
    """Through a run, a comparison, a grid, the report and the target."""
    for metrics in ((PERPLEXITY, AUC), (MSE, PERPLEXITY), (AUC,)):
        metric, own = metrics[0], simulation(*metrics)
        out, name = tmp_path / metric.name, metric.name
        results = own.run(out=out if metric is PERPLEXITY else None)
        run, rows = results[0], results[0].evaluations
        assert [row.score for row in rows] == [getattr(row, name) for row in rows] == [row[3] for row in rows]
        best = min if metric.lower_is_better else max
        assert run.best_score == best(row.score for row in rows) == getattr(run, f"best_{name}")
        assert abs(run.final_score - BEST[name]) < abs(rows[0].score - BEST[name]), "it learns"
        assert [*results.to_dataframe().columns[5:]] == [one.name for one in metrics]
        assert {f"final_{name}", f"final_{name}_std"} < {*results.to_dataframe("summary").columns}

        cells = dict(summary_rows(results, own.config.target, brief=True))
        assert cells[metric.title("final {}")][0] == results.summary()[RULES[0]][f"final_{name}"].text(2)
        assert ("rounds to 0.9" in cells) == (metric is AUC), "the default target is left out"
        charts.clear()
        page = render_report(results, "", own.config.target, _configuration(results, own.config))
        assert f"Final {name} of the first rule" in page
        assert "accuracy" not in page.partition("<h1>")[2].partition("<h2>Settings")[0]
        assert all(len(heights(chart)) > 1 for chart in charts[: len(metrics) + 1]), "no flat line"
        titles = [title for title, _ in charts[1 : len(metrics) + 1]]
        assert titles == [f"{one.name.capitalize()} over virtual time" for one in metrics]

        target = sorted((row.score for row in rows), reverse=metric.lower_is_better)[2]
        ended = simulation(*metrics, rules=RULES[:1], seeds=[0], target=target, stop_at_target=True).run()
        *before, last = ended[0].evaluations
        assert [metric.reaches(row.score, target) for row in (*before, last)] == [False] * len(before) + [True]
        assert ended[0].summary(target)["rounds_to_target"] == last.version
        assert f"rounds to {metric.text(target)}" in dict(summary_rows(ended, target, brief=True))

        own = simulation(*metrics, tuning=own.task.evaluate)
        grid = tune(own, {"client_lr": [1e-6, 0.1]}, out=tmp_path / "grid" if metric is PERPLEXITY else None)
        assert [one.trial.chosen for one in grid.best] == [{"client_lr": "0.1"}] * 2
        assert f"| `{RULES[0]}` | 0.1 |" in str(grid)
        assert f"last {metric.title()} on" in str(grid)
        if metric is PERPLEXITY:
            again = tune(own, {"client_lr": [1e-6, 0.1]}, out=tmp_path / "grid")
            assert (again.metric, str(again)) == (PERPLEXITY, str(grid))
            loaded = read_results(out)
            assert ([run.evaluations for run in loaded], loaded[0].metrics) == (
                [run.evaluations for run in results],
                metrics,
            )


@pytest.mark.parametrize("metrics", [(), (AUC,), (Metric("f1", "%", range=(0.0, 100.0)),)], ids=str)
def test_a_score_in_per_cent_does_not_reach_a_target_that_is_a_share(metrics, tmp_path):
    """Not at the first evaluation, nor at a later one; a target in per cent is reached."""
    scores = iter([0.5, 40.0, 50.0, 60.0, 70.0])
    name = metrics[0].name if metrics else "accuracy"

    def evaluate(model):
        return {name: next(scores)} if metrics else (next(scores), 1.0)

    ends = {"rules": RULES[:1], "seeds": [0], "stop_at_target": True, "evaluate": evaluate}
    with pytest.raises(ConfigError, match=f"the {name} of an evaluation is 40, .* as the target 0.9 is"):
        simulation(*metrics, **ends).run(out=tmp_path / "out")
    (run,) = simulation(*metrics, **ends, target=60.0).run()
    assert [row.score for row in run.evaluations] == [50.0, 60.0]


def test_an_accuracy_beyond_0_and_1_is_no_percentage(tmp_path, charts, monkeypatch):
    """For example minus a squared error: axes follow the data, and the default target is far away."""
    own = simulation(evaluate=lambda model: (-values_of(model)["mse"].item() / 1e6, 1.0))
    results = own.run()
    scores = [row.accuracy for run in results for row in run.evaluations]
    rows = dict(summary_rows(results, 0.9, brief=True))
    assert float(rows["final accuracy"][0].split()[0]) == pytest.approx(results[0].final_accuracy, rel=0.5)
    assert not [title for title in rows if "%" in title or " to " in title]
    render_report(results, "", 0.9, _configuration(results, own.config))
    assert all(len(heights(chart)) > 1 for chart in charts[:2])
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *args, **more: drawn.append(figure.axes))
    results.draw(tmp_path / "curves.png")
    low, high = drawn[0][0].get_ylim()
    assert low < min(scores)
    assert max(scores) < high < 0.01


def test_figures_and_tables_for_print(tmp_path, monkeypatch):
    """Of perplexities the smallest is the best: it is bold, and the others are above it."""
    metrics = (structs.replace(PERPLEXITY, unit="$x$"), AUC)

    def result(label, seed, last):
        rows = [(0, 0, 0.0, 50.0, 0.5), (10, 1, 2.0, last, inf)]
        evaluations = tuple(Evaluation(*row, names=("perplexity", "auc")) for row in rows)
        staleness = np.zeros(1, np.int64)
        arrays = (staleness, staleness, np.ones(1))
        return RunResult(RuleSpec(label, (), label), seed, evaluations, *arrays, 4, 4, np.zeros(0), metrics=metrics)

    results = SimulationResults(
        [result("a", 0, 30.0), result("b", 0, 20.0), result("a", 1, 34.0), result("b", 1, 22.0)],
        simulation(PERPLEXITY, target=25).config,
    )
    titles = ["final perplexity, $x$", "rounds to 25 $x$", "virtual time to 25 $x$"]
    cells = [["32 ± 2.8", "> 1 (0 of 2)", "> 2 (0 of 2)"], ["21 ± 1.4", "1", "2"]]
    assert results.to_dataframe("table")[titles].to_numpy().tolist() == cells
    shown = statistics.data_frame(results, "table", SimConfig.target)
    assert not any("rounds to" in title for title in shown), "the default target is left out"
    table = [column.header for column in results_table(results, results.config).columns]
    assert table[1:4] == ["final\nperplexity, $x$", "rounds\nto 25 $x$", "virtual time\nto 25 $x$"]

    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *args, **more: drawn.append(figure))
    results.draw(tmp_path / "one.svg", panels=["auc", "score"], x="time")
    auc, score = drawn[0].axes
    assert [axes.get_ylabel() for axes in (auc, score)] == ["test auc", "test perplexity, $x$"]
    assert (len(auc.lines), len(score.lines), score.lines[2].get_ydata()) == (2, 3, [25, 25]), "the target"
    assert 10 < score.get_ylim()[0] < 20
    assert score.get_ylim()[1] > 50
    assert auc.get_ylim()[1] <= 1
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()][2] == "target 25 $x$"
    text = "unknown panel 'accuracy'; known: auc, perplexity, score, staleness"
    check_refused(text, results.draw, tmp_path / "one.svg", panels=["accuracy"])


def test_progress_names_the_metric():
    assert (
        describe(RunProgress(12, 4, 3.5, 34.25, nan, 0.5, "perplexity", ""), 24) == "12/24 arrivals, perplexity 34.25"
    )
    assert describe(RunProgress(12, 4, 3.5, -10.8, nan, 0.5), 24) == "12/24 arrivals, accuracy -10.8"
    seen = []
    simulation(MSE, rules=RULES[:1], seeds=[0]).run(watch=lambda index, progress: seen.append(progress))
    assert (seen[-1].metric, seen[-1].unit) == ("mse", "m²")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"name": "a b"}, "the name of a metric is 'a b', must be a word"),
        ({"name": "seed"}, "the name of a metric is 'seed', must be a word other than rule, seed"),
        ({"name": "f1", "unit": "\n"}, r"the unit of metric f1 is '\\n', must be a short text"),
        ({"name": "f1", "range": (1, 0)}, r"the range of metric f1 is \(1, 0\), must be \(low, high\)"),
        ({"name": "f1", "range": 1}, r"the range of metric f1 is 1, must be \(low, high\)"),
    ],
)
def test_impossible_metrics(metrics, message):
    check_refused(message, Metric, **metrics)


def test_mistakes():
    def task(**parts):
        return Task(own_tasks.linear, CLIENTS, own_tasks.TEST, **parts)

    wrong = {
        r"metrics is \(\), must be a sequence of afflux.sim.Metric": lambda: task(metrics=()),
        r"metrics is \['auc'\], must be a sequence of afflux.sim.Metric": lambda: task(metrics=["auc"]),
        "two metrics have one name": lambda: task(metrics=[AUC, AUC]),
        "personalise is given: give evaluate_client, too": lambda: task(personalise=print),
        "evaluate_client is 3, must be a function": lambda: task(evaluate_client=3),
        "must return a dict with a number for auc": simulation(AUC, evaluate=own_tasks.TEST).run,
        r"returns \{'auc': 1\}, must return accuracy, loss": simulation(evaluate=lambda model: {"auc": 1}).run,
        "fairness_every is 6, which is read only with a task with": lambda: simulation(AUC, fairness_every=6),
        "fairness_clients is 6, which is read only with a task with": lambda: SimConfig(fairness_clients=6),
    }
    for message, mistake in wrong.items():
        check_refused(message, mistake)


def test_an_evaluation_is_a_tuple_with_names():
    row = Evaluation(10, 2, 3.5, 40.0, inf, names=("perplexity", "mse"))
    assert (row.arrivals, row.version, row.virtual_time) == (10, 2, 3.5)
    assert (row.perplexity, row.mse, row.score) == (40, inf, 40)
    for other in (copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert (other, other.mse) == (row, inf)
    check_error("perplexity, mse, not accuracy", lambda: row.accuracy, error=AttributeError)


def each(model, data):
    return {"auc": 0.0, "perplexity": values_of(model, *data)["perplexity"]}


def adapt(model, data, rng):
    with torch.no_grad():
        model.bias += float(rng.random()) * torch.eye(own_tasks.CLASSES)[data[1][0]]


def test_clients_are_evaluated_each(tmp_path):
    """On a sample, at intervals and at the end, with and without a personal model; the run's own bits do not change."""
    more = {"rules": RULES[:1], "seeds": [0]}
    (plain,) = simulation(PERPLEXITY, AUC, **more).run()
    more |= {"evaluate_client": each, "personalise": adapt, "fairness_every": 9, "fairness_clients": 5}
    own = simulation(PERPLEXITY, AUC, **more)
    (run,) = own.run(out=tmp_path / "out")
    assert reproducible(run) == reproducible(plain)
    rows = run.client_evaluations
    sample = sorted({row.client for row in rows})
    assert len(sample) == 5
    assert sample != [0, 1, 2, 3, 4]
    models = ("server", "personal")
    places = [(arrivals, client, model) for arrivals in (9, 18, 24) for client in sample for model in models]
    assert [row[:3] for row in rows] == places
    assert all(row.values[1] == 0 for row in rows), "in the order of the metrics"
    scores = sorted((row.values[0] for row in rows[-10::2]), reverse=True)
    assert run.client_scores().tolist() == scores != run.client_scores("personal").tolist()
    summary = run.summary(0.9)
    assert summary["client_perplexity"] == pytest.approx(np.mean(scores))
    assert summary["client_worst"] == scores[0], "the worst tenth, rounded up"
    assert summary["personal_client_deviation"] == pytest.approx(np.std(run.client_scores("personal"), ddof=1))
    assert "perplexity of clients, personal model: worst tenth" in dict(summary_rows([run], 0.9, brief=True))
    loaded = read_results(tmp_path / "out")
    assert (loaded[0].client_evaluations, loaded.config) == (rows, own.config)
    assert [*loaded.to_dataframe("clients").columns[2:]] == ["arrivals", "client", "model", "perplexity", "auc"]


def test_a_run_with_metrics_is_resumed_to_the_same_values(tmp_path):
    settings = {"rules": RULES[:1], "seeds": [0], "evaluate_client": each, "fairness_every": 6}
    own = simulation(PERPLEXITY, AUC, **settings)

    def stop(index, progress):
        if progress.arrivals == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own.run(out=tmp_path / "out", store=tmp_path / "store", checkpoint_every=0, watch=stop)
    other = replace(own.task, metrics=(AUC, PERPLEXITY))
    places, task, own.task = {"out": tmp_path / "out", "store": tmp_path / "store"}, own.task, other
    check_refused(r"the run began with other inputs: .*metrics", own.run, **places)
    own.task = task
    (resumed,), (whole,) = own.run(**places), own.run()
    assert reproducible(resumed) == reproducible(whole)
    assert resumed.client_evaluations == whole.client_evaluations
    assert len(resumed.client_evaluations) == 4 * len(own.task.clients.for_seed(0)) == 48
    assert exp(0) <= resumed.best_score == read_results(tmp_path / "out")[0].best_perplexity
