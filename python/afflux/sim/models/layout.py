"""The memory layout of images in convolutional networks."""

import torch
from torch import nn


class ChannelsLast(nn.Module):
    """A layer that copies images to the layout with channels last.

    Convolutions with pools are faster in this layout on a CPU.

    On one thread of a Zen 4, with 50 images of CIFAR-10, a step of the networks of this package takes 0.63 to 0.94 of
    the time with channels first. ResNet-18, which has no such pools, takes 1.14, and does not use this layer.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same values. `contiguous` would not convert images of one channel."""
        return images.clone(memory_format=torch.channels_last)
