"""CIFAR-10 and CIFAR-100: archives of NumPy's, the binary version, or the python version."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from afflux.sim.data.folder import Layout, read_first
from afflux.sim.data.formats.cifar_binary import read_records
from afflux.sim.data.formats.cifar_python import read_batch
from afflux.sim.data.formats.npz import read_npz
from afflux.sim.data.image_set import ImageSet, checked_images, checked_labels, make_image_set

SIDE, CHANNELS = 32, 3
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

ReadBatch: TypeAlias = Callable[[Path], tuple[np.ndarray, np.ndarray]]


def read_cifar10(data_dir: Path) -> ImageSet:
    """Read CIFAR-10: 10 classes, images of 3x32x32 pixels."""
    files = (*BATCHES, "test_batch")
    layouts = [
        Layout((".", "cifar10"), ("cifar10.npz",), partial(_archive, "cifar10", 10)),
        _batches("cifar10", 10, ("cifar10", "."), files, ".npz", _read_npz_batch),
        _batches(
            "cifar10", 10, ("cifar-10-batches-bin", "cifar10"), files, ".bin", partial(read_records, label_bytes=1)
        ),
        _batches("cifar10", 10, ("cifar-10-batches-py", "cifar10"), files, "", partial(read_batch, labels="labels")),
    ]
    return read_first("cifar10", data_dir, layouts)


def read_cifar100(data_dir: Path) -> ImageSet:
    """Read CIFAR-100 with its 100 fine labels: images of 3x32x32 pixels."""
    files = ("train", "test")
    layouts = [
        Layout((".", "cifar100"), ("cifar100.npz",), partial(_archive, "cifar100", 100)),
        _batches(
            "cifar100", 100, ("cifar-100-binary", "cifar100"), files, ".bin", partial(read_records, label_bytes=2)
        ),
        _batches(
            "cifar100", 100, ("cifar-100-python", "cifar100"), files, "", partial(read_batch, labels="fine_labels")
        ),
    ]
    return read_first("cifar100", data_dir, layouts)


def _batches(
    name: str, num_classes: int, folders: tuple[str, ...], files: tuple[str, ...], suffix: str, read: ReadBatch
) -> Layout[ImageSet]:
    """Return a layout of CIFAR's batches: the last file is the test part, all others are the training part."""

    def read_all(paths: list[Path]) -> ImageSet:
        parts = [_checked(path, *read(path), num_classes) for path in paths]
        images, labels = zip(*parts[:-1], strict=True)
        return make_image_set(name, (np.concatenate(images), np.concatenate(labels)), parts[-1], num_classes)

    return Layout(folders, tuple(f"{file}{suffix}" for file in files), read_all)


def _archive(name: str, num_classes: int, paths: list[Path]) -> ImageSet:
    (path,) = paths
    x_train, y_train, x_test, y_test = read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    train, test = _checked(path, x_train, y_train, num_classes), _checked(path, x_test, y_test, num_classes)
    return make_image_set(name, train, test, num_classes)


def _read_npz_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_npz(path, ("x", "y"))
    return images, labels


def _checked(path: Path, images: np.ndarray, labels: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    images = checked_images(path, images, SIDE, CHANNELS)
    return images, checked_labels(path, labels, len(images), num_classes)
