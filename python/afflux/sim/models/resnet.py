"""ResNet-18 (He et al., 2016) for small images: a 3x3 stem without a pool, with batch or group normalization."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.functional import relu

from afflux.sim.models.shapes import Shape, image_shape

Normalization: TypeAlias = Callable[[int], nn.Module]
"""Number of channels -> layer."""

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and first stride of each pair of blocks."""
GROUPS = 2


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


def _resnet18(name: str, shape: Shape, num_classes: int, normalization: Normalization) -> nn.Module:
    channels, _, _ = image_shape(name, shape, 8)
    width = STAGES[0][0]
    layers = [nn.Conv2d(channels, width, 3, padding=1, bias=False), normalization(width), nn.ReLU()]
    for outputs, stride in STAGES:
        layers += [Block(width, outputs, stride, normalization), Block(outputs, outputs, 1, normalization)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def resnet18_batch_norm(shape: Shape, num_classes: int) -> nn.Module:
    """Return ResNet-18 with BatchNorm, whose running means and variances are buffers."""
    return _resnet18("resnet18-bn", shape, num_classes, nn.BatchNorm2d)


def resnet18_group_norm(shape: Shape, num_classes: int) -> nn.Module:
    """Return ResNet-18 with GroupNorm of two groups, which has no buffers and does not depend on the batch."""
    return _resnet18("resnet18-gn", shape, num_classes, lambda outputs: nn.GroupNorm(GROUPS, outputs))
