"""A task, a rule and a simulation in Python, of `same_runs.py`: each tree runs its own copy, by public names alone."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from afflux.rules import fedbuff
from afflux.sim import Task, classification, fedprox, partitioned, scaffold, sgd

try:
    from afflux.lab import Simulation
except ImportError:  # of before there was a laboratory
    from afflux.sim import Simulation

CLASSES, FEATURES = 4, 8
rng = np.random.default_rng(0)
labels = rng.integers(0, CLASSES, 600)
X = torch.tensor((np.eye(CLASSES, FEATURES)[labels] * 2 + rng.standard_normal((600, FEATURES))).astype(np.float32))
Y = torch.tensor(labels)
accuracy = classification(X[400:], Y[400:])


def network(width=16):
    """Has parameters, averaged buffers and a frozen layer."""
    norm, frozen = nn.BatchNorm1d(width), nn.Linear(width, width).requires_grad_(False)
    return nn.Sequential(nn.Linear(FEATURES, width), norm, nn.ReLU(), frozen, nn.Linear(width, CLASSES))


def evaluate(model):
    """Append the digest of each array of the server's model to the file SAME_RUNS_STATES."""
    with Path(os.environ["SAME_RUNS_STATES"]).open("a") as file:
        buffers = {name for name, _ in model.named_buffers()}
        for name, value in model.state_dict().items():
            digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
            file.write(f"{'buffers' if name in buffers else 'params'} {name} {digest}\n")
    return accuracy(model)


def task(num_clients, alpha, *, width: int = 16):
    """A model with BatchNorm, on divided data."""
    return Task(lambda: network(width), partitioned(X[:400], Y[:400], num_clients, alpha=alpha), evaluate)


def drawn(client, rng):
    """The data set of a client of which there may be any number."""
    rows = rng.integers(0, 400, 12)
    return X[rows], Y[rows]


def train(model, data, rng, *, client_lr, local_steps):
    """Fail for one draw in four."""
    x, y = data
    optimizer = torch.optim.SGD(model.parameters(), lr=client_lr, momentum=0.5)
    for _ in range(local_steps):
        batch = torch.from_numpy(rng.choice(len(y), 8, replace=False))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    if rng.random() < 0.25:
        raise ArithmeticError("no luck")
    return loss.item(), local_steps, len(y)


def faulty(num_clients):
    """Some trainings of this task fail."""
    return Task(network, drawn, evaluate, training=train, num_clients=num_clients, validation=(X[:50], Y[:50]))


def rule(*, buffer_size: int = 4, server_lr: float = 0.5):
    """The rule of a file."""
    return fedbuff(buffer_size=buffer_size, server_lr=server_lr)


def law(num_clients, rng):
    """The running times of a task."""
    means = rng.uniform(1, 3, num_clients)
    return lambda client, times: float(means[client] * times.exponential())


def simulations(out: Path):
    """Simulations in Python, with each training, into folders of `out`."""
    trainings = {
        "sgd": sgd(lr=0.1, steps=3),
        "fedprox": fedprox(mu=0.1, epochs=1),
        "scaffold": scaffold(lr=0.05),
        "own": train,
    }
    for name, training in trainings.items():
        Simulation(
            network,
            partitioned(X[:400], Y[:400], num_clients=12, partition="iid"),
            training=training,
            evaluate=evaluate,
            rules=["fedbuff:buffer_size=5", "ca2fl", "fedasync"],
            seeds=[0, 3],
            buffer_size=3,
            delays=law,
            arrivals=30,
            eval_every=10,
            concurrency=4,
        ).run(out=out / name)


if __name__ == "__main__":
    simulations(Path(sys.argv[1]))
