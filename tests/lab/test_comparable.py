"""A comparison compares what is comparable: equal settings and data, rules at their M, and means over all seeds."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

import made_runs
import own_tasks
from afflux.lab import read_results
from afflux.lab.results.finished_runs import FailedRun
from afflux.lab.results.report_html import _compared
from afflux.lab.results.run_folder import describe_setting
from afflux.lab.results.run_result import Evaluation, RunResult
from afflux.lab.results.simulation_results import SimulationResults
from afflux.rules.specs import RuleSpec
from afflux.sim import partitioned, sgd
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from conftest import check_refused


def simulation(client_lr=0.1, **changes):
    settings = {"arrivals": 12, "concurrency": 6, "eval_every": 6, "rules": "fedbuff:buffer_size=4"} | changes
    return made_runs.simulation(sgd(client_lr), **settings)


def run(folder, client_lr=0.1, **settings):
    simulation(client_lr, **settings).run(out=folder)
    return folder


def test_runs_with_other_settings_are_merged_only_if_they_may_differ(tmp_path):
    small, large = run(tmp_path / "small"), run(tmp_path / "large", 0.2, concurrency=3)
    check_refused(
        r"differ in more than rule and seed: concurrency is 6 and 3, client_lr is 0\.1 and 0\.2; "
        r"allow=\['concurrency', 'client_lr'\]",
        read_results,
        small,
        large,
    )
    check_refused("unknown setting 'alphas'", read_results, small, large, allow=["alphas"])
    both = read_results(small, large, allow=["client_lr", "concurrency"], labels={})
    labels = [
        f"fedbuff:buffer_size=4, concurrency {at_once}, client_lr {rate}" for at_once, rate in ((6, 0.1), (3, 0.2))
    ]
    assert [run.spec.label for run in both] == labels
    for table in ("evaluations", "summary", "staleness"):
        frame = both.to_dataframe(table)
        assert frame.columns[:3].tolist() == ["rule", "concurrency", "client_lr"], table
        assert {*zip(frame["rule"], frame["client_lr"], strict=True)} <= {*zip(labels, (0.1, 0.2), strict=True)}, table
    assert describe_setting(both.config, both).count("concurrency 6 or 3, ") == 1
    again = both.relabel(dict(zip(labels, "ab", strict=True))).merge(read_results(run(tmp_path / "other", seeds=[1])))
    assert [(run.spec.label, run.seed) for run in again][:2] == [("a", 0), ("b", 0)]
    assert again.varied == ("concurrency", "client_lr")


def test_the_heading_names_the_attack(tmp_path):
    """In any order of the folders; the run without one has not recorded the setting."""
    honest, attacked = run(tmp_path / "honest"), run(tmp_path / "attacked", attack="copies:clients=2")
    for folders, words in (
        ((honest, attacked), "none or copies:clients=2"),
        ((attacked, honest), "copies:clients=2 or none"),
    ):
        both = read_results(*folders, allow=["attack"])
        assert f", attack {words}, " in describe_setting(both.config, both)
    alone = read_results(honest)
    assert "attack" not in describe_setting(alone.config, alone)


def test_runs_on_other_data_are_not_merged(tmp_path):
    """Nor with another test set; other targets, and clients that only other seeds have, may differ."""
    first = run(tmp_path / "first")
    x, y = own_tasks.examples(seed=7)
    folders = {
        "clients, data": run(tmp_path / "data", clients=partitioned(x, y, 12, "iid"), rules="fedasync"),
        "evaluation": run(
            tmp_path / "test", evaluate=replace(own_tasks.TEST, x=own_tasks.TEST.x + 1), rules="fedasync"
        ),
    }
    check_refused("the runs had different inputs: data", read_results, first, folders["clients, data"])
    check_refused("the runs had different inputs: evaluation", read_results, first, folders["evaluation"])
    assert len(read_results(first, run(tmp_path / "third", seeds=[1], target=0.5))) == 2


def result_of(label, seed, scores, state_bytes=8):
    rows = tuple(Evaluation(10 * i, i, 2.5 * i, score, 1.0) for i, score in enumerate(scores))
    none = np.zeros(1, np.int64)
    return RunResult(RuleSpec(label, (), label), seed, rows, none, none, np.ones(1), state_bytes, 4, np.zeros(2))


def made(
    seeds=(0,), label="one", metrics=CLASSIFICATION, num_params=2, client_lr=0.1, alpha=0.1, part="test", **inputs
):
    """Results without a run; an input is a digest, or one for each seed."""
    runs = []
    for place, seed in enumerate(seeds):
        digests = {name: digest if isinstance(digest, str) else digest[place] for name, digest in inputs.items()}
        settings = {"client_lr": client_lr, "alpha": alpha, "part": part}
        new = replace(result_of(label, seed, [0.1, 0.5]), inputs=digests, settings=settings)
        runs.append(replace(new, metrics=metrics, num_params=num_params))
    return SimulationResults(runs, SimConfig())


OTHERS = [
    ("evaluation", made(evaluation="a"), made([1], evaluation="b"), ()),
    ("data", made(data="a", clients="a"), made([1], data="b", clients="b"), ()),
    ("model", made([0, 1], model="a"), made([2], model="b"), ()),
    ("model", made(model="a"), made([1], model="b", num_params=3), ()),
    ("data", made(data="a"), made(label="two", data="b", client_lr=0.2), ["client_lr"]),
    ("data", made(data="a", clients="a"), made(data="b", clients="b", alpha=1.0), ["alpha"]),
    ("availability", made(availability="a"), made(availability="b", part="validation"), ["part"]),
    ("evaluation, model", made(evaluation="a", model="a"), made(evaluation="b", model="b", alpha=1.0), ["alpha"]),
]


@pytest.mark.parametrize(("names", "first", "second", "allow"), OTHERS)
def test_inputs_that_neither_seed_nor_settings_change_are_compared(names, first, second, allow):
    check_refused(f"the runs had different inputs: {names}$", first.merge, second, allow=allow)


ALIKE = [
    (made(data="a", clients="a", model="a"), made([1], data="a", clients="b", model="b"), ()),
    (made([0, 1], data=["a", "b"]), made([2], data="c"), ()),
    (made(data="a", clients="a"), made(data="a", clients="b", alpha=1.0), ["alpha"]),
    (made(data="a"), made(data="b", alpha=1.0), ["alpha"]),  # the data sets of the clients
]


@pytest.mark.parametrize(("first", "second", "allow"), ALIKE)
def test_inputs_that_seeds_or_settings_change_may_differ(first, second, allow):
    first.failures = (FailedRun("one", 7, "diverged", ""),)
    both = first.merge(second, allow=allow)
    assert [failure.rule for failure in both.failures] == [both[0].spec.label]
    assert len(both) == len(first) + len(second)
    if allow:  # the setting of each is among those of both, whose inputs differ
        inputs = {"data": "a", "clients": "c"} if "clients" in first[0].inputs else {"data": "c"}
        assert len(both.merge(made([2], **inputs), allow=allow)) == 3


def test_runs_with_other_metrics_are_not_merged():
    loss = Metric("loss", lower_is_better=True)
    second = made([1], metrics=(Metric("f1"), loss))
    check_refused("different metrics: accuracy, %, loss and f1, loss$", made().merge, second)
    second = made([1], metrics=(Metric("accuracy", "%"), loss))
    assert len(made().merge(second)) == 2


def test_each_page_names_the_buffer_sizes(tmp_path, caplog):
    """And a comparison at unequal M says so, once; a rule without a buffer has M = 1 and needs no warning."""
    out, rules = tmp_path / "out", ["fedbuff:buffer_size=4", "mine=fedbuff:buffer_size=2", "fedasync"]
    with caplog.at_level(logging.WARNING):
        results = simulation(rules=rules, seeds=[0, 1]).run(out=out)
    (warning,) = [record.message for record in caplog.records if "buffers" in record.message]
    assert warning == "the rules differ in their buffers, M = 4 (mine: 2): compare them at equal M"
    heading = "M = 4 (mine: 2, fedasync: 1)"
    assert heading in describe_setting(results.config, results)
    page = (out / "report.html").read_text()
    assert heading in page
    assert "arrivals per step, M" in page
    assert json.loads((out / "summary.json").read_text())["buffer_sizes"] == dict(zip(
        ("fedbuff:buffer_size=4", "mine", "fedasync"), (4, 2, 1), strict=True
    ))  # fmt: skip
    table = results.to_dataframe("table")
    assert list(table)[:2] == ["rule", "arrivals per step, M"]
    assert table["arrivals per step, M"].tolist() == ["4", "2", "1"]
    caplog.clear()
    simulation(rules=["fedbuff:buffer_size=4", "ca2fl:buffer_size=4", "fedasync"]).run()
    assert not [record for record in caplog.records if "buffers" in record.message]
    assert "M = 4 (" in describe_setting(results.config, read_results(out))


@pytest.mark.parametrize(
    ("scores", "bottom"), [([0.1, 0.7, 0.9, 0.92, 0.95], 0.69), ([0.1, 0.2, 0.4, 0.6, 0.9], 0.0)], ids=["late", "slow"]
)
def test_the_axis_of_a_share_begins_where_curves_are_read(scores, bottom, monkeypatch, tmp_path):
    """With a mark if it leaves out the first quarter of a curve; the legend's labels are the rules' own."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: drawn.append(figure))
    runs = [result_of(label, 0, scores) for label in ("FedBuff", "_own")]
    SimulationResults(runs, SimConfig(target=0.8)).draw(tmp_path / "figure.pdf")
    (figure,) = drawn
    assert figure.axes[0].get_ylim()[0] == pytest.approx(bottom, abs=0.07)
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert len(marks) == (bottom > 0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedBuff", "_own", "target 80%"]


def test_rows_that_compare_nothing_are_left_out_of_the_page():
    rows = [("score", ["1", "2"]), ("dropped", ["3", "-"]), ("size", ["4", "4"]), ("some", ["5", "-"])]
    assert _compared(rows) == [["score", "1", "2"]]
    assert _compared([("size", ["4"])]) == [["size", "4"]]


def test_a_score_in_per_cent_is_an_error_though_the_run_stops_at_no_target():
    scores = iter([0.5, 40.0, 60.0, 70.0])
    own = simulation(evaluate=lambda model: (next(scores), 1.0))
    check_refused(r"the accuracy of an evaluation is 40, .* as the target 0\.9 is", own.run)
    config, metric = SimConfig(task="python:x", target=60.0), own.task.metrics[0]
    config.check_unit(61.0, metric)
