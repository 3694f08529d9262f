"""Models: built without touching torch's global random state, filled from an explicit generator."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from afflux.sim.errors import ConfigError, known

if TYPE_CHECKING:
    from torch import Tensor, nn

Shape: TypeAlias = tuple[int, int, int]


def logreg(shape: Shape, num_classes: int) -> "nn.Module":
    """Multinomial logistic regression on the pixels."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def cnn(shape: Shape, num_classes: int) -> "nn.Module":
    """Two 3x3 convolutions (16 and 32 channels), each with a 2x2 pool, and two linear layers."""
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


def wkafl_cnn(shape: Shape, num_classes: int) -> "nn.Module":
    """WKAFL's for MNIST: two 5x5 convolutions (32 and 64 channels), each with a 2x2 pool, and a layer of 512 units."""
    import torch
    from torch import nn

    channels, height, width = shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    if min(rows, columns) < 1:
        raise ConfigError(f"model 'wkafl-cnn' needs images of 16x16 pixels or more, not {height}x{width}")

    class ChannelsLast(nn.Module):
        # Pools are three times faster in this layout. `contiguous` would not convert images of one channel.
        def forward(self, images: "Tensor") -> "Tensor":
            return images.clone(memory_format=torch.channels_last)

    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(channels, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )


MODELS: dict[str, Callable[[Shape, int], "nn.Module"]] = {"logreg": logreg, "cnn": cnn, "wkafl-cnn": wkafl_cnn}


def build_model(name: str, shape: Shape, num_classes: int, rng: np.random.Generator) -> "nn.Module":
    """Build model `name`; weights and biases ~ U(-b, b), b = 1/sqrt(fan in), as in torch."""
    import torch

    known("model", name, MODELS)
    # On the meta device no memory is filled and no random number is drawn.
    with torch.device("meta"):
        module = MODELS[name](shape, num_classes)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for layer in module.modules():
            own = list(layer.parameters(recurse=False))
            if not own:
                continue
            # The memory is not initialised yet: raise for a layer that the lines below do not fill.
            if not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                raise NotImplementedError(f"no initialisation for {type(layer).__name__}")
            bound = 1.0 / math.sqrt(math.prod(layer.weight.shape[1:]))
            for parameter in own:
                values = rng.uniform(-bound, bound, size=tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))
    return module
