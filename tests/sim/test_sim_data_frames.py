"""Data frames and statistics of the results of a simulation."""

import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import own_tasks
from afflux.sim import ConfigError, MissingExtraError, Simulation, partitioned
from afflux.sim.results import data_frames, tensorboard
from afflux.sim.results.statistics import paired_differences, reach_targets

RULES = ["fedbuff:buffer_size=3", "fedasync"]


def simulation():
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = {"arrivals": 30, "eval_every": 10, "concurrency": 5, "target": 0.05}
    return Simulation(own_tasks.linear, clients, None, own_tasks.TEST, rules=RULES, seeds=[0, 1], **settings)


@pytest.fixture(scope="module")
def results():
    return simulation().run()


class Frame(SimpleNamespace):
    """A minimal data frame, which records its input."""

    def __init__(self, rows, columns):
        super().__init__(rows=rows, columns=columns)


@pytest.fixture
def pandas(monkeypatch):
    monkeypatch.setattr(data_frames, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))


@pytest.mark.usefixtures("pandas")
def test_tables(results):
    frame = results.to_dataframe()
    assert frame.columns == ["rule", "seed", "arrivals", "version", "virtual_time", "accuracy", "loss"]
    assert frame.rows == [(run.spec.label, run.seed, *row) for run in results for row in run.evaluations]
    frame = results.to_dataframe("runs")
    assert frame.columns == ["rule", "seed", *results[0].summary(0.05)]
    assert [row[:3] for row in frame.rows] == [(run.spec.label, run.seed, run.final_accuracy) for run in results]
    frame = results.to_dataframe("arrivals")
    assert len(frame.rows) == 4 * 30
    assert frame.rows[30:60] == [
        ("fedasync", 0, number, client, late)
        for number, (client, late) in enumerate(
            zip(results[1].clients.tolist(), results[1].staleness.tolist(), strict=True)
        )
    ]
    frame = results.to_dataframe("participation")
    counts = Counter(results[3].clients.tolist())
    assert [row[2:] for row in frame.rows if row[:2] == ("fedasync", 1)] == sorted(counts.items())
    frame = results.to_dataframe("targets")
    for label, seed, target, *facts in frame.rows:
        rows = results.of(label, seed).evaluations
        hit = next((row for row in rows if row.accuracy >= target), (None,) * 5)
        assert tuple(facts) == tuple(hit[:3])
    frame = results.to_dataframe("differences")
    ((first, second, seeds, mean, *_),) = frame.rows
    assert (first, second, seeds) == (*RULES, 2)
    finals = np.array([run.final_accuracy for run in results]).reshape(2, 2)
    assert mean == np.mean(finals[:, 0] - finals[:, 1])
    with pytest.raises(ConfigError, match="unknown table 'rounds'"):
        results.to_dataframe("rounds")


def test_a_missing_package(results, monkeypatch):
    monkeypatch.setattr(data_frames, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install pandas"):
        results.to_dataframe()


def test_with_pandas_itself(results):
    pytest.importorskip("pandas")
    frame = results.to_dataframe()
    last = frame.groupby(["rule", "seed"]).last()
    for run in results:
        assert last.loc[(run.spec.label, run.seed), "accuracy"] == run.final_accuracy
    assert results.to_dataframe("targets")["arrivals"].dropna().isin(range(31)).all()


def test_statistics(results):
    assert results.paired_differences() == paired_differences(list(results))
    assert results.paired_differences("mean_staleness", 0.8) == paired_differences(list(results), "mean_staleness", 0.8)
    assert results.targets(0.05, 0.2) == reach_targets(list(results), [0.05, 0.2])
    assert {row.target for row in results.targets()} >= {0.05}


def test_event_files_need_a_folder_and_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install tensorboard"):
        simulation().run(tensorboard=True, out=tmp_path / "run")
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="tensorboard needs out=, a folder"):
        simulation().run(tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_event_files_of_a_simulation(tmp_path):
    pytest.importorskip("tensorboard")
    simulation().run(tensorboard=True, out=tmp_path / "run", processes=2)
    names = sorted(path.name for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert names == ["fedasync-seed0", "fedasync-seed1", "fedbuff_buffer_size=3-seed0", "fedbuff_buffer_size=3-seed1"]
