"""The models by name. torch is imported when a model is built, not before."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from afflux.sim.errors import known
from afflux.sim.models.shapes import Shape

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Model:
    """A model that can be built."""

    description: str
    module: str
    """Module of this package."""
    function: str
    """(shape of an example, number of classes) -> torch module."""


MODELS: dict[str, Model] = {
    "logreg": Model("logistic regression", "dense", "logistic_regression"),
    "mlp": Model("perceptron with two hidden layers of 200 units", "dense", "perceptron"),
    "lenet5": Model("LeNet-5; WKAFL's for CIFAR-10", "lenet", "lenet5"),
    "afl-cnn": Model("Anarchic FL's CNN (its Table 1)", "cifar_cnns", "afl_cnn"),
    "ca2fl-cnn": Model("CA2FL's CNN", "cifar_cnns", "ca2fl_cnn"),
    "fadas-cnn": Model("the CNN of FADAS's authors, Wang and Ji's (2022)", "cifar_cnns", "fadas_cnn"),
    "wkafl-cnn": Model("WKAFL's CNN for EMNIST", "wkafl_cnns", "wkafl_cnn"),
    "wkafl-celeba": Model("WKAFL's CNN for CelebA", "wkafl_cnns", "wkafl_celeba"),
    "resnet18-bn": Model("ResNet-18 for small images, with BatchNorm", "resnet", "resnet18_batch_norm"),
    "resnet18-gn": Model("ResNet-18 for small images, with GroupNorm", "resnet", "resnet18_group_norm"),
    "char-lstm": Model("two LSTM layers for the next character (LEAF, Anarchic FL)", "char_lstm", "char_lstm"),
}


def describe_models() -> str:
    """Return a line for each model, for help texts."""
    return "\n".join(f"{name}: {model.description}" for name, model in MODELS.items())


def build_model(name: str, shape: Shape, num_classes: int, seed: int | np.random.Generator) -> "nn.Module":
    """Build a model with initial values that depend on the seed alone.

    Args:
        name: one of `MODELS`.
        shape: of one example: (channels, height, width), or (window,) for text.
        num_classes: number of outputs; for text the number of characters, too.
        seed: an int, or a generator, which is advanced. torch's global random state is not touched.

    Returns:
        The torch module, on the CPU, in float32.

    Raises:
        ConfigError: an unknown name, or a shape that the model cannot take.
    """
    rng = np.random.Generator(np.random.PCG64(seed)) if isinstance(seed, int) else seed
    return filled_module(partial(new_module, name, shape, num_classes), rng)


def new_module(name: str, shape: Shape, num_classes: int) -> "nn.Module":
    """Return a model with torch's own initial values; raise ConfigError as `build_model` does."""
    known("model", name, MODELS)
    entry = MODELS[name]
    module: nn.Module = getattr(import_module(f"afflux.sim.models.{entry.module}"), entry.function)(shape, num_classes)
    return module


def filled_module(make: "Callable[[], nn.Module]", rng: np.random.Generator) -> "nn.Module":
    """Return the module that `make` makes, with initial values from `rng` alone (`initial_values.fill`)."""
    import torch

    from afflux.sim.models.initial_values import fill

    # On the meta device no memory is filled and no random number is drawn.
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    fill(module, rng)
    return module
