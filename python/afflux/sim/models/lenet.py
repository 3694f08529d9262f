"""LeNet-5 with ReLU and max pooling instead of the sigmoids and averages of 1998; WKAFL's network for CIFAR-10."""

from torch import nn

from afflux.sim.models.layout import ChannelsLast
from afflux.sim.models.shapes import Shape, image_shape


def lenet5(shape: Shape, num_classes: int) -> nn.Module:
    """Return LeNet-5.

    It has two 5x5 convolutions (6 and 16 channels), each with a 2x2 pool, and linear layers of 120 and 84 units.

    Images of 28x28 pixels are padded to 32x32, as LeCun et al. did with MNIST.
    """
    channels, height, width = image_shape("lenet5", shape, 16)
    padding = 2 if (height, width) == (28, 28) else 0
    rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )
