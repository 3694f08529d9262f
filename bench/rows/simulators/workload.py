"""The workloads of the simulators: two plain torch modules on data of MNIST's shape, and one training in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bench.spec.inputs import Float64
from bench.spec.optional_torch import torch

CLIENTS, CONCURRENCY, BUFFER = 50, 10, 10
STEPS, BATCH, RATE = 20, 16, 0.05
EXAMPLES = STEPS * BATCH  #: examples of a client: its steps are one epoch

MakeModel = Callable[[], Any]
Run = Callable[[], np.ndarray]  #: makes a whole run; returns the last params
#: Prepares runs of a workload; returns a function that makes one run, and only this function is timed.
Simulator = Callable[["Workload"], Callable[[], Run]]


@dataclass(frozen=True)
class Workload:
    """A model, and the settings of its training."""

    make_model: MakeModel
    updates: int  #: client updates in a run
    clients: int = CLIENTS
    concurrency: int = CONCURRENCY  #: clients that train at the same time; pfl's cohort
    buffer_size: int = BUFFER
    batch_size: int = BATCH


def one_update(make_model: MakeModel) -> Workload:
    """Return a workload of one client whose batch is all of its data, so that their order makes no difference."""
    return Workload(make_model, 1, clients=1, concurrency=1, buffer_size=1, batch_size=EXAMPLES)


def logistic() -> Any:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))


def cnn() -> Any:
    """Return LeNet-5 with max pooling and ReLU."""
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def seeded(make_model: MakeModel) -> Any:
    """Return the model with the initial params of all simulators."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return make_model()


@cache
def data() -> tuple[Any, Any]:
    """Return the examples of all clients, one client after the other; a linear model gives the labels."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((CLIENTS * EXAMPLES, 784), dtype=np.float32)
    labels = (x @ rng.standard_normal((784, 10), dtype=np.float32)).argmax(1)
    return torch.from_numpy(x).reshape(-1, 1, 28, 28), torch.from_numpy(labels)


def data_of(client: int) -> tuple[Any, Any]:
    own = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
    x, y = data()
    return x[own], y[own]


def loss_of(module: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(module(x), y)


def flat(module: Any) -> np.ndarray:
    """Return a copy of the params as one flat vector."""
    return np.asarray(torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).numpy())


@cache
def one_update_in_float64(make_model: MakeModel) -> tuple[Float64, Float64]:
    """Return the params after `one_update` in float64, and the sum of the magnitudes of their terms."""
    module = seeded(make_model).double()
    x, y = data_of(0)
    x, terms = x.double(), np.abs(flat(module))
    for _ in range(STEPS):
        gradients = torch.autograd.grad(loss_of(module, x, y), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
        terms += RATE * np.abs(torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy())
    return flat(module), terms
