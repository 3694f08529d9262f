"""TensorBoard's event files: what is in them, and the error without the package."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux.cli.lab.app import app
from afflux.lab.results import tensorboard
from afflux.lab.results.audit_log import AuditOutput, read_audit_log
from afflux.lab.runs import library
from afflux.lab.runs.run_checkpoint import InterruptedRun
from afflux.rules.specs import parse_rule
from afflux.sim.errors import MissingExtraError
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_raises
from made_runs import resume, run, run_in_store, run_paired
from stopped_runs import Stopped, stop_at

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=2)
SPEC = parse_rule("fedbuff:buffer_size=3")


def scalars(folder):
    """Every scalar that TensorBoard itself shows of a folder: {tag: [(step, value)]}."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(result, log, name):
    """The mean of a round's number between two evaluations, from the audit log, as float32."""
    rows, rounds, start = [], {line.version: line for line in log.rounds}, 0
    for row in result.evaluations[1:]:
        between = [rounds[version] for version in range(start + 1, row.version + 1)]
        start = row.version
        if between:
            values = [name(line) for line in between]
            rows.append((row.arrivals, float(np.float32(sum(values) / len(values)))))
    return rows


def test_the_files_hold_the_evaluations_and_the_rounds_between(tmp_path):
    pytest.importorskip("tensorboard")
    with tensorboard.event_files(tmp_path / "events") as write:
        result = run(SPEC, 0, SMALL, output=AuditOutput(tmp_path), on_evaluation=write)
    (folder,) = (tmp_path / "events").iterdir()
    assert folder.name == "fedbuff_buffer_size=3-seed0"
    found = scalars(folder)
    for name in ("accuracy", "loss"):
        rows = [(row.arrivals, float(np.float32(getattr(row, name)))) for row in result.evaluations[1:]]
        assert found[f"test/{name}"] == rows
    log = read_audit_log(tmp_path / f"{folder.name}.jsonl")
    assert found["round/staleness_max"] == expected(result, log, lambda line: max(line.staleness))
    assert found["round/weight_max"] == expected(result, log, lambda line: max(line.weights))
    assert found["round/rejected"] == expected(result, log, lambda line: sum(why != "" for why in line.rejected))
    assert "round/version" not in found


def test_every_rule_of_a_paired_run_has_its_own_folder(tmp_path):
    pytest.importorskip("tensorboard")
    specs = [SPEC, parse_rule("fedasync")]
    with tensorboard.event_files(tmp_path / "events") as write:
        run_paired(specs, 1, SMALL, on_evaluation=write)
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == [
        "fedasync-seed1",
        "fedbuff_buffer_size=3-seed1",
    ]


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 19), (1000.0, 0)])
def test_a_resumed_run_supersedes_what_was_written_after_its_checkpoint(seconds, kept, tmp_path):
    pytest.importorskip("tensorboard")
    config = replace(SMALL, eval_every=3)
    with tensorboard.event_files(tmp_path / "whole") as write:
        whole = run(SPEC, 0, config, output=AuditOutput(tmp_path), on_evaluation=write)
    folder = tmp_path / "run" / "audit"
    folder.mkdir(parents=True)
    output = AuditOutput(folder)

    with pytest.raises(Stopped), tensorboard.event_files(tmp_path / "parts") as write:
        run_in_store(tmp_path / "store", SPEC, 0, config, output, stop_at(20), seconds=seconds, on_evaluation=write)
    paused = InterruptedRun(tmp_path / "store")
    assert paused.arrivals == kept
    with tensorboard.event_files(tmp_path / "parts") as write:
        result = resume(paused, on_evaluation=write)
    assert result.digest == whole.digest
    parts, all_at_once = (next((tmp_path / name).iterdir()) for name in ("parts", "whole"))
    assert dict(scalars(parts)["test/accuracy"]) == dict(scalars(all_at_once)["test/accuracy"])


@pytest.mark.parametrize("checkpoint_every", [0.0, 1000.0])
def test_a_resumed_run_writes_what_it_was_begun_with(checkpoint_every, tmp_path):
    """Event files and models, without a word about them, also if it begins anew at its first checkpoint."""
    pytest.importorskip("tensorboard")
    simulation = library.Simulation.of(SMALL, [SPEC], [0])
    options = dict(tensorboard=True, save_every=12)
    simulation.run(out=tmp_path / "whole", **options)
    stored = dict(out=tmp_path / "run", store=tmp_path / "store", checkpoint_every=checkpoint_every)
    check_raises(Stopped, simulation.run, watch=stop_at(21), **stored, **options)
    library.resume(tmp_path / "store")
    runs = {}
    for name in ("whole", "run"):
        (events,) = (tmp_path / name / "tensorboard").iterdir()
        models = sorted(path.name for path in (tmp_path / name / "models").iterdir())
        runs[name] = dict(scalars(events)["test/accuracy"]), models
    assert runs["run"] == runs["whole"]
    assert len(runs["run"][1]) == 4


def test_without_the_package_the_error_comes_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    check_error("pip install tensorboard", tensorboard.require_tensorboard, error=MissingExtraError)
    for command in (["compare", "--rules", "fedbuff"], ["run", "--rule", "fedbuff"]):
        result = CliRunner().invoke(app, [*command, "--tensorboard", "--out", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert result.stderr == "error: event files need the package tensorboard: pip install tensorboard\n"
    assert not (tmp_path / "out").exists()
