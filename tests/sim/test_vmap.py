"""Groups of clients that torch.func.vmap trains: the trainings of one process, up to the order of additions."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import own_tasks
from afflux.cli import app
from afflux.sim import ConfigError, SimConfig, Simulation, Task, Vmap, classification, partitioned, sgd
from afflux.sim.clients.flat_model import FlatModel
from afflux.sim.clients.training import Trainer
from afflux.sim.clients.vmap_training import Start, VmapTrainer

CLIENTS = 5
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch finds no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def squares(output, y):
    return ((output[:, 0] - y) ** 2).mean()


def small_numbers(sizes, steps=2, **settings):
    """Trainers of linear regression on data so small that float32 makes no error, whatever the order of additions.

    Batches of 4 or 2 examples, a learning rate of 1/8: each step adds at most 6 bits.
    """
    rng = np.random.default_rng(3)
    data = [
        (torch.from_numpy(rng.integers(-2, 3, (size, 3)).astype("f4")), torch.from_numpy(rng.integers(-2, 3, size)))
        for size in sizes
    ]
    task = Task(lambda: torch.nn.Linear(3, 1), data, classification(*data[0]), loss=squares)
    settings = {"client_lr": 0.125, "local_steps": steps, "batch_size": 4} | settings
    config = SimConfig(task="python:own", num_clients=len(sizes), concurrency=1, **settings)
    model = FlatModel(task.model())
    return model, Trainer(model, data, task, config)


def starts_of(model, clients, shifts=False):
    rng = np.random.default_rng(4)
    vectors = [rng.integers(-2, 3, model.layout.size).astype("f4") for _ in range(2 * clients)]
    return [
        Start(client, vectors[client], np.random.default_rng(client), vectors[clients + client] if shifts else None)
        for client in range(clients)
    ]


def one_by_one(trainer, starts):
    return [trainer.train(start.client, start.pulled, start.rng, start.shift, start.buffers) for start in starts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [8] * CLIENTS),
        ({"weight_decay": 0.5}, [8] * CLIENTS),
        ({"client_optimizer": "fedprox", "mu": 0.5}, [8] * CLIENTS),
        ({"client_optimizer": "scaffold"}, [8] * CLIENTS),
        ({"examples": "batch", "weight_decay": 0.25}, [6, 4, 2, 8, 6]),
        ({"local_epochs": 1, "weight_decay": 0.5}, [6, 4, 2, 8, 6]),
        ({"steps_law": "uniform", "steps": 1, "client_optimizer": "fedprox", "mu": 0.5}, [8, 8, 4, 8, 4]),
    ],
    ids=["sgd", "weight decay", "fedprox", "scaffold", "last batches", "epochs of other lengths", "random steps"],
)
def test_equals_one_client_after_the_other_where_no_sum_is_rounded(settings, sizes, device):
    model, trainer = small_numbers(sizes, **settings)
    shifts = settings.get("client_optimizer") == "scaffold"
    alone = one_by_one(trainer, starts_of(model, CLIENTS, shifts))
    group = VmapTrainer(model, trainer, torch.device(device)).train(starts_of(model, CLIENTS, shifts))
    for ours, theirs in zip(group, alone, strict=True):
        np.testing.assert_array_equal(ours.update, theirs.update)
        assert (ours.num_examples, ours.steps, ours.buffers) == (theirs.num_examples, theirs.steps, None)
        assert ours.loss == pytest.approx(theirs.loss, rel=2.0**-20)
    assert any(np.abs(own.update).max() > 0 for own in alone)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_those_of_each_client(device):
    """BatchNorm's statistics: three steps of momentum 0.1, each mean of 8 values rounded 8 times at most."""
    rng = np.random.default_rng(5)
    data = [(torch.from_numpy(rng.normal(n, 1, (8, 3)).astype("f4")), torch.arange(8) % 2) for n in range(CLIENTS)]
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    task = Task(net, data, classification(*data[0]))
    config = SimConfig(task="python:own", num_clients=CLIENTS, concurrency=1, local_steps=3, batch_size=8)
    model = FlatModel(net)
    trainer = Trainer(model, data, task, config)
    starts = [
        Start(client, model.initial_params, np.random.default_rng(client), None, model.initial_buffers + client)
        for client in range(CLIENTS)
    ]
    fresh = [start._replace(rng=np.random.default_rng(start.client)) for start in starts]
    alone, group = one_by_one(trainer, starts), VmapTrainer(model, trainer, torch.device(device)).train(fresh)
    eps = np.finfo(np.float32).eps
    for ours, theirs in zip(group, alone, strict=True):
        bound = 3 * 8 * eps * np.abs(theirs.buffers).max()
        np.testing.assert_allclose(ours.buffers, theirs.buffers, rtol=0, atol=bound)
        np.testing.assert_allclose(ours.update, theirs.update, rtol=0, atol=1e3 * eps)
    counter = next(field for field in model.layout.buffers if "num_batches" in field.name)
    assert [own.buffers[counter.start] for own in group] == [3 + client for client in range(CLIENTS)]


