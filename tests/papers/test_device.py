"""The setting device: another memory than the host's, which `cpu:0` is without a GPU; ResNet-18; records of tables."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from afflux.rules.specs import parse_rule
from afflux.sim import Task, classification
from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.workload.config import SimConfig
from bench.papers import reproduction
from bench.papers.all_tables import TABLES
from bench.papers.reproduction import Budget, Changes, check, folder_page, machine, reproduce, states
from conftest import check_refused
from made_runs import run
from test_gpu_clients import put_the_cpu_in_its_place
from test_paper_task import write_images

#: Another device to the code, but with the CPU's bits; what a graph recorded is called again.
COPY = "cpu:0"
SMALL = {"model": "logreg", "num_clients": 8, "concurrency": 4, "arrivals": 12, "eval_every": 6}


@pytest.fixture(autouse=True)
def _a_copy_of_the_cpu(monkeypatch):
    monkeypatch.setattr("afflux.sim.workload.config.DEVICES", ("cpu", "cuda", COPY))
    put_the_cpu_in_its_place(monkeypatch)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("ca2fl:buffer_size=3", {"weight_decay": 1e-3}),
        ("zenopp", {"client_optimizer": "fedprox", "model": "cnn"}),
        ("afa_cd:buffer_size=3", {"client_optimizer": "scaffold"}),
    ],
)
def test_another_device_makes_the_same_run(rule, settings):
    plain = SimConfig(**SMALL | settings)
    ours, other = (run(parse_rule(rule), 0, replace(plain, device=device)) for device in ("cpu", COPY))
    assert ours.digest == other.digest
    assert ours.evaluations == other.evaluations
    assert "device" not in plain.recorded()
    assert replace(plain, device=COPY).recorded()["device"] == COPY


@pytest.fixture
def resnet(tmp_path):
    """A table with one cell of FADAS's Table 2, on small data, and the folder of the data."""
    write_images(tmp_path, "cifar10", (32, 32, 3), 10)
    (cell,) = [cell for cell in TABLES["fadas-table2"].cells if cell.name == "Dir(0.1), FADAS"]
    small = {"num_clients": 4, "concurrency": 2, "refill": 1, "alpha": 100.0, "local_epochs": 0, "batch_size": 4}
    small |= {"local_steps": 1, "eval_every": 2}
    rule = cell.rule.replace("buffer_size=5", "buffer_size=1")
    cells = (cell._replace(rule=rule, settings=cell.settings | small),)
    return replace(TABLES["fadas-table2"], cells=cells, seeds=1), tmp_path


@pytest.mark.soak
@pytest.mark.parametrize("device", [COPY, "cpu"])
def test_two_rounds_of_resnet_18(device, resnet):
    """On the CPU the suite makes those of a preset; the device is part of the record, and of what finds it again."""
    table, folder = resnet
    out, changes = folder / "out", Changes(str(folder), 2, device)
    _, left = reproduce(table, out, (0,), changes=changes, limits=Budget(processes=1))
    assert left == 0
    (line,) = [json.loads(text) for text in (out / "fadas-table2.jsonl").read_text().splitlines()]
    assert [row[1] for row in line["evaluations"]] == [0, 2]
    assert np.isfinite([row[4] for row in line["evaluations"]]).all()
    assert line["config"].get("device", "cpu") == device
    assert reproduce(table, out, (0,), changes=changes, limits=Budget(runs=1, processes=1))[1] == 0


def test_buffers_are_those_of_the_device():
    """BatchNorm's, which the server averages, and a count that it copies."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2) for _ in range(8)]
    layers = (torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    task = Task(torch.nn.Sequential(*layers), clients, classification(*clients[0]))
    settings = SMALL | {"task": "python:task", "arrivals": 9, "eval_every": 3}
    del settings["model"]
    plain = SimConfig(**settings, delays="ca2fl", local_steps=2)
    for rule in ("fedbuff:buffer_size=3", "fedasync"):
        ours, other = (run(parse_rule(rule), 0, replace(plain, device=one), task=task) for one in ("cpu", COPY))
        assert (ours.digest, ours.evaluations) == (other.digest, other.evaluations)


def test_list_page_and_check_find_the_runs_of_their_device(tmp_path, monkeypatch):
    cell = TABLES["fadas-table2"].cells[0]._replace(rule="fedbuff:buffer_size=3", settings=SMALL)
    table = replace(TABLES["fadas-table2"], cells=(cell,), seeds=1)
    monkeypatch.setattr(reproduction, "TABLES", {table.name: table})
    reproduce(table, tmp_path, (0,), changes=Changes(device=COPY), limits=Budget(processes=1))
    assert [(state.runs, state.wanted) for state in states(tmp_path)] == [(1, 1)]
    page = folder_page(table, tmp_path)
    assert len(page.content["cells"]) == 1
    assert f"seeds 0; 1 of 1 runs on {machine()['cpu']}." in page.markdown
    lines, (run_here, *_) = reproduction._lines_in(tmp_path), reproduction.runs_of(table, table.cells, (0,), [])[0]
    assert reproduction.lines_of_jobs(lines, [run_here.job]) == {}, "a run on the CPU is another one"
    made, compare = [], reproduction.compare
    monkeypatch.setattr(
        reproduction, "compare", lambda jobs, *a, **k: made.append(jobs[0].config.device) or compare(jobs, *a, **k)
    )
    assert check(tmp_path, None).lines[-1].endswith("equal")
    file = tmp_path / "fadas-table2.jsonl"
    file.write_text(file.read_text().replace(f'"device": "{COPY}"', '"device": "cuda"'))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check(tmp_path, None).lines[-1].endswith("equal"), "without a GPU it is made on the CPU"
    assert made == [COPY, "cpu"]
    reproduce(table, tmp_path, (0,), limits=Budget(processes=1))
    assert "1 runs on" not in folder_page(table, tmp_path).markdown, "the run's last line counts, the CPU's"
    assert [(state.runs, state.wanted) for state in states(tmp_path)] == [(1, 1)]


def test_cudnn_is_on_while_clients_train():
    """By default torch's context of flags turns it off."""
    with reproducible_libraries():
        assert torch.backends.cudnn.enabled
        assert torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "cuda:x"}, "unknown device 'cuda:x'"),
        ({"device": "cuda:200"}, "unknown device 'cuda:200'"),
        ({"device": "cuda:1"}, "device is cuda:1, but torch finds no such GPU, only 1"),
    ],
)
def test_devices_that_are_not_there(settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_refused(message, lambda: run(parse_rule("fedbuff:buffer_size=3"), 0, SimConfig(**SMALL | settings)))


def test_a_record_names_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    assert machine("cuda:1")["cpu"] == "name of cuda:1"
    assert machine("cpu") == machine()
