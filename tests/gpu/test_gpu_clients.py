"""Clients that train on a GPU. Without one, the CPU is in its place as the device cpu:0, and recorded calls of torch in
the place of a CUDA graph.
"""

import os

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from afflux.lab.tasks.augmentation import AugmentedImages
from afflux.rules.specs import parse_rule
from afflux.sim.clients import compiled_training, training
from afflux.sim.clients.batches import note_once, resident, take
from afflux.sim.clients.compiled_training import GraphedStep
from afflux.sim.clients.flat_model import FlatModel, reproducible_libraries
from afflux.sim.clients.training import Trainer
from afflux.sim.models import build_model
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Task
from conftest import check_refused
from made_runs import run

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch finds none for clients")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
pytestmark = pytest.mark.filterwarnings("default:.*determinis")


class Recorder(TorchDispatchMode):
    """As a CUDA graph: the same operations on the same memory, with the numbers of the recorded call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(self, step):
    with Recorder() as recorder:
        loss = step()
    return lambda: recorder.replay() or loss


def put_the_cpu_in_its_place(monkeypatch):
    monkeypatch.setattr(GraphedStep, "record", record)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu:0", pytest.param("cuda", marks=needs_cuda)])
def device(request, monkeypatch, deterministic):
    note_once.cache_clear()
    monkeypatch.setattr(training, "EAGER_BATCHES", 1)
    if request.param == "cpu:0":
        put_the_cpu_in_its_place(monkeypatch)
    return request.param


def images_of(sizes):
    rng = np.random.default_rng(1)
    return [
        (torch.from_numpy(rng.standard_normal((n, 3, 16, 16)).astype("f4")), torch.from_numpy(rng.integers(0, 10, n)))
        for n in sizes
    ]


def trained(device, data, module=None, shifts=(None, None), task="images", **settings):
    """Two trainings, the second from the model of the first."""
    module = build_model("ca2fl-cnn", (3, 16, 16), 10, 0) if module is None else module()
    model = FlatModel(module, device=device)
    config = SimConfig(task=task, batch_size=8, **({"client_lr": 0.1, "local_epochs": 2} | settings))
    trainer = Trainer(model, data, Task(lambda: module, data, Classification(*data[0])), config)
    params, buffers, trainings = model.initial_params.copy(), model.initial_buffers, []
    with reproducible_libraries():
        for client, shift in enumerate(shifts):
            result = trainer.train(client, params, np.random.default_rng(client), shift, buffers)
            params, buffers = params + result.update, result.buffers
            trainings.append(result)
        return trainings, trainer.evaluate(params, buffers)


def equal(ours, theirs):
    (trainings, values), (others, their_values) = ours, theirs
    pairs = list(zip(trainings, others, strict=True))
    assert all(np.isfinite(one.update).all() and one.update.any() for one in trainings)
    same = all(one.update.tobytes() == other.update.tobytes() for one, other in pairs)
    same &= all(np.array_equal(one.buffers, other.buffers) for one, other in pairs if one.buffers is not None)
    return same and [one.loss for one in trainings] == [other.loss for other in others] and values == their_values


D = sum(parameter.numel() for parameter in build_model("ca2fl-cnn", (3, 16, 16), 10, 0).parameters())
SHIFTS = np.linspace(-0.1, 0.1, D, dtype="f4"), np.linspace(0.2, -0.1, D, dtype="f4")


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.01},
        {"client_optimizer": "fedprox", "mu": 0.5, "weight_decay": 0.01},
        {"client_optimizer": "scaffold", "shifts": SHIFTS},
    ],
    ids=["sgd", "fedprox", "scaffold"],
)
def test_a_graph_has_the_bits_of_autograd(settings, device, monkeypatch, capfd):
    """Batches of two clients, the last one of an epoch smaller. The second training uses graphs of the first one."""
    steps = []
    backward = Trainer._backward
    monkeypatch.setattr(Trainer, "_backward", lambda self, x, y: steps.append(len(y)) or backward(self, x, y))
    data = images_of([21, 30])
    graphed = trained(device, data, **settings)
    calls = 3 if device == "cpu:0" else 3 + compiled_training.WARM_UPS  # one eager, one to compare with, one recorded
    assert sorted(steps) == sorted(calls * [8, 5, 6]), "later batches of a shape do not call the module"
    assert equal(graphed, trained(device, data, task="python:own", **settings))
    if device == "cpu:0":
        assert equal(graphed, trained("cpu", data, **settings))
    assert "CUDA graph" not in capfd.readouterr().err


def own_module():
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(0.5)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(20, 10))


def test_a_graph_draws_and_counts_as_autograd_does(device):
    """Random numbers of dropout and buffers of BatchNorm, with the setting compile."""
    data, own = images_of([24, 24]), {"module": own_module, "task": "python:own", "local_epochs": 0, "local_steps": 5}
    assert equal(trained(device, data, compile=True, **own), trained(device, data, **own))


@pytest.mark.parametrize("problem", ["it gives other bits", "RuntimeError: no capture"])
def test_without_a_graph_steps_are_those_of_autograd(problem, device, monkeypatch, capfd):
    def wrong(self, step):
        if "no capture" in problem:
            raise RuntimeError("no capture")
        return lambda: step() + 1

    data = images_of([16, 16])
    expected = trained(device, data)
    monkeypatch.setattr(GraphedStep, "record", wrong)
    assert equal(trained(device, data), expected)
    assert capfd.readouterr().err.splitlines() == [
        f"the clients' steps run one kernel at a time, without a CUDA graph: {problem}"
    ]
    check_refused(f"step cannot be a CUDA graph: {problem}", trained, device, data, compile=True)


class Replacing(torch.nn.Linear):
    """Has a new tensor as its buffer after each step."""

    def __init__(self):
        super().__init__(3 * 16 * 16, 10)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        scores = super().forward(x.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * scores.detach().mean(0)
        return scores - self.mean


def test_a_buffer_that_is_replaced_is_no_part_of_a_graph(device):
    own = {"module": Replacing, "task": "python:own", "local_epochs": 0, "local_steps": 5}
    check_refused("a step replaces a buffer", trained, device, images_of([24]), compile=True, **own)


def test_a_client_diverges_while_its_step_is_recorded(device):
    """Losses that are NaN in both are the same bits: a faulty client, and no error of the graph."""
    trainings, _ = trained(device, images_of([40, 40]), compile=True, client_lr=1e30)
    assert [np.isfinite(one.update).any() for one in trainings] == [False, False]


def test_a_run_records_a_limited_number_of_shapes(device, monkeypatch):
    data = images_of([16, 15])
    expected = trained(device, data)
    monkeypatch.setattr(compiled_training, "MOST_GRAPHS", 1)
    assert equal(trained(device, data), expected)
    monkeypatch.setattr(GraphedStep, "record", lambda self, step: pytest.fail("no shape may be recorded"))
    monkeypatch.setattr(compiled_training, "MOST_GRAPHS", 0)
    assert equal(trained(device, data), expected)


def test_examples_stay_on_the_host_if_the_gpu_has_no_room(device, monkeypatch, capfd):
    data = images_of([16, 16])
    expected = trained(device, data)
    size = sum(leaf.nbytes for leaf in data[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size, 2 * size))
    assert resident(data[0], device) is not data[0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size - 1, 2 * size))
    assert resident(data[0], device) is data[0]
    assert equal(trained(device, data), expected)
    assert capfd.readouterr().err.count("examples stay on the host") == 1


def test_augmented_images_have_the_same_pixels(device):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (60, 3, 32, 32), dtype=np.uint8))
    moments = torch.from_numpy(rng.uniform(1, 100, (2, 3, 1, 1)).astype("f4"))
    images = AugmentedImages(x, torch.arange(60), "crop-flip", moments)
    moved = resident(images, device)
    assert str(moved.x.device).startswith(device.partition(":")[0])
    results = []
    for own, groups in ((images, np.split(np.arange(60)[::-1].copy(), 6)), (moved, [np.arange(60)[::-1].copy()])):
        torch.manual_seed(3)
        batches = [take(own, group) for group in groups]
        results.append([torch.cat([part.cpu() for part in parts]) for parts in zip(*batches, strict=True)])
    assert torch.equal(results[0][0].view(torch.int32), results[1][0].view(torch.int32))
    assert torch.equal(results[0][1], results[1][1])
    randomly = AugmentedImages(x, torch.arange(60), "randaugment", moments)
    assert resident(randomly, device) is randomly


@pytest.fixture
def cifar(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 10
    images = (rng.integers(0, 100, (200, 32, 32, 3)) + 15 * labels.reshape(-1, 1, 1, 1)).astype(np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])
    return {"data_dir": str(tmp_path), "num_clients": 4, "concurrency": 4, "refill": 2, "arrivals": 4, "alpha": 100.0}


@needs_cuda
def test_a_run_has_the_same_digest_without_graphs_and_examples_on_the_gpu(cifar, deterministic, monkeypatch, capfd):
    task = "papers:dataset=cifar10:network=ca2fl-cnn:augment=crop-flip"
    settings = SimConfig(**cifar, task=task, eval_every=2, batch_size=8, local_epochs=2, device="cuda")
    ours = run(parse_rule("ca2fl:buffer_size=2"), 0, settings)
    assert "CUDA graph" not in capfd.readouterr().err
    monkeypatch.setattr(training, "BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(training, "resident", lambda data, device: data)
    monkeypatch.setattr(GraphedStep, "record", lambda self, step: lambda: step() + 1)
    eager = run(parse_rule("ca2fl:buffer_size=2"), 0, settings)
    assert ours.digest == eager.digest


@needs_cuda
def test_two_rounds_of_resnet_18_on_a_gpu(cifar):
    from afflux.lab.results.finished_runs import Job
    from afflux.lab.runs.compare import compare

    settings = cifar | {"task": "papers:dataset=cifar10:network=resnet18-bn", "eval_every": 2, "batch_size": 8}
    jobs = [
        Job(parse_rule("fadas:buffer_size=2"), 0, config=SimConfig(**settings, local_steps=2, device=device))
        for device in ("cpu", "cuda", "cuda")
    ]
    on_cpu, on_gpu, again = compare(jobs, SimConfig())
    assert [row.version for row in on_gpu.evaluations] == [0, 1, 2]
    for ours, theirs in zip(on_cpu.evaluations, on_gpu.evaluations, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=0.05)
    assert (on_cpu.clients == on_gpu.clients).all()
    assert np.allclose(on_gpu.params, again.params, atol=1e-4)
    assert torch.cuda.max_memory_allocated() > 4 * len(on_gpu.params)
