"""Models: built without touching torch's global random state, filled from an explicit generator."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from afflux.sim.errors import ConfigError, known
from afflux.sim.models import registry
from afflux.sim.models.shapes import Shape

if TYPE_CHECKING:
    from torch import nn


def cnn(shape: Shape, num_classes: int) -> "nn.Module":
    """Return a CNN: two 3x3 convolutions (16 and 32 channels), each with a 2x2 pool, and two linear layers."""
    from torch import nn

    channels, height, width = shape
    if min(height, width) < 4:
        raise ConfigError(f"model 'cnn' needs images of 4x4 pixels or more, not {height}x{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def _of_the_papers(name: str) -> Callable[[Shape, int], "nn.Module"]:
    def build(shape: Shape, num_classes: int) -> "nn.Module":
        return registry.new_module(name, shape, num_classes)

    return build


MODELS: dict[str, Callable[[Shape, int], "nn.Module"]] = {
    "logreg": _of_the_papers("logreg"),
    "cnn": cnn,
    "wkafl-cnn": _of_the_papers("wkafl-cnn"),
}


def build_model(name: str, shape: Shape, num_classes: int, rng: np.random.Generator) -> "nn.Module":
    """Build model `name`; weights and biases ~ U(-b, b), b = 1/sqrt(fan in), as in torch."""
    known("model", name, MODELS)
    return registry.filled_module(partial(MODELS[name], shape, num_classes), rng)
