"""The model of a run, at its end and on the way: the file, its roles and digests, and loading it."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import made_runs
import own_tasks
from afflux.lab import read_audit_log, read_results
from afflux.sim import sgd
from afflux.sim.clients.flat_model import make_module
from conftest import check_refused


class Tied(nn.Module):
    """Two names of one parameter, and a buffer that no client changes."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)
        self.two = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x):
        return self.one(x) + self.scale * self.two(x)


def simulation(model=own_tasks.Net, **settings):
    settings = {"rules": ["fedbuff:buffer_size=3"], "arrivals": 24, "eval_every": 12, "concurrency": 4} | settings
    return made_runs.simulation(sgd(), model=model, **settings)


def test_the_final_model_has_the_accuracy_of_the_run(tmp_path):
    """BatchNorm's statistics and a frozen random layer are part of it; also of a result that was read again."""
    own = simulation()
    (run,) = own.run(out=tmp_path)
    (same,) = own.run()
    for result, model in ((run, own_tasks.Net()), (read_results(tmp_path)[0], own_tasks.Net()), (same, None)):
        model = make_module(own.task.model, 0) if model is None else model
        result.load(model)
        assert own_tasks.TEST(model.eval())[0] == run.final_accuracy
        assert (result.digest, result.buffers_digest) == (run.digest, same.buffers_digest)
    assert run.model_file == tmp_path / "models" / "fedbuff_buffer_size=3-seed0.safetensors"
    with safe_open(run.model_file, "numpy") as file:
        roles = json.loads(file.metadata()["roles"])
        assert roles.keys() == {*file.keys()} == {*dict(own_tasks.Net().state_dict())}
        trained = np.concatenate([file.get_tensor(n).ravel() for n in run.layout.roles if roles[n] == "trained"])
    assert trained.tobytes() == run.params.tobytes()
    assert {roles["norm.running_var"], roles["frozen.0.weight"], roles["frozen.1.running_mean"]} == {
        "statistic",
        "constant",
    }
    assert read_audit_log(next((tmp_path / "audit").iterdir())).end.buffers_sha256 == run.buffers_digest
    assert json.loads((tmp_path / "summary.json").read_text())["runs"][0]["buffers_sha256"] == run.buffers_digest


def test_another_model_is_refused_and_not_changed(tmp_path):
    own = simulation()
    (run,), (memory,) = own.run(out=tmp_path), own.run()
    other = own_tasks.Net()
    before = [array.clone() for array in other.state_dict().values()]
    check_refused("the model differs from the one of this run: arrays that no client trains differ", memory.load, other)
    assert all(map(torch.equal, before, other.state_dict().values()))
    wrong = nn.Linear(2, 2)
    check_refused(r"weight has shape None, but in the model it is \(2, 2\)", run.load, wrong)
    check_refused("the model differs from the one of this run", memory.load, wrong)
    run.model_file.write_bytes(b"")
    check_refused(f"cannot read {run.model_file}", run.load, own_tasks.Net())
    run.model_file.unlink()
    check_refused("the result was read from a folder without models/", read_results(tmp_path)[0].load, own_tasks.Net())


def test_a_model_without_buffers_has_no_new_field(tmp_path):
    (run,) = simulation(own_tasks.linear).run(out=tmp_path)
    assert run.buffers_digest == ""
    assert b"buffers_sha256" not in next((tmp_path / "audit").iterdir()).read_bytes()
    assert "buffers_sha256" not in (tmp_path / "summary.json").read_text()


def test_the_model_of_a_run_that_was_stopped(tmp_path):
    own = simulation(Tied)

    def stop(index, progress):
        if progress.arrivals == 13:
            raise KeyboardInterrupt

    places = {"out": tmp_path / "out", "store": tmp_path / "store"}
    with pytest.raises(KeyboardInterrupt):
        own.run(**places, checkpoint_every=0, watch=stop)
    (resumed,), (whole,) = own.run(**places), own.run(out=tmp_path / "whole")
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()
    models = [Tied(), Tied()]
    for model, result in zip(models, (whole, own.run()[0]), strict=True):
        result.load(model)
        assert own_tasks.TEST(model)[0] == whole.final_accuracy
