"""The networks by name, and their initial values from an explicit generator. Imports torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.functional import relu

from afflux.ops.errors import ConfigError

InputShape: TypeAlias = tuple[int, ...]  #: (channels, height, width) of an image, or (window,) of a text.
#: (name, shape of an example, number of classes) -> module; the name is for errors.
Network: TypeAlias = Callable[[str, InputShape, int], nn.Module]


def new_network(name: str, shape: InputShape, num_classes: int, rng: np.random.Generator) -> nn.Module:
    """Return a network of `NETWORKS` with initial values from `rng` alone; torch's random state is not touched.

    Raises:
        ConfigError: a shape that the network cannot take.
    """
    # On the meta device no memory is filled and no random number is drawn.
    with torch.device("meta"):
        module = NETWORKS[name](name, shape, num_classes)
    module.to_empty(device="cpu")
    _fill(module, rng)
    return module


def _fill(module: nn.Module, rng: np.random.Generator) -> None:
    """Fill a module whose memory is not initialised, with the laws of torch's own layers.

    Linear and convolutional layers: U(-b, b) with b = 1/sqrt(fan in). LSTM: b = 1/sqrt(units). Embeddings: N(0, 1).
    Normalization: weights 1, biases 0, running means 0 and variances 1.

    Args:
        module: its parameters and buffers are filled in the order of `modules()` and `parameters()`.
        rng: the only source of randomness.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                layer.reset_parameters()  # draws no random number
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                _uniform(layer, math.prod(layer.weight.shape[1:]), rng)
            elif isinstance(layer, nn.LSTM):
                _uniform(layer, layer.hidden_size, rng)
            elif isinstance(layer, nn.Embedding):
                layer.weight.copy_(torch.from_numpy(rng.standard_normal(tuple(layer.weight.shape))))
            elif list(layer.parameters(recurse=False)):
                raise NotImplementedError(f"no initialisation for {type(layer).__name__}")


def _uniform(layer: nn.Module, inputs: int, rng: np.random.Generator) -> None:
    bound = 1.0 / math.sqrt(inputs)
    for parameter in layer.parameters(recurse=False):
        parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, size=tuple(parameter.shape))))


def image_shape(name: str, shape: InputShape, least: int) -> tuple[int, int, int]:
    """Return channels, height and width; raise ConfigError unless each side of the image has `least` pixels or more."""
    if len(shape) != 3:
        raise ConfigError(f"model {name!r} needs images (channels, height, width), not examples of shape {shape}")
    channels, height, width = shape
    if min(height, width) < least:
        raise ConfigError(f"model {name!r} needs images of {least}x{least} pixels or more, not {height}x{width}")
    return channels, height, width


class ChannelsLast(nn.Module):
    """A layer that copies images to the layout with channels last.

    Convolutions with pools are faster in this layout on a CPU.

    On one thread of a Zen 4, with 50 images of CIFAR-10, a step of the networks of this package takes 0.63 to 0.94 of
    the time with channels first. ResNet-18, which has no such pools, takes 1.14, and does not use this layer.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same values. `contiguous` would not convert images of one channel."""
        return images.clone(memory_format=torch.channels_last)


