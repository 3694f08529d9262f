"""A simulation of your own module and data set: 100 clients, three rules, two seeds.

python examples/own_simulation.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from afflux.lab import Simulation
from afflux.sim import classification, partitioned, sgd


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = (x / 16).float()
simulation = Simulation(
    model=network,
    clients=partitioned(x[:1400], y[:1400], num_clients=100, partition="dirichlet", alpha=0.3),
    training=sgd(lr=0.3, steps=5, batch_size=16),
    evaluate=classification(x[1400:], y[1400:]),
    rules=["fedbuff:buffer_size=10", "ca2fl:buffer_size=10", "fedasync"],
    seeds=[0, 1],
    delays="fadas-mild",
    concurrency=20,
    arrivals=1000,
    eval_every=100,
)

if __name__ == "__main__":
    for run in simulation.run():
        print(
            f"{run.spec.label}, seed {run.seed}: accuracy {run.final_accuracy:.3f}, staleness {run.mean_staleness:.1f}"
        )
