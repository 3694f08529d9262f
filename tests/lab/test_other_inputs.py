"""A run or grid that would go on with other data is refused, and the error names them."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import own_tasks
from afflux.lab import Simulation, tune
from afflux.lab.results import finished_runs
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.finished_runs import FILE
from afflux.lab.runs import setup
from afflux.lab.runs.run_checkpoint import refuse_other_setup
from afflux.lab.tasks.inputs import content_digest
from afflux.lab.tasks.registry import build_task
from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim import Task, classification, partitioned
from afflux.sim import data as data_sets
from afflux.sim.data import image_set
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.partitions import PARTITIONS, classes
from conftest import check_refused
from made_runs import paused_run, resume, run, run_in_store
from pairwise import soak
from stopped_runs import Stopped, stop_at

SMALL = SimConfig(
    model="logreg", num_clients=12, concurrency=4, arrivals=12, eval_every=6, local_steps=1, partition="iid"
)
OWN = replace(SMALL, task="python:own", model="cnn", partition="dirichlet")
RULE = parse_rule("fedbuff:buffer_size=3")


def digits_with(change, monkeypatch):
    """From now on the digits are read with this change of their (images, labels)."""
    read = image_set.digits_of_scikit_learn()
    monkeypatch.setattr(image_set, "digits_of_scikit_learn", lambda: change(*map(np.copy, read)))
    data_sets._read.cache_clear()


@pytest.fixture(autouse=True)
def _digits_again():
    yield
    data_sets._read.cache_clear()


def swapped(images, labels):
    """Two labels of the training part change places: class sizes, split and shapes remain."""
    labels[[0, 1]] = labels[[1, 0]]
    return images, labels


def brighter(images, labels):
    images[3, 20] += 1
    return images, labels


def stopped(folder, config=SMALL, task=None):
    (folder / "audit").mkdir(parents=True)
    with pytest.raises(Stopped):
        run_in_store(folder / "store", RULE, 3, config, folder / "audit", stop_at(5), 0.0, task)
    return folder / "store"


@pytest.mark.parametrize("change", [swapped, brighter])
def test_a_run_does_not_go_on_with_other_data(change, tmp_path, monkeypatch):
    store = stopped(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    digits_with(change, monkeypatch)
    check_refused(r"store: the run began with other inputs: data; undo the change", resume, paused_run(store))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    data_sets._read.cache_clear()
    (tmp_path / "whole").mkdir()
    whole = run(RULE, 3, SMALL, output=tmp_path / "whole")
    assert resume(paused_run(store)).digest == whole.digest


def test_the_digests_of_data_are_those_of_older_logs(tmp_path):
    """Otherwise no interrupted run would go on with this version."""
    assert content_digest(build_task(SMALL).source).startswith("a3960127d7504ecf")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (6, 28, 28), np.uint8), np.arange(6), rng.integers(0, 256, (4, 28, 28), np.uint8)]
    arrays.append(np.arange(4, dtype=np.uint8))
    np.savez(tmp_path / "mnist.npz", **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    images = SimConfig(data="mnist", data_dir=str(tmp_path), model="logreg")
    assert build_task(images).source == content_digest(arrays)
    papers = build_task(SimConfig(task="papers:dataset=mnist:network=logreg", data_dir=str(tmp_path))).source
    assert content_digest(papers) == content_digest(SimpleNamespace(**{**vars(papers), "files": None}))


def test_another_division_is_named(tmp_path, monkeypatch):
    store = stopped(tmp_path)
    monkeypatch.setitem(PARTITIONS, "iid", lambda labels, count, _, rng: classes(labels, count, 2, rng))
    check_refused("other inputs: clients;", resume, paused_run(store))


def test_the_file_of_the_availability_is_an_input(tmp_path):
    trace = tmp_path / "ready.csv"
    trace.write_text("device,start,end\na,0,60\nb,10,99\n")
    store = stopped(tmp_path / "run", replace(SMALL, availability=f"devices:file={trace}"))
    trace.write_text("device,start,end\na,0,60\nb,10,99.0\n")  # the same times: nothing else would notice it
    check_refused("other inputs: availability;", resume, paused_run(store))


def own_task(**changes):
    clients = [[own_tasks.X[i::12].clone(), own_tasks.Y[i::12].clone()] for i in range(12)]
    test = classification(own_tasks.TEST.x.clone(), own_tasks.TEST.y.clone())
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Dropout(0.1), nn.Linear(6, 3))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)
    return Task(model, [tuple(own) for own in clients], test, validation=(own_tasks.X[:9].clone(), own_tasks.Y[:9]))


def other_example(task):
    task.clients[5][0][2, 1] += 1


def other_client(task):
    """The same examples in another order."""
    task.clients[0], task.clients[12 - 1] = task.clients[11], task.clients[0]


def other_test(task):
    task.evaluate.y[0] += 1


def other_validation(task):
    task.validation[0][0, 0] = 3


def other_frozen_layer(task):
    task.model[0].weight.data[0, 0] = 1


def other_module(task):
    task.model[1].p = 0.5


OTHERS = [
    (other_example, "data"),
    (other_frozen_layer, "model"),
    *soak(other_client, "data"),
    *soak(other_test, "evaluation"),
    *soak(other_validation, "validation"),
    *soak(other_module, "model"),
]


@pytest.mark.parametrize(("change", "name"), OTHERS)
def test_the_inputs_of_an_own_task(change, name, tmp_path):
    store = stopped(tmp_path, OWN, own_task())
    task = own_task()
    change(task)
    check_refused(f"other inputs: {name};", resume, paused_run(store), task=task)
    resume(paused_run(store), task=own_task())


def test_clients_that_a_function_makes_may_name_their_source(tmp_path):
    task = Task(own_tasks.linear, own_tasks.lazy, own_tasks.TEST, num_clients=12, source="version 1")
    store = stopped(tmp_path, OWN, task)
    with pytest.raises(ConfigError, match="other inputs: data;"):
        resume(paused_run(store), task=replace(task, source="version 2"))


def test_older_logs_and_other_versions_are_one_line_of_notice(tmp_path, monkeypatch, caplog):
    run(RULE, 3, SMALL, output=tmp_path)
    (path,) = tmp_path.glob("*.jsonl")
    log = read_audit_log(path)
    assert set(log.header.inputs) == {"data", "clients", "model"}
    assert log.header.versions == {name: finished_runs.package_versions()[name] for name in ("numpy", "torch")}
    begun = setup.RunSetup(SMALL, 3, digests=True)
    refuse_other_setup(begun, path, log.header)
    assert caplog.messages == []
    older = replace(log, header=msgspec.structs.replace(log.header, inputs=msgspec.UNSET, versions=msgspec.UNSET))
    refuse_other_setup(begun, path, older.header)
    assert caplog.messages == [f"{path} holds no digests of its inputs: a change of the data is not noticed"]
    caplog.clear()
    now = finished_runs.package_versions() | {"torch": "99.1"}
    monkeypatch.setattr(finished_runs, "package_versions", lambda: now)
    refuse_other_setup(begun, path, log.header)
    (notice,) = caplog.messages
    assert notice.startswith(f"{path}: the run began with torch {log.header.versions['torch']}: ")
    other = replace(log, header=msgspec.structs.replace(log.header, num_clients=7))
    check_refused(r"other inputs: number of clients; .*with torch ", refuse_other_setup, begun, path, other.header)


def simulation(shift=0.0, model=own_tasks.linear):
    clients = partitioned(own_tasks.X + shift, own_tasks.Y, 12, "iid")
    settings = {"concurrency": 4, "arrivals": 12, "eval_every": 4}
    return Simulation(model, clients, None, own_tasks.TEST, rules=RULE, seeds=[1, 2], **settings)


def wider(rng):
    return nn.Sequential(nn.Dropout(0.0), own_tasks.linear(rng))


def warnings(caplog):
    """The messages but those of servers, which log the first faulty push."""
    return {text for text in caplog.messages if not text.startswith("[push]")}


def test_a_grid_has_one_data_set_and_one_model(tmp_path, caplog):
    grid, out = {"client_lr": [0.1, 1e37]}, tmp_path / "out"
    page = str(tune(simulation(), grid, out=out))
    assert "diverged" in page
    (out / "grid.md").unlink()
    check_refused(rf"out/{FILE}: .* began with other inputs: data, evaluation;", tune, simulation(0.5), grid, out=out)
    check_refused("other inputs: model;", tune, simulation(model=wider), {"client_lr": [0.1, 0.2, 1e37]}, out=out)
    assert not (out / "grid.md").exists()
    assert str(tune(simulation(), grid, out=out)) == page
    assert warnings(caplog) == set()
    for path in (out / FILE, out / "test" / FILE):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line.get("status") == "open":
                continue
            assert line.pop("versions") == finished_runs.package_versions()
            assert line.pop("inputs").keys() == {"data", "clients", "evaluation", "model"}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with caplog.at_level(logging.WARNING):
        assert str(tune(simulation(0.5), grid, out=out)) == page
    lack = "holds no digests of its inputs: a change of the data is not noticed"
    assert warnings(caplog) == {f"{out / FILE} {lack}", f"{out / 'test'} {lack}"}


def test_the_digest_of_objects():
    x, y = np.arange(6.0).reshape(2, 3), np.array([1, 0])
    looped = SimpleNamespace(x=x, path="/tmp/1")
    looped.self = looped
    pairs = [[x, y], [x, y[::-1]], [x.astype(np.float32), y], [x.reshape(3, 2), y], [x.view(np.int64), y], [[x], [y]]]
    pairs += [[torch.tensor(x), y], [torch.tensor(x).bfloat16(), y]]
    data = TensorDataset(torch.tensor(x), torch.tensor(y))
    others = [torch.tensor(x).to_sparse(), data, Subset(data, [0, 1]), Subset(data, [1, 0]), looped, {"x": x}]
    lists = [["text", "another"], ["text", "other"], [1, 2, 3], [1, 2, 4], [[1, 2], [3]], [[1], [2, 3]]]
    contents = [*pairs, *others, *lists, np.array(["text", None]), np.array(["text", 1.0], object)]
    digests = [content_digest(content) for content in contents]
    assert len(set(digests) - {None}) == len(contents)
    assert content_digest([np.asfortranarray(x), y.copy()]) == digests[0]
    looped.path = "/tmp/2"
    assert content_digest(looped) == digests[contents.index(looped)], "texts of objects may be paths or counters"
    assert content_digest([x, x]) != content_digest([x, x + 1])
    for opaque in (None, [], object(), [lambda: x, np], torch.Generator(), range):
        assert content_digest(opaque) is None


def test_workers_compute_no_digests(monkeypatch):
    monkeypatch.setattr(setup, "input_digests", None)
    run(RULE, 3, SMALL)
