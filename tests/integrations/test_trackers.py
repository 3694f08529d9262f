"""examples/trackers.py: TensorBoard, W&B, offline, and MLflow, in files, have every evaluation of every run."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from afflux.lab import Simulation
from stopped_runs import Stopped, stop_at

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import trackers

pytestmark = pytest.mark.filterwarnings("default")
RULES, SEEDS = ["fedbuff:buffer_size=5", "fedasync"], [0, 1]
SETTINGS = {"model": "logreg", "num_clients": 20, "concurrency": 5, "arrivals": 60, "eval_every": 20}


def tracked(runs):
    """The results of a simulation and, by the name of the run, the numbers that a tracker got."""
    numbers = {}

    def both(run, metrics):
        numbers.setdefault(run.name, []).append(metrics)
        log(run, metrics)

    with runs as log:
        results = Simulation.of("images", RULES, seeds=SEEDS, **SETTINGS).run(on_evaluation=both)
    assert [[row["arrivals"] for row in rows] for rows in numbers.values()] == [[20, 40, 60]] * 4
    return results, numbers


def scalars(folder):
    """Every scalar that TensorBoard itself shows of a folder: {tag: [(step, value)]}."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_in_files(tmp_path):
    pytest.importorskip("tensorboard")
    _, numbers = tracked(trackers.tensorboard_runs(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == numbers.keys()
    for name, rows in numbers.items():
        expected = {key: [(row["arrivals"], float(np.float32(row[key]))) for row in rows] for key in rows[0]}
        assert scalars(tmp_path / name) == expected


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_tensorboard_of_a_resumed_run_supersedes_what_came_after_its_checkpoint(seconds, tmp_path):
    pytest.importorskip("tensorboard")
    simulation = Simulation.of("images", RULES[0], **SETTINGS | {"eval_every": 3})
    with trackers.tensorboard_runs(tmp_path / "whole") as log:
        simulation.run(on_evaluation=log)
    store, out = tmp_path / "store", tmp_path / "run"
    with trackers.tensorboard_runs(tmp_path / "parts") as log, pytest.raises(Stopped):
        simulation.run(store=store, out=out, checkpoint_every=seconds, on_evaluation=log, watch=stop_at(40))
    with trackers.tensorboard_runs(tmp_path / "parts") as log:
        simulation.run(store=store, out=out, on_evaluation=log)
    parts, whole = (scalars(next((tmp_path / name).iterdir())) for name in ("parts", "whole"))
    assert dict(parts["test/accuracy"]) == dict(whole["test/accuracy"])


def test_mlflow_in_files(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    from mlflow import MlflowClient

    _, numbers = tracked(trackers.mlflow_runs("afflux"))
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("afflux").experiment_id])
    assert {run.info.run_name for run in runs} == numbers.keys()
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params["client_lr"] == "0.1"
        for name in numbers[run.info.run_name][0]:
            history = client.get_metric_history(run.info.run_id, name)
            expected = [(row["arrivals"], row[name]) for row in numbers[run.info.run_name]]
            assert [(row.step, row.value) for row in history] == expected


def leveldb_records(data, place):
    """The records of a file in the format of LevelDB's logs, without its first `place` bytes."""
    end, parts, start = place + len(data), b"", place
    while place + 7 <= end:
        if (left := -place % 32768) < 7 and left:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place - start + 4)
        parts += data[place - start + 7 : place - start + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb.proto")  # not the stub of that name
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    _, numbers = tracked(trackers.wandb_runs("afflux"))
    wandb.teardown()  # ends its own process
    stored = {}
    for file in tmp_path.rglob("*.wandb"):
        rows, name = [], ""
        for record in map(Record.FromString, leveldb_records(file.read_bytes()[7:], 7)):
            name = record.run.display_name or name
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): float(item.value_json) for item in items})
        stored[name] = rows
    assert stored.keys() == numbers.keys()
    for name, rows in stored.items():
        expected = [{"_step": row["arrivals"], **row} for row in numbers[name]]
        assert [{key: row[key] for key in expected[0] if key in row} for row in rows] == expected