def _linear_layers(sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _dense(name: str, shape: InputShape, num_classes: int, units: Sequence[int]) -> nn.Module:
    return nn.Sequential(*_linear_layers([math.prod(shape), *units, num_classes]))


def _convolutional(
    name: str,
    shape: InputShape,
    num_classes: int,
    kernel: int,
    channels: Sequence[int],
    units: Sequence[int],
    paddings: Sequence[int] = (0, 0),
    least: int = 16,
    pool_first: bool = False,
    channels_last: bool = True,
) -> nn.Module:
    """Return convolutions, each with a rectifier and a 2x2 pool, and linear layers.

    Args:
        name: of the network, for errors.
        shape: of an image.
        num_classes: outputs of the last layer.
        kernel: height and width of the kernels.
        channels: outputs of each convolution.
        units: outputs of each linear layer but the last.
        paddings: of each convolution.
        least: height and width that the images need.
        pool_first: whether pools come before rectifiers: the same bits in less time. Networks with results stay.
        channels_last: whether the images are copied to that layout first.
    """
    inputs, *sides = image_shape(name, shape, least)
    layers: list[nn.Module] = [ChannelsLast()] if channels_last else []
    for outputs, padding in zip(channels, paddings, strict=False):
        after = [nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(inputs, outputs, kernel, padding=padding), *(after[::-1] if pool_first else after)]
        sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        inputs = outputs
    return nn.Sequential(*layers, *_linear_layers([inputs * math.prod(sides), *units, num_classes]))


def _lenet5(name: str, shape: InputShape, num_classes: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling instead of the sigmoids and averages of 1998.

    Images of 28x28 pixels are padded to 32x32, as LeCun et al. did with MNIST.
    """
    paddings = (2 if shape[1:] == (28, 28) else 0, 0)
    return _convolutional(name, shape, num_classes, kernel=5, channels=(6, 16), units=(120, 84), paddings=paddings)


Normalization: TypeAlias = Callable[[int], nn.Module]  #: Number of channels -> layer.


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalization: Normalization) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            normalization(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            normalization(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), normalization(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the rectified sum of both branches."""
        return relu(self.residual(images) + self.shortcut(images))


def _resnet18(name: str, shape: InputShape, num_classes: int, normalization: Normalization) -> nn.Module:
    """Return ResNet-18 (He et al., 2016) for small images: a 3x3 stem without a pool."""
    channels, _, _ = image_shape(name, shape, 8)
    width = 64
    layers = [nn.Conv2d(channels, width, 3, padding=1, bias=False), normalization(width), nn.ReLU()]
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outputs, stride, normalization), Block(outputs, outputs, 1, normalization)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


class CharLSTM(nn.Module):
    """An embedding of 8 dimensions, two LSTM layers of 100 units, and a linear layer on the last state."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 8)
        self.lstm = nn.LSTM(8, 100, 2, batch_first=True)
        self.output = nn.Linear(100, num_classes)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return (n, num_classes) scores of the next character, from (n, window) int64."""
        states, _ = self.lstm(self.embedding(windows))
        scores: torch.Tensor = self.output(states[:, -1])
        return scores


def _char_lstm(name: str, shape: InputShape, num_classes: int) -> nn.Module:
    """Return LEAF's and Anarchic FL's network for Shakespeare (appendix E.1); the classes are the characters."""
    if len(shape) != 1:
        raise ConfigError(f"model {name!r} needs windows of characters, not examples of shape {shape}")
    return CharLSTM(num_classes)


NETWORKS: Mapping[str, Network] = {
    # Multinomial logistic regression on all values of an example.
    "logreg": partial(_dense, units=()),
    # The 2NN of McMahan et al. (2017).
    "mlp": partial(_dense, units=(200, 200)),
    # The small network of the demo.
    "cnn": partial(
        _convolutional, kernel=3, channels=(16, 32), units=(64,), paddings=(1, 1), least=4, channels_last=False
    ),
    # WKAFL's for CIFAR-10.
    "lenet5": _lenet5,
    # Anarchic FL, Table 1. Its 1024 inputs of the first linear layer belong to images of 28x28 pixels; 32x32 give 1600.
    "afl-cnn": partial(_convolutional, kernel=5, channels=(32, 64), units=(512, 128)),
    "ca2fl-cnn": partial(
        _convolutional, kernel=3, channels=(32, 32), units=(256, 64), paddings=(1, 1), pool_first=True
    ),
    # Wang and Ji's (2022), also in the code of FADAS's authors: AFL's layers, padded convolutions.
    "fadas-cnn": partial(_convolutional, kernel=5, channels=(32, 64), units=(512, 128), paddings=(2, 2)),
    # WKAFL's for EMNIST (section 6.1.1).
    "wkafl-cnn": partial(_convolutional, kernel=5, channels=(32, 64), units=(512,), pool_first=True),
    # WKAFL's "dense layer with 16000 units" is the first linear layer: it has 16000 inputs for images of 84x84 pixels.
    "wkafl-celeba": partial(_convolutional, kernel=4, channels=(10,), units=(100,), least=5, pool_first=True),
    # BatchNorm's running means and variances are buffers.
    "resnet18-bn": partial(_resnet18, normalization=nn.BatchNorm2d),
    # GroupNorm of two groups has no buffers and does not depend on the batch.
    "resnet18-gn": partial(_resnet18, normalization=partial(nn.GroupNorm, 2)),
    "char-lstm": _char_lstm,
}