def simulation(model=own_tasks.linear, **settings):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = ({} if "protocol" in settings else {"concurrency": 8}) | settings
    own = {"rules": "fedbuff:buffer_size=4", "arrivals": 60, "eval_every": 20} | settings
    return Simulation(model, clients, sgd(0.1, steps=3), own_tasks.TEST, **own)


@pytest.mark.parametrize("settings", [{}, {"protocol": "rounds", "stale_models": 3}], ids=["events", "rounds"])
def test_a_run_has_the_same_events(settings):
    (one,) = simulation(**settings).run()
    (group,) = simulation(**settings).run(workers=Vmap(clients=3, device="cpu"))
    assert group.staleness.tolist() == one.staleness.tolist()
    assert group.clients.tolist() == one.clients.tolist()
    assert [own.virtual_time for own in group.evaluations] == [own.virtual_time for own in one.evaluations]
    # 60 updates of 3 steps; the gradient of a step, below 4, is the sum of 16 products of 6 numbers: 128 roundings.
    steps, largest = 60 * 3, 4 * 0.1
    np.testing.assert_allclose(group.params, one.params, rtol=0, atol=steps * 128 * largest * 2.0**-24)
    assert np.abs(one.params).max() > 0.2


def test_frozen_parts_statistics_and_dropout():
    """Dropout draws other numbers, so the results differ; the model has learned the classes in both."""
    (group,) = simulation(own_tasks.Net, arrivals=200).run(workers=Vmap(clients=4, device="cpu"))
    assert group.evaluations[-1].accuracy > 0.9
    assert group.evaluations[0].accuracy < 0.7


def test_a_group_is_trained_when_its_first_result_is_needed(monkeypatch):
    sizes = []
    train = VmapTrainer.train
    monkeypatch.setattr(VmapTrainer, "train", lambda self, starts: (sizes.append(len(starts)), train(self, starts))[1])
    simulation().run(workers=Vmap(clients=4, device="cpu"))
    assert max(sizes) == 4
    # Those that still train when the run ends may have been trained for nothing.
    assert 60 <= sum(sizes) <= 60 + 8


def test_the_command_line(tmp_path):
    settings = "--model logreg --num-clients 20 --concurrency 5 --arrivals 20 --eval-every 10 --buffer-size 5"
    for workers in ("vmap:clients=4:device=cpu", "1"):
        out = tmp_path / workers[:4]
        command = ["compare", "--rules", "fedbuff", "--workers", workers, "--out", str(out), *settings.split()]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    read = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("vmap", "1")]
    assert read[0].keys() == read[1].keys()
    store, out = tmp_path / "store", tmp_path / "run"
    command = ["run", "--rule", "fedbuff", "--workers", "vmap:device=cpu", "--store", str(store), "--out", str(out)]
    assert CliRunner().invoke(app, [*command, *settings.split()[:-2]]).exit_code == 0
    again = CliRunner().invoke(app, ["run", "--resume", str(store), "--workers", "vmap:clients=2:device=cpu"])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("workers", ["0", "x", "vmap:4", "vmap:clients=0", "vmap:device=nowhere", "-1", "2.5"])
def test_wrong_workers_on_the_command_line(workers):
    result = CliRunner().invoke(app, ["compare", f"--workers={workers}"])
    assert result.exit_code == 2
    assert "--workers" in result.stderr


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


def test_what_vmap_cannot_train():
    with pytest.raises(ConfigError, match="clients of Vmap is 0"):
        Vmap(clients=0)
    with pytest.raises(ConfigError, match="device of Vmap is 'nowhere'"):
        Vmap(device="nowhere")
    own = Simulation(own_tasks.Net, partitioned(own_tasks.X, own_tasks.Y, 12), own_tasks.momentum, own_tasks.TEST)
    with pytest.raises(ConfigError, match="training function of its own"):
        own.run(workers=Vmap(device="cpu"))
    _, trainer = small_numbers([8] * CLIENTS)
    branches = FlatModel(Branches())
    with pytest.raises(ConfigError, match=r"clients 0, 1, 2, 3, 4 cannot be trained by torch.func.vmap.*control flow"):
        VmapTrainer(branches, trainer, CPU).train(starts_of(branches, CLIENTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(ConfigError, match="device cuda cannot be used"):
        simulation().run(workers=Vmap())
