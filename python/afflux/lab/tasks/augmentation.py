"""What the code of FADAS's authors does with CIFAR-10, beside its network: augmented images.

An image is padded by 4 and cropped at random, and flipped with the chance 1/2; `randaugment` then makes two operations
of torchvision's RandAugment at magnitude 14 of 31.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.sim.data.image_set import ImageSet, channel_moments
from afflux.sim.workload.task import Batched, Divided, Partitioned

if TYPE_CHECKING:
    from torch import Tensor

AUGMENTATIONS = ("none", "crop-flip", "randaugment")
PADDING, OPERATIONS = 4, 2
#: At magnitude 14 of 30: of shears, pixels (of 32), degrees, factors, bits and the threshold of solarize.
SHEAR, SHIFT, ANGLE, FACTOR, BITS, THRESHOLD = 0.14, 7, 14, 0.42, 6, 136


def randaugment(image: Any, which: int, sign: int) -> Any:
    """Return a PIL image after one of the 14 operations."""
    from PIL import Image, ImageEnhance, ImageOps

    def moved(*matrix: float) -> Any:
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    enhanced = (ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Sharpness)
    operations: list[Callable[[], Any]] = [
        lambda: image,
        lambda: moved(1, sign * SHEAR, 0, 0, 1, 0),
        lambda: moved(1, 0, 0, sign * SHEAR, 1, 0),
        lambda: moved(1, 0, sign * SHIFT, 0, 1, 0),
        lambda: moved(1, 0, 0, 0, 1, sign * SHIFT),
        lambda: image.rotate(sign * ANGLE),
        *(lambda kind=kind: kind(image).enhance(1 + sign * FACTOR) for kind in enhanced),
        lambda: ImageOps.posterize(image, BITS),
        lambda: ImageOps.solarize(image, THRESHOLD),
        lambda: ImageOps.autocontrast(image),
        lambda: ImageOps.equalize(image),
    ]
    return operations[which]()


@dataclass(frozen=True, eq=False)
class AugmentedImages(Batched):
    """The images of a client: each is augmented anew when it is read, by torch's random numbers."""

    x: "Tensor"  #: (n, channels, height, width) uint8
    y: "Tensor"
    kind: str
    moments: "Tensor"  #: (2, channels, 1, 1): mean and deviation

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.y)

    def batch(self, places: list[int]) -> "tuple[Tensor, Tensor]":
        """Return these images, standardised after the augmentation, and their labels."""
        import torch

        if self.kind == "randaugment":  # each image draws both its crop and its operations
            images = torch.cat([self._of_two_operations(self._cropped([place])) for place in places])
        else:
            images = self._cropped(places)
        return (images - self.moments[0]) / self.moments[1], self.y[torch.as_tensor(places, device=self.y.device)]

    def to(self, device: str) -> "AugmentedImages":
        """Return the same images on a device. RandAugment's stay: Pillow rotates and enhances them on the host."""
        if self.kind == "randaugment":
            return self
        return replace(self, x=self.x.to(device), y=self.y.to(device), moments=self.moments.to(device))

    def _cropped(self, places: list[int]) -> "Tensor":
        """Return the images (n, channels, height, width), each cropped and perhaps flipped."""
        import torch

        # A remainder by 2 * crops gives both those by `crops` and by 2: one number for each of top, left and flip.
        crops, size, device = 2 * PADDING + 1, self.x.shape[-1], self.x.device
        # The host's generator draws on each device, so that the pixels are the same.
        top, left, flip = torch.randint(0, 2 * crops, (len(places), 3)).to(device).unbind(1)
        padded = torch.nn.functional.pad(self.x[torch.as_tensor(places, device=device)], (PADDING,) * 4)
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)
        images = windows[torch.arange(len(places), device=device), :, top % crops, left % crops]
        return torch.where((flip % 2 == 1)[:, None, None, None], images.flip(3), images)

    def _of_two_operations(self, images: "Tensor") -> "Tensor":
        """Return the one image (1, 3, height, width) after two operations of RandAugment."""
        import torch
        from PIL import Image

        picture = Image.fromarray(images[0].permute(1, 2, 0).contiguous().numpy())
        for which, sign in zip(*(torch.randint(0, most, (OPERATIONS,)).tolist() for most in (14, 2)), strict=True):
            picture = randaugment(picture, which, 2 * sign - 1)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]


@dataclass(frozen=True, eq=False)
class Augmented(Partitioned):
    """One data set of images that is divided among clients, each of which augments its own."""

    kind: str = "crop-flip"
    moments: Any = None

    def examples(self, index: np.ndarray) -> tuple[Any, Any]:
        """Return standardised images, and their labels."""
        return (self.x[index] - self.moments[0]) / self.moments[1], self.y[index]

    def for_seed(self, seed: int) -> Divided:
        """Return the images of each client."""
        divided = super().for_seed(seed)
        divided[:] = [AugmentedImages(x, y, self.kind, self.moments) for x, y in divided]  # type: ignore[misc]
        return divided


def augmented(clients: Partitioned, data: ImageSet, kind: str) -> Partitioned:
    """Return the clients with augmented images; raise ConfigError if the images have not three channels."""
    import torch

    if data.shape[0] != 3:
        raise ConfigError(f"augment is {kind}, but images of {data.name} have {data.shape[0]} channels, not 3")
    moments = np.array([channel_moments(data.x_train[:, channel]) for channel in range(data.shape[0])], np.float32)
    fields = (clients.num_clients, clients.partition, clients.heterogeneity, kind)
    return Augmented(torch.tensor(data.x_train), clients.y, *fields, torch.tensor(moments.T[..., None, None]))
