"""Compiled local steps: the gradients of float64 up to float32's rounding, and the same bits in each process."""

import copy
import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import own_tasks
from afflux.cli.lab.app import app
from afflux.lab import Simulation
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError, Task, classification, fedprox, partitioned, scaffold, sgd
from afflux.sim.clients import compiled_training
from afflux.sim.clients.flat_model import FlatModel, reproducible_libraries
from afflux.sim.clients.training import Trainer
from afflux.sim.workload.config import SimConfig
from conftest import check_raises, check_refused, raising, reproducible
from made_runs import paused_run, resume, run_in_store, run_paired
from pairwise import soak
from stopped_runs import Stopped, stop_at


def reason():
    try:
        compiled_training.require_compiler()
    except ConfigError as error:
        return str(error)
    return None


needs_compiler = pytest.mark.skipif(reason() is not None, reason=str(reason()))

#: Settings whose step several tests here compile once, because a process keeps compiled steps: about 7 s of CPU each.
PROXIMAL = {"client_optimizer": "fedprox", "mu": 0.5, "weight_decay": 0.25}
UNIT = 2.0**-24
INPUTS, PIXELS, CLASSES, BATCH = 12, 6 * 8, 3, 8
SMALL = SimConfig(
    model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=4, batch_size=16, compile=True
)
RULE = parse_rule("ca2fl:buffer_size=3")


def data_of(sizes, inputs=INPUTS):
    rng = np.random.default_rng(1)
    return [
        (
            torch.from_numpy(rng.standard_normal((size, inputs)).astype("f4")),
            torch.from_numpy(rng.integers(0, CLASSES, size)),
        )
        for size in sizes
    ]


def trainer_of(module, data, loss=None, **settings):
    task = Task(module, data, lambda module: (0.0, 0.0), loss=loss)
    config = SimConfig(task="python:own", num_clients=len(data), concurrency=1, **({"batch_size": BATCH} | settings))
    model = FlatModel(copy.deepcopy(module))
    return model, Trainer(model, data, task, config)


def trained(module, data, client=0, shift=None, **settings):
    model, trainer = trainer_of(module, data, **settings)
    with reproducible_libraries():
        start = model.initial_params.copy()
        return model, start, trainer.train(client, start, np.random.default_rng(2), shift)


@pytest.fixture
def interpreted(monkeypatch):
    """In place of the C++ compiler: torch interprets the traced step. The number of steps is counted."""
    graphs = []

    def native(graph, inputs):
        graphs.append(graph)
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(compiled_training, "_native", native)
    monkeypatch.setattr(compiled_training, "_kept", {})
    return graphs


@needs_compiler
@pytest.mark.parametrize("settings", [PROXIMAL, *soak({}), *soak({"weight_decay": 0.5})])
def test_a_step_is_that_of_float64_up_to_the_rounding_of_float32(settings):
    """Linear classification: the gradient of W is sum_b (p - y) x / B.

    Products of n terms in float32, in any order, have an error of at most n u times the sum of their magnitudes. A
    logit z = W x + b thus has an error of at most e_z = (INPUTS + 2) u (|W| |x| + |b|). The softmax of logits with
    this error, computed with exp and log of at most 4 ulp each, has an error of at most 2 max e_z + (CLASSES + 16) u,
    and the gradient that of its factors and of the sum over the batch. The update adds a few roundings of its own.
    """
    module = nn.Linear(INPUTS, CLASSES)
    (data,) = data_of([BATCH])
    rate = 0.25
    _, start, result = trained(module, [data], local_steps=1, client_lr=rate, compile=True, **settings)
    x, y = data[0].double().numpy(), np.eye(CLASSES)[data[1].numpy()]
    weight, bias = start[: INPUTS * CLASSES].astype("f8").reshape(CLASSES, INPUTS), start[INPUTS * CLASSES :]
    logits = x @ weight.T + bias
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    slope = (softmax - y) / BATCH
    exact = np.concatenate([(slope.T @ x).reshape(-1), slope.sum(0)])
    error_of_logits = (INPUTS + 2) * UNIT * (np.abs(x) @ np.abs(weight).T + np.abs(bias)).max()
    error_of_slope = (2 * error_of_logits + (CLASSES + 16) * UNIT) / BATCH
    magnitudes = np.abs(slope).T @ np.abs(x)
    sums = np.concatenate([magnitudes.reshape(-1), np.abs(slope).sum(0)])
    factors = np.concatenate([np.broadcast_to(np.abs(x).sum(0), (CLASSES, INPUTS)).reshape(-1), [BATCH] * CLASSES])
    bound = error_of_slope * factors + (BATCH + 3) * UNIT * sums
    decay = settings.get("weight_decay", 0.0)
    exact = exact + decay * start  # the proximal term is 0 in the first step
    bound = rate * (bound + 4 * UNIT * (np.abs(exact) + decay * np.abs(start))) + 2 * UNIT * np.abs(start)
    assert (np.abs(result.update + rate * exact) <= bound).all()
    assert np.abs(rate * exact).max() > 1000 * bound.max()
    loss = -np.log(softmax[np.arange(BATCH), data[1].numpy()]).mean()
    assert abs(result.loss - loss) <= 4 * error_of_logits + 32 * UNIT * (1 + abs(loss))


