"""Networks of linear layers: logistic regression, and the perceptron with two hidden layers."""

import math

from torch import nn

from afflux.sim.models.shapes import Shape


def logistic_regression(shape: Shape, num_classes: int) -> nn.Module:
    """Return multinomial logistic regression on all values of an example."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def perceptron(shape: Shape, num_classes: int) -> nn.Module:
    """Return a network with two hidden layers of 200 units: the 2NN of McMahan et al. (2017)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, num_classes),
    )
