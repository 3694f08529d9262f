"""The papers' models in torch. `build_model` makes a model from its name and a seed (docs/reference/data.md)."""

from typing import TYPE_CHECKING

import numpy as np

from afflux.ops.validation import known

if TYPE_CHECKING:
    from torch import nn

    from afflux.sim.models.networks import InputShape

MODELS = (
    *("logreg", "cnn", "mlp", "lenet5", "afl-cnn", "ca2fl-cnn", "fadas-cnn", "wkafl-cnn", "wkafl-celeba"),
    *("resnet18-bn", "resnet18-gn", "char-lstm"),
)


def build_model(name: str, shape: "InputShape", num_classes: int, seed: int | np.random.Generator) -> "nn.Module":
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
    known("model", name, MODELS)
    from afflux.sim.models.networks import new_network

    rng = np.random.Generator(np.random.PCG64(seed)) if isinstance(seed, int) else seed
    return new_network(name, shape, num_classes, rng)
