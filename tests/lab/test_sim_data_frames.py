"""Data frames and statistics of the results of a simulation."""

from collections import Counter
from functools import partial

import numpy as np
import pytest

import made_runs
from afflux.lab.results import run_folder
from afflux.lab.results.run_result import Evaluation, RunResult
from afflux.lab.results.statistics import paired_differences
from afflux.rules.specs import RuleSpec
from afflux.sim import MissingExtraError
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_refused

RULES = ["fedbuff:buffer_size=3", "fedasync"]


SETTINGS = {"arrivals": 30, "eval_every": 10, "concurrency": 5, "target": 0.05}
simulation = partial(made_runs.simulation, rules=RULES, seeds=[0, 1], **SETTINGS)


@pytest.fixture(scope="module")
def results():
    return simulation().run()


def rows_of(frame):
    return [tuple(row) for row in frame.astype(object).itertuples(index=False)]


def test_tables(results):
    frame = results.to_dataframe()
    assert list(frame) == ["rule", "seed", "arrivals", "version", "virtual_time", "accuracy", "loss"]
    assert rows_of(frame) == [(run.spec.label, run.seed, *row) for run in results for row in run.evaluations]
    last = frame.groupby(["rule", "seed"]).last()
    for run in results:
        assert last.loc[(run.spec.label, run.seed), "accuracy"] == run.final_accuracy
    frame = results.to_dataframe("runs")
    assert list(frame) == ["rule", "seed", *results[0].summary(0.05)]
    assert [row[:3] for row in rows_of(frame)] == [(run.spec.label, run.seed, run.final_accuracy) for run in results]
    frame = results.to_dataframe("summary")
    assert [row[:3] for row in rows_of(frame)] == [
        (label, 2, row["final_accuracy"].mean) for label, row in results.summary().items()
    ]
    frame = results.to_dataframe("arrivals")
    assert len(frame) == 4 * 30
    assert rows_of(frame)[30:60] == [
        ("fedasync", 0, number, client, late)
        for number, (client, late) in enumerate(
            zip(results[1].clients.tolist(), results[1].staleness.tolist(), strict=True)
        )
    ]
    for table, numbers in (("participation", results[3].clients), ("staleness", results[3].staleness)):
        frame = rows_of(results.to_dataframe(table))
        assert [row[2:] for row in frame if row[:2] == ("fedasync", 1)] == sorted(Counter(numbers.tolist()).items())
    ((first, second, seeds, mean, *_),) = rows_of(results.to_dataframe("differences"))
    assert (first, second, seeds) == (*RULES, 2)
    finals = np.array([run.final_accuracy for run in results]).reshape(2, 2)
    assert mean == np.mean(finals[:, 0] - finals[:, 1])
    check_refused("unknown table 'rounds'", results.to_dataframe, "rounds")


def test_a_missing_package(results, monkeypatch):
    monkeypatch.setattr("afflux.sim.errors.find_spec", lambda name: None)
    check_error(r"needs pandas: pip install 'afflux\[lab\]'", results.to_dataframe, error=MissingExtraError)


@pytest.mark.parametrize("package", ["matplotlib", "pandas", "jinja2"])
def test_a_package_that_writes_results_is_missed_before_any_run(package, tmp_path, monkeypatch):
    """It was found out after the last run."""
    monkeypatch.setattr("afflux.sim.errors.find_spec", lambda name: None if name == package else name)
    with pytest.raises(MissingExtraError, match=f"(?i)needs {package}: pip install"):
        simulation().run(out=tmp_path / "run", watch=lambda index, run: pytest.fail("a run was made"))
    assert not list(tmp_path.iterdir())


#: As written by csv.writer, before pandas wrote them.
FILES = {
    "metrics.csv": """\
rule,seed,arrivals,version,virtual_time,accuracy,loss
"x,""y"" z",0,0,0,0.0,0.1,nan
"x,""y"" z",0,10,3,2.5e-08,0.30000000000000004,inf
é,1,0,0,0.0,0.1,2.0
""",
    "staleness.csv": """\
rule,seed,staleness,arrivals
"x,""y"" z",0,0,2
"x,""y"" z",0,7,1
""",
    "participation.csv": """\
rule,seed,client,arrivals
"x,""y"" z",0,4,3
""",
}


def test_the_csv_files_have_the_bytes_of_the_csv_module(tmp_path):
    """Whole numbers beside empty cells, nan and inf, quotes, the shortest text of a float, a run without arrivals."""

    def result(label, seed, rows, staleness, clients):
        late = np.array(staleness, np.int64)
        spec, params = RuleSpec(label, (), label), np.zeros(2, np.float32)
        clients = np.array(clients, np.int64)
        return RunResult(spec, seed, rows, late, late, np.array([1e-3]), 8, 9, params, clients=clients)

    started = Evaluation(0, 0, 0.0, 0.1, float("nan"))
    rows = (started, Evaluation(10, 3, 2.5e-8, 0.1 + 0.2, float("inf")))
    runs = [result('x,"y" z', 0, rows, [0, 7, 0], [4, 4, 4]), result("é", 1, (Evaluation(*started[:4], 2.0),), [], [])]
    run_folder.write_results(tmp_path, runs, SimConfig(target=0.3))
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in FILES} == FILES
    header, *lines = (tmp_path / "summary.csv").read_text(encoding="utf-8").splitlines()
    assert header.startswith("rule,seeds,final_accuracy,final_accuracy_std,best_accuracy,")
    assert lines[0].startswith('"x,""y"" z",1,0.30000000000000004,nan,0.30000000000000004,nan,')
    unreached = "0.0,True,0.0,True,"  # the run has ended at once
    assert lines[1] == (
        f"é,1,0.1,nan,0.1,nan,{'nan,' * 4}{unreached}0.0,nan,{'nan,' * 4}0.0,nan,0.0,nan,nan,nan,1.0,nan,8.0,nan"
    )


def test_statistics(results):
    assert results.paired_differences() == paired_differences(list(results))
    assert results.paired_differences("mean_staleness", 0.8) == paired_differences(list(results), "mean_staleness", 0.8)
