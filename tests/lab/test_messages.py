"""Errors that no other test raises: each says what is wrong, of which file or setting."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import own_tasks
from afflux.cli import common
from afflux.lab import Simulation, read_results
from afflux.lab.runs.run_checkpoint import InterruptedRun, StoredRun
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks import lora_task
from afflux.ops.errors import StoreError
from afflux.rules import files as rule_files
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError, Task, partitioned
from afflux.sim.clients.compiled_training import require_compiler
from afflux.sim.models import build_model
from afflux.sim.workload.config import SimConfig
from conftest import check_refused

X, Y = np.zeros((4, 2), np.float32), np.arange(4) % 2
SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36)


def own_training(**settings):
    return Simulation(own_tasks.linear, partitioned(X, Y, 2), own_tasks.counted, own_tasks.TEST, **settings)


def without_runs(folder):
    (folder / "finished.jsonl").write_text("")
    return folder


def a_run_whose_log_is(folder):
    log = SimpleNamespace(is_file=lambda: True, read_bytes=folder.read_bytes)
    return SimpleNamespace(log=log, output=folder)


#: What raises, in a folder; the kind of error, and its message.
CASES = {
    "a flag beside an option of the rule": (
        lambda folder: common.parse_rules(["fedbuff:buffer_size=7"], buffer_size=5),
        "--buffer-size is 5, but fedbuff:buffer_size=7 says buffer_size=7 itself",
    ),
    "a rate above float32": (
        lambda folder: SimConfig(client_lr=1e39),
        r"client_lr is 1e\+39, must be at most 3.4028234e\+38, the largest float32",
    ),
    "images that are too small": (
        lambda folder: build_model("cnn", (1, 3, 8), 2, 0),
        "model 'cnn' needs images of 4x4 pixels or more, not 3x8",
    ),
    "more examples than labels": (lambda folder: partitioned(X, Y[1:], 2), "there are 4 examples, but 3 labels"),
    "a partition by class of numbers": (
        lambda folder: partitioned(X, Y + 0.5, 2),
        r"partition 'dirichlet' divides .* by class, .* but y is 0.5 for example 0: give partition=\"iid\"",
    ),
    "a partition by class of sequences": (
        lambda folder: partitioned(X, X, 2, "classes"),
        r"partition 'classes' divides .* by class, .* but y has the shape \(4, 2\)",
    ),
    "an evaluation for tuning that is no function": (
        lambda folder: Task(own_tasks.linear, [], own_tasks.TEST, tuning=3),
        "tuning is 3, must be a function",
    ),
    "no clients": (lambda folder: partitioned(X, Y, 0), "num_clients is 0, must be at least 1"),
    "no clients of a function": (
        lambda folder: Task(own_tasks.linear, lambda client: None, own_tasks.TEST, num_clients=0),
        "num_clients is 0, must be at least 1",
    ),
    "an evaluation that is no function": (
        lambda folder: Task(own_tasks.linear, [], 3),
        "evaluate is 3, must be a function",
    ),
    "scaffold with a training function": (
        lambda folder: RunSetup(
            SimConfig(task="own", client_optimizer="scaffold"), 0, own_training(concurrency=1).task
        ),
        "client_optimizer is scaffold, but the task has a training function of its own",
    ),
    "a store of two runs": (
        lambda folder: own_training(seeds=[0, 1], concurrency=1).run(out=folder / "out", store=folder / "store"),
        "a store is for one rule and one seed",
    ),
    "a folder of no run": (lambda folder: read_results(without_runs(folder)), "holds no results of a run$"),
    "a log that cannot be read": (
        lambda folder: InterruptedRun.check_run_folder(a_run_whose_log_is(folder)),
        "cannot read .*: Is a directory",
    ),
    "fewer arrivals than a round": (
        lambda folder: RunSetup(SMALL, 0).new_server(parse_rule("fedbuff:buffer_size=40")),
        "arrivals is 36, but fedbuff:buffer_size=40 steps after 40",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named(case, tmp_path):
    make, message = CASES[case]
    check_refused(message, make, tmp_path)


def test_a_torch_that_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor", SimpleNamespace())  # its import takes seconds
    monkeypatch.setattr(torch, "_inductor", SimpleNamespace(), raising=False)
    check_refused(r"compile needs torch 2\.6 or newer, and this is [0-9]", require_compiler)


def test_a_data_set_without_a_folder(monkeypatch):
    monkeypatch.delenv("AFFLUX_DATA", raising=False)
    text = "data 'rte' is read from files: give their folder with --data-dir or AFFLUX_DA"
    check_refused(text, lora_task.data_folder, "rte", None)


def test_a_file_that_has_changed_since_its_parent_executed_it(tmp_path, monkeypatch):
    file = tmp_path / "rules.py"
    file.write_text("def mine():\n    pass\n")
    monkeypatch.setitem(rule_files.parents_digests, f"afflux rule file {file}", "0" * 64)
    check_refused(r"rules.py, or a module next to it, has changed", rule_files.rule_function, f"{file}:mine")


def test_a_store_whose_files_cannot_be_written(tmp_path, monkeypatch):
    stored, leader = StoredRun(tmp_path / "store"), SimpleNamespace(add_evaluations=lambda: None)
    leader.record, leader.history = SimpleNamespace(log=object()), SimpleNamespace()
    stream = SimpleNamespace(state=lambda: SimpleNamespace(events=1), state_arrays=lambda: {"sum": np.zeros(1)})
    with pytest.raises(ConfigError, match=r"cannot write .*run_id.txt: No such file or directory"):
        stored.begin(stream, leader, tmp_path / "none", 0.0)
    (tmp_path / "audit").mkdir()
    with pytest.raises(StoreError, match=r"\[store\] cannot write .*clients-1.npz.new: No such file or directory"):
        stored.begin(stream, leader, tmp_path / "audit", 0.0)
    assert os.listdir(tmp_path / "audit") == ["run_id.txt"]
