"""A small model for the benchmark's simulators that counts how often it is called, and the bound of one update."""

import numpy as np
import torch

from bench.rows.simulators import workload
from oracle import U32


class Counted(torch.nn.Module):
    """Counts the calls of all copies together."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(28, 10)

    def forward(self, x):
        Counted.calls += 1
        return self.layer(x[:, 0, 0])


def a_counted():
    return Counted()


def moved(params, make_model):
    """The largest change of a param since the start."""
    return np.abs(params - workload.flat(workload.seeded(make_model))).max()


def logistic_bound():
    """|float32 - float64| of a param after one update of the logistic regression whose batches are the whole data.

    It is convex, and RATE is below 1 / L: errors of a step do not grow in those that follow. An element of the gradient
    is the mean of EXAMPLES products (p - y) x, with |p - y| <= 1; p is of 784 products.
    """
    largest = float(workload.data_of(0)[0].abs().mean(0).max())
    return workload.STEPS * workload.RATE * (workload.EXAMPLES + 784) * U32 * largest
