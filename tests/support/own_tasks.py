"""Tasks of tests, in a module of their own: other processes import it."""

import os
import tempfile
import time
from multiprocessing import parent_process

import numpy as np
import torch
from torch import nn

from afflux.sim import Task, classification

CLASSES, FEATURES = 3, 6


def examples(count=240, seed=5):
    """Labels and features around a centre of each class."""
    rng = np.random.Generator(np.random.PCG64(seed))
    y = np.arange(count) % CLASSES
    x = np.eye(CLASSES, FEATURES)[y] * 2 + 0.5 * rng.standard_normal((count, FEATURES))
    return torch.tensor(x.astype(np.float32)), torch.tensor(y)


X, Y = examples()
TEST = classification(*examples(90, seed=6))


class Net(nn.Module):
    """Has a frozen layer before BatchNorm, a frozen BatchNorm, dropout, and a module that is always in one mode."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.frozen(x)))))


def linear(rng):
    """Made with NumPy's random numbers."""
    layer = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.from_numpy(rng.uniform(-0.1, 0.1, tuple(parameter.shape))))
    return layer


def lazy(client, rng):
    """Twelve examples of a client, drawn again at every read."""
    own = rng.integers(0, len(Y), 12)
    return X[own], Y[own]


def momentum(model, data, rng, *, client_lr, local_steps):
    """Training with torch's own optimizer."""
    x, y = data
    optimizer = torch.optim.SGD(model.parameters(), lr=client_lr, momentum=0.5)
    for _ in range(local_steps):
        batch = torch.from_numpy(rng.choice(len(y), 8, replace=False))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return loss.item(), local_steps, len(y)


def own_task(num_clients=30, *, alpha: float, shift: float = 0.0):
    """For --task: `alpha` is a setting, `shift` an option."""
    chosen = [(X[i::num_clients] + shift, Y[i::num_clients]) for i in range(num_clients)]
    return Task(linear, chosen, TEST, validation=(X, Y))


def lazy_task(num_clients: int):
    return Task(Net, lazy, TEST, training=momentum, num_clients=num_clients)


def wrong_task():
    return 1


def fails(model, data, rng):
    return 1 / 0


def fails_sometimes(model, data, rng):
    """A fifth of the trainings raises, after a change of the model, and a fifth has a loss of nan."""
    chance = rng.random()
    loss, *counts = momentum(model, data, rng, client_lr=0.1, local_steps=3)
    if chance < 0.2:
        raise ArithmeticError(f"no luck with {model.head.weight.flatten()[0]:.6f}\x1b at {object()}")
    return (loss if chance < 0.8 else float("nan"), *counts)


def returns_nothing(model, data, rng):
    return None


def finds_no_file(model, data, rng):
    return open("no such file")


def fails_in_a_worker(module):
    """An evaluation."""
    return 1 / (parent_process() is None), 0.0


def returns_nothing_in_a_worker(module):
    """An evaluation."""
    return None if parent_process() is not None else (0.0, 0.0)


def counted(model, data, rng):
    """A training that leaves a file."""
    tempfile.mkstemp(dir=os.environ["AFFLUX_TEST_TRAININGS"])
    return 1.0, 1, len(data[1])


def awaits_trainings(module):
    """An evaluation after 20 and 40 arrivals, which ends in a worker when 8 more trainings have, but at most 38.

    Six were known at its beginning: the server has to go on, too. The accuracy is whether a worker makes it.
    """
    folder = os.environ["AFFLUX_TEST_TRAININGS"]
    enough = min(len(os.listdir(folder)) + 8, 38)
    give_up = time.monotonic() + 1800
    while parent_process() is not None and len(os.listdir(folder)) < enough:
        if time.monotonic() > give_up:
            raise TimeoutError("nobody trains beside the evaluation")
        time.sleep(0.01)
    return float(parent_process() is not None), 0.0


def write_speeches(folder, speeches):
    """Write Shakespeare's file with these speeches of each role."""
    lines = [f"play\t{role}\t{speech}" for role, own in speeches.items() for speech in own]
    (folder / "shakespeare_speeches.tsv").write_text("\n".join(["play\tspeaker\ttext", *lines]))
