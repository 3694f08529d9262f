"""A data set of images with labels, as read, and its scaled form for training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afflux.sim.data.formats.errors import bad_file


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and labels, in the order of the files. All arrays are read-only."""

    name: str
    x_train: np.ndarray
    """(n, channels, height, width), uint8; float32 between 0 and 1 from LEAF."""
    y_train: np.ndarray
    """(n,) int64, from 0 to num_classes - 1."""
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    owners: tuple[str, ...] = ()
    """Names of the clients that own the images, such as writers; empty: the data set has none."""
    train_owner: np.ndarray | None = None
    """(n,) int64, index into `owners`."""
    test_owner: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width

    def scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return both parts as new float32 arrays with mean 0 and variance 1 in each channel of the training part."""
        parts = [np.empty(part.shape, np.float32) for part in (self.x_train, self.x_test)]
        for channel in range(self.shape[0]):
            mean, deviation = channel_moments(self.x_train[:, channel])
            # A part without variance stays at 0.
            divisor = deviation or 1.0
            for part, images in zip(parts, (self.x_train, self.x_test), strict=True):
                if images.dtype == np.uint8:
                    table = ((np.arange(256) - mean) / divisor).astype(np.float32)
                    np.take(table, images[:, channel], out=part[:, channel])
                else:
                    part[:, channel] = (images[:, channel] - mean) / divisor
        return parts[0], parts[1]

    def shards(self) -> list[np.ndarray]:
        """Return the indices of each owner's training images, ascending; empty without owners."""
        return shards_of(self.train_owner, len(self.owners))


def shards_of(owner: np.ndarray | None, count: int) -> list[np.ndarray]:
    """Return the indices that belong to each of `count` owners, ascending."""
    if owner is None:
        return []
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, count)))


def channel_moments(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation in float64; of uint8 by the counts of the 256 values."""
    if values.dtype != np.uint8:
        return float(np.mean(values, dtype=np.float64)), float(np.std(values, dtype=np.float64))
    counts = np.bincount(values.ravel(), minlength=256)
    mean = float(np.dot(counts, np.arange(256)) / counts.sum())
    return mean, float(np.sqrt(np.dot(counts, (np.arange(256) - mean) ** 2) / counts.sum()))


def checked_images(path: Path, images: np.ndarray, side: int, channels: int) -> np.ndarray:
    """Return uint8 images as (n, channels, side, side), from that shape or with the channels last or left out.

    Args:
        path: the file, for errors.
        images: as read.
        side: height and width that the images must have.
        channels: 1 or 3.

    Raises:
        ConfigError: another dtype or shape, or no image.
    """
    first, last = (channels, side, side), (side, side, channels)
    if images.dtype == np.uint8 and len(images.shape) > 1 and len(images):
        if images.shape[1:] == first:
            return images
        if images.shape[1:] == last:
            return images.transpose(0, 3, 1, 2)
        if channels == 1 and images.shape[1:] == (side, side):
            return images[:, None]
    shapes = f"(n, {side}, {side})" if channels == 1 else f"(n, {side}, {side}, {channels})"
    raise bad_file(path, f"has images of dtype {images.dtype} and shape {images.shape}", f"uint8 of shape {shapes}")


def checked_labels(path: Path, labels: np.ndarray, count: int, num_classes: int) -> np.ndarray:
    """Return labels as int64 of shape (count,), from that shape or (count, 1).

    Args:
        path: the file, for errors.
        labels: as read.
        count: number of images.
        num_classes: labels are whole numbers from 0 to num_classes - 1.

    Raises:
        ConfigError: another dtype, shape or range.
    """
    expected = f"{count} whole numbers from 0 to {num_classes - 1}"
    if labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count, 1)):
        raise bad_file(path, f"has labels of dtype {labels.dtype} and shape {labels.shape}", expected)
    flat = labels.reshape(count)
    if count and not 0 <= int(flat.min()) <= int(flat.max()) < num_classes:
        raise bad_file(path, f"has labels from {flat.min()} to {flat.max()}", expected)
    return flat.astype(np.int64)


def make_image_set(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    owners: tuple[str, ...] = (),
    train_owner: np.ndarray | None = None,
    test_owner: np.ndarray | None = None,
) -> ImageSet:
    """Return the data set of two checked parts (images, labels), with arrays made contiguous and read-only."""
    x_train, y_train, x_test, y_test = (np.ascontiguousarray(array) for array in (*train, *test))
    for array in (x_train, y_train, x_test, y_test, train_owner, test_owner):
        if array is not None:
            array.flags.writeable = False
    return ImageSet(name, x_train, y_train, x_test, y_test, num_classes, owners, train_owner, test_owner)
