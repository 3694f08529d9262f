"""Initial values of a module's parameters and buffers, from an explicit generator."""

import math

import numpy as np
import torch
from torch import nn


def fill(module: nn.Module, rng: np.random.Generator) -> None:
    """Fill a module whose memory is not initialised, with the laws of torch's own layers.

    Linear and convolutional layers: U(-b, b) with b = 1/sqrt(fan in). LSTM: b = 1/sqrt(units). Embeddings: N(0, 1).
    Normalization: weights 1, biases 0, running means 0 and variances 1.

    Args:
        module: its parameters and buffers are filled in the order of `modules()` and `parameters()`.
        rng: the only source of randomness; torch's global state is not used.

    Raises:
        NotImplementedError: a layer of another kind has parameters.
    """
    with torch.no_grad():
        for layer in module.modules():
            own = list(layer.parameters(recurse=False))
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.ones_(layer.weight)
                nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                _uniform(own, 1.0 / math.sqrt(math.prod(layer.weight.shape[1:])), rng)
            elif isinstance(layer, nn.LSTM):
                _uniform(own, 1.0 / math.sqrt(layer.hidden_size), rng)
            elif isinstance(layer, nn.Embedding):
                layer.weight.copy_(torch.from_numpy(rng.standard_normal(tuple(layer.weight.shape))))
            elif own:
                raise NotImplementedError(f"no initialisation for {type(layer).__name__}")


def _uniform(parameters: list[nn.Parameter], bound: float, rng: np.random.Generator) -> None:
    for parameter in parameters:
        parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, size=tuple(parameter.shape))))
