"""The convolutional networks of AFL, CA2FL and FADAS for CIFAR-10: two convolutions and three linear layers."""

from itertools import pairwise

from torch import nn

from afflux.sim.models.layout import ChannelsLast
from afflux.sim.models.shapes import Shape, image_shape


def _two_convolutions(
    name: str, shape: Shape, num_classes: int, kernel: int, padding: int, channels: tuple[int, int], units: list[int]
) -> nn.Module:
    given, height, width = image_shape(name, shape, 16)
    lost = kernel - 1 - 2 * padding
    rows, columns = (((side - lost) // 2 - lost) // 2 for side in (height, width))
    layers: list[nn.Module] = [ChannelsLast()]
    for inputs, outputs in ((given, channels[0]), channels):
        layers += [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise([channels[1] * rows * columns, *units]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(units[-1], num_classes))


def afl_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Return the CNN of Anarchic FL, Table 1.

    It has 5x5 convolutions of 32 and 64 channels, and linear layers of 512 and 128 units.

    The table's 1024 inputs of the first linear layer belong to images of 28x28 pixels; CIFAR-10's 32x32 give 1600.
    """
    return _two_convolutions("afl-cnn", shape, num_classes, 5, 0, (32, 64), [512, 128])


def ca2fl_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Return CA2FL's small CNN: padded 3x3 convolutions of 32 channels, linear layers of 256 and 64 units."""
    return _two_convolutions("ca2fl-cnn", shape, num_classes, 3, 1, (32, 32), [256, 64])


def fadas_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Return Wang and Ji's CNN (2022), also in the code of FADAS's authors: AFL's layers, padded convolutions."""
    return _two_convolutions("fadas-cnn", shape, num_classes, 5, 2, (32, 64), [512, 128])
