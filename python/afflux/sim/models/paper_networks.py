"""ResNet-18 and LEAF's LSTM, two of the networks by name."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.functional import relu

from afflux.ops.errors import ConfigError
from afflux.sim.models.networks import InputShape, image_shape

Normalization: TypeAlias = Callable[[int], nn.Module]
"""Number of channels -> layer."""


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


def char_lstm(name: str, shape: InputShape, num_classes: int) -> nn.Module:
    """Return LEAF's and Anarchic FL's network for Shakespeare (appendix E.1); the classes are the characters."""
    if len(shape) != 1:
        raise ConfigError(f"model {name!r} needs windows of characters, not examples of shape {shape}")
    return CharLSTM(num_classes)


#: BatchNorm's running means and variances are buffers.
resnet18_bn = partial(_resnet18, normalization=nn.BatchNorm2d)
#: GroupNorm of two groups has no buffers and does not depend on the batch.
resnet18_gn = partial(_resnet18, normalization=partial(nn.GroupNorm, 2))