def mean_square(output, labels):
    return ((output.sum(1) - labels) ** 2).mean()


class TwoInputs(nn.Module):
    """Takes keyword arguments, has a constant, an untrained parameter, a buffer and a tied weight."""

    def __init__(self, head):
        super().__init__()
        self.first = nn.Linear(PIXELS, PIXELS)
        self.second = nn.Linear(PIXELS, PIXELS)
        self.second.weight = self.first.weight
        self.head = nn.Sequential(head, nn.Linear(CLASSES, CLASSES))
        self.head[1].bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, own, other):
        return self.head(torch.tanh(self.first(own)) * self.scale + self.second(other) * torch.tensor([0.25]))


def cnn():
    layers = [nn.Unflatten(1, (1, 6, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(PIXELS, CLASSES))


def close(ours, theirs):
    """Whether updates of a few steps differ by rounding alone: much less than by one missing example or term."""
    return np.abs(ours.update - theirs.update).max() < 2e-5 * np.abs(theirs.update).max()


def differ(settings, shift):
    """Settings and shifts that make another update, if the step has each of its terms."""
    yield settings | {"weight_decay": 2 * settings["weight_decay"]}, shift
    if "mu" in settings:
        yield settings | {"mu": 2 * settings["mu"]}, shift
    if shift is not None:
        yield settings, 2 * shift


def equals_autograd(module, data, settings, shift=None):
    for client in range(2):
        _, _, eager = trained(module, data, client, shift, **settings)
        _, _, compiled = trained(module, data, client, shift, compile=True, **settings)
        assert close(compiled, eager)
        assert compiled.loss == pytest.approx(eager.loss, rel=1e-5)
        assert (compiled.steps, compiled.num_examples) == (eager.steps, eager.num_examples)
        for others, shifted in differ(settings, shift):
            _, _, other = trained(module, data, client, shifted, compile=True, **others)
            assert not close(other, eager)


STEPS = {"local_steps": 5, "client_lr": 0.1, "weight_decay": 0.01}


@needs_compiler
@pytest.mark.parametrize("optimizer", ["fedprox", "fedasync"])
def test_proximal_steps_equal_autograd_up_to_rounding(optimizer):
    """Of a data set: its examples are stacked."""
    torch.manual_seed(0)
    data = [torch.utils.data.TensorDataset(*client) for client in data_of([21, 16])]
    settings = PROXIMAL | {"client_optimizer": optimizer, "local_steps": 5, "client_lr": 0.1}
    equals_autograd(nn.Linear(INPUTS, CLASSES), data, settings)


@needs_compiler
@pytest.mark.parametrize("code", ["interpreted", *soak("native")])
def test_a_shifted_step_of_ones_own_module_and_loss_equals_autograd_up_to_rounding(code, request):
    graphs = request.getfixturevalue("interpreted") if code == "interpreted" else []
    torch.manual_seed(0)
    module = TwoInputs(cnn())
    data = [({"own": x, "other": x.flip(0)}, y) for x, y in data_of([21, 16], PIXELS)]
    shift = np.linspace(-1, 1, sum(p.numel() for p in module.parameters() if p.requires_grad)).astype("f4")
    equals_autograd(module, data, STEPS | {"client_optimizer": "scaffold", "loss": mean_square}, shift)
    assert len(graphs) == (code == "interpreted")


@pytest.mark.soak
@needs_compiler
@pytest.mark.parametrize("kind", ["mlp", "cnn", "loss", "scaffold", "fedprox", "fedasync", "own module", "dataset"])
def test_equals_autograd_up_to_rounding(kind):
    settings = dict(STEPS)
    data, shift = data_of([21, 16], PIXELS if kind in ("cnn", "own module") else INPUTS), None
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    if kind == "cnn":
        module = cnn()
    if kind == "loss":
        settings["loss"] = mean_square
    if kind in ("scaffold", "fedprox", "fedasync"):
        settings |= {"client_optimizer": kind, "mu": 0.5} if kind != "scaffold" else {"client_optimizer": kind}
    if kind == "scaffold":
        shift = np.linspace(-1, 1, sum(p.numel() for p in module.parameters())).astype("f4")
    if kind == "own module":
        module = TwoInputs(nn.Linear(PIXELS, CLASSES))
        data = [({"own": x, "other": x.flip(0)}, y) for x, y in data]
    if kind == "dataset":
        data = [torch.utils.data.TensorDataset(*own) for own in data]
    equals_autograd(module, data, settings, shift)


@needs_compiler
def test_smaller_batches_train_by_autograd_and_full_ones_do_not(monkeypatch):
    calls = []
    backward = Trainer._backward
    monkeypatch.setattr(Trainer, "_backward", lambda self, x, y: calls.append(len(y)) or backward(self, x, y))
    settings = PROXIMAL | {"local_epochs": 2, "client_lr": 0.1, "compile": True}
    _, _, result = trained(nn.Linear(INPUTS, CLASSES), data_of([BATCH * 40 + 3]), **settings)
    assert (result.steps, calls) == (82, [3, 3])


@needs_compiler
def test_one_code_for_all_settings_and_another_for_another_constant(interpreted, capfd):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.tensor([self.factor])

    data, updates = data_of([BATCH]), []
    for factor, rate in ((2.5, 0.5), (2.5, 0.25), (3.5, 0.5)):
        torch.manual_seed(0)
        module = Scaled(INPUTS, CLASSES)
        module.factor = factor
        _, _, result = trained(module, data, local_steps=1, client_lr=rate, compile=True)
        _, _, eager = trained(module, data, local_steps=1, client_lr=rate)
        assert close(result, eager)
        updates.append(result.update)
    assert np.abs(updates[0] - updates[2]).max() > 1e-3
    assert len(interpreted) == 2
    announced = capfd.readouterr().err
    assert announced.count("compiling the clients' step for batches (8, 12) and (8,)") == 2
    assert announced.count("compiled in") == 2


def test_dropout_depends_on_the_seed_of_the_training_alone(interpreted):
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(INPUTS, CLASSES))
    data = data_of([BATCH])
    one, again = (trained(module, data, local_steps=1, compile=True)[2].update for _ in range(2))
    assert (one == again).all()
    steps = [trained(module, data, local_steps=count, compile=True)[2].update for count in (1, 2)]
    assert not np.array_equal(steps[1] - steps[0], steps[0])
    model, trainer = trainer_of(module, data, local_steps=1, compile=True)
    others = [trainer.train(0, model.initial_params.copy(), np.random.default_rng(seed)).update for seed in (2, 3)]
    assert not np.array_equal(*others)


@needs_compiler
@pytest.mark.parametrize(
    ("code", "processes"), [("interpreted", {}), *soak("native", {}), *soak("native", {"workers": 2})], ids=str
)
def test_a_resumed_run_has_the_bits_of_a_whole_one(code, processes, request, tmp_path):
    """Two workers that make the beginning compile for themselves; this process resumes."""
    graphs = request.getfixturevalue("interpreted") if code == "interpreted" else []

    outputs = {name: tmp_path / name for name in ("whole", "resumed")}
    for name in outputs:
        (tmp_path / name).mkdir()
    with pytest.raises(Stopped):
        run_in_store(tmp_path / "store", RULE, 4, SMALL, outputs["resumed"], stop_at(17), seconds=0, **processes)
    interrupted = paused_run(tmp_path / "store")
    assert interrupted.config.compile
    resumed = resume(interrupted)
    (whole,) = run_paired([RULE], 4, SMALL, output=outputs["whole"])
    assert reproducible(resumed) == reproducible(whole)
    (log,) = (tmp_path / "whole").iterdir()
    assert (tmp_path / "resumed" / log.name).read_bytes() == log.read_bytes()
    assert json.loads(log.read_text().splitlines()[0])["config"]["compile"] is True
    assert len(graphs) == (code == "interpreted")
    if code == "native":
        (eager,) = run_paired([RULE], 4, replace(SMALL, compile=False))
        assert reproducible(eager) != reproducible(whole)  # other bits: SMALL does compile


@needs_compiler
def test_on_the_command_line(interpreted, tmp_path):
    small = ["--model", "logreg", "--num-clients", "6", "--concurrency", "2", "--arrivals", "6", "--eval-every", "6"]
    done = CliRunner().invoke(app, ["run", "--rule", "fedasync", *small, "--compile", "--out", str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    (log,) = (tmp_path / "a" / "audit").glob("*.jsonl")
    assert json.loads(log.read_text(encoding="utf-8").splitlines()[0])["config"]["compile"] is True
    assert len(interpreted) == 1
    replayed = CliRunner().invoke(app, ["run", "--rule", "fedasync", *small, "--out", str(tmp_path / "b")])
    assert replayed.exit_code == 0
    (log,) = (tmp_path / "b" / "audit").glob("*.jsonl")
    assert "compile" not in json.loads(log.read_text(encoding="utf-8").splitlines()[0])["config"]


def simulation(model, training, data=None, **settings):
    data = partitioned(own_tasks.X, own_tasks.Y, 6, "iid") if data is None else data
    test = classification(own_tasks.X, own_tasks.Y)
    return Simulation(
        model, data, training, test, concurrency=2, arrivals=4, rules="fedasync", compile=True, **settings
    )


class Branching(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output if output.sum() > 0 else -output


FEATURES = own_tasks.FEATURES
WORDS = [({"word": "a"}, 0)] * BATCH


@needs_compiler
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulation(nn.BatchNorm1d(FEATURES), sgd(batch_size=4)).run, "buffer .* changes in training"),
        (lambda: simulation(Branching(FEATURES, CLASSES), sgd(batch_size=4)).run, "cannot be compiled: "),
        (lambda: simulation(nn.Linear(FEATURES, CLASSES), lambda *_: (0.0, 1, 1)).run, "training function of its"),
        (lambda: partial(trained, nn.Linear(2, 2), [WORDS], compile=True), "needs data of tensors, not of str"),
    ],
    ids=["buffers", "branches on values", "own training", "texts"],
)
def test_what_cannot_be_compiled(make, message):
    check_refused(message, make())


def test_a_long_error_of_the_compiler_keeps_its_end(monkeypatch):
    fail = raising(ValueError, "the first line\n" + "a line of the trace\n" * 500 + "the cause")
    monkeypatch.setattr(compiled_training, "_compiled", fail)
    data = [(torch.zeros(BATCH, 2), torch.zeros(BATCH, dtype=torch.long))]
    text = str(check_raises(ConfigError, trained, nn.Linear(2, CLASSES), data, compile=True))
    assert text.startswith("the clients' step cannot be compiled: ValueError: the first line ... ")
    assert text.endswith("\nthe cause")


@needs_compiler
def test_many_shapes_are_an_error(monkeypatch):
    monkeypatch.setattr(compiled_training, "_compiled", lambda graph, inputs: lambda tensors: (torch.zeros(()),))
    data = [(torch.zeros(BATCH, 1 + size), torch.zeros(BATCH, dtype=torch.long)) for size in range(5)]
    module = nn.Sequential(nn.AdaptiveAvgPool1d(6), nn.Linear(6, CLASSES))
    model, trainer = trainer_of(module, data, local_steps=1, compile=True)
    for client in range(compiled_training.MOST_SHAPES):
        trainer.train(client, model.initial_params, np.random.default_rng(0))
    check_refused("more than 4 shapes", trainer.train, 4, model.initial_params, np.random.default_rng(0))


@needs_compiler
def test_a_step_of_too_many_operations_is_an_error(monkeypatch):
    monkeypatch.setattr(compiled_training, "MOST_OPERATIONS", 3)
    text = r"a step has \d+ operations, too many to compile: at most 3"
    check_refused(text, trained, nn.Linear(INPUTS, CLASSES), data_of([BATCH]), compile=True)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    check_refused(r"C\+\+ compiler, .* no /nonexistent/c\+\+", simulation(nn.Linear(FEATURES, CLASSES), sgd()).run)


def learns(training):
    clients = partitioned(own_tasks.X, own_tasks.Y, 6, "iid")
    evaluate = classification(own_tasks.X, own_tasks.Y)
    settings = {"concurrency": 2, "arrivals": 60, "eval_every": 60, "rules": "fedasync"}
    finals = [
        Simulation(nn.Linear(FEATURES, CLASSES), clients, training, evaluate, compile=on, **settings)
        .run()[0]
        .final_accuracy
        for on in (False, True)
    ]
    assert min(finals) > 0.7
    assert math.isclose(*finals, abs_tol=0.02)


@needs_compiler
@pytest.mark.parametrize("training", [fedprox(0.1, mu=0.1), scaffold(0.1)], ids=["fedprox", "scaffold"])
def test_a_simulation_learns(training, interpreted):
    learns(training)
    assert len(interpreted) == 1


@pytest.mark.soak
@needs_compiler
@pytest.mark.parametrize("training", [fedprox(0.1, mu=0.1), scaffold(0.1)], ids=["fedprox", "scaffold"])
def test_a_simulation_learns_with_native_code(training):
    learns(training)
