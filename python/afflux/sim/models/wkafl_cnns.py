"""WKAFL's convolutional networks: for EMNIST (MNIST and ByClass) and for CelebA; its CIFAR-10 network is LeNet."""

from torch import nn

from afflux.sim.models.layout import ChannelsLast
from afflux.sim.models.shapes import Shape, image_shape


def wkafl_cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Return WKAFL's CNN (section 6.1.1).

    It has two 5x5 convolutions (32 and 64 channels), each with a 2x2 pool, and a layer of 512 units.
    """
    channels, height, width = image_shape("wkafl-cnn", shape, 16)
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
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


def wkafl_celeba(shape: Shape, num_classes: int) -> nn.Module:
    """Return WKAFL's CNN for CelebA: one 4x4 convolution (10 channels) with a 2x2 pool, and a layer of 100 units.

    The paper's "dense layer with 16000 units" is this layer: it has 16000 inputs for images of 84x84 pixels.
    """
    channels, height, width = image_shape("wkafl-celeba", shape, 5)
    rows, columns = ((side - 3) // 2 for side in (height, width))
    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(channels, 10, 4),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(10 * rows * columns, 100),
        nn.ReLU(),
        nn.Linear(100, num_classes),
    )
