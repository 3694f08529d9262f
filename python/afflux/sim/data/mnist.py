"""MNIST, Fashion-MNIST and EMNIST: one archive of NumPy's, or the four IDX files in which they are published."""

from functools import partial
from pathlib import Path

import numpy as np

from afflux.sim.data.folder import Layout, read_first
from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.idx import read_idx
from afflux.sim.data.formats.npz import read_npz
from afflux.sim.data.image_set import ImageSet, checked_images, checked_labels, make_image_set

SIDE = 28
PARTS = ("x_train", "y_train", "x_test", "y_test")

EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
"""Classes of each of EMNIST's data sets."""


def read_mnist(data_dir: Path) -> ImageSet:
    """Read MNIST: 10 classes, images of 28x28 pixels."""
    return _read("mnist", data_dir, ("mnist.npz",), ("mnist", "MNIST/raw"))


def read_fashion_mnist(data_dir: Path) -> ImageSet:
    """Read Fashion-MNIST: 10 classes, images of 28x28 pixels."""
    archives = ("fashion-mnist.npz", "fashion_mnist.npz")
    return _read("fashion-mnist", data_dir, archives, ("fashion-mnist", "FashionMNIST/raw"))


def read_emnist(data_dir: Path, split: str) -> ImageSet:
    """Read one of EMNIST's data sets: 28x28 pixels, classes as in `EMNIST_CLASSES`.

    EMNIST's IDX files store the columns of an image one after the other: images are returned upright. Labels of the
    letters count from 1 in IDX files: they are returned from 0.
    """
    name = f"emnist-{split}"
    layouts = [_archive(name, (f"{name}.npz",), EMNIST_CLASSES[split])]
    read = partial(_idx_parts, name, EMNIST_CLASSES[split], transposed=True, first_label=int(split == "letters"))
    layouts.append(Layout(("emnist", "EMNIST/raw", "gzip", "."), _idx_files(f"{name}-train", f"{name}-test"), read))
    return read_first(name, data_dir, layouts)


def _read(name: str, data_dir: Path, archives: tuple[str, ...], folders: tuple[str, ...]) -> ImageSet:
    # The IDX files of both have the same names: they are not looked for in the user's own folder.
    idx = Layout(folders, _idx_files("train", "t10k"), partial(_idx_parts, name, 10))
    return read_first(name, data_dir, [_archive(name, archives, 10), idx])


def _idx_files(train: str, test: str) -> tuple[str, ...]:
    plain = [f"{part}-{kind}" for part in (train, test) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    # Some copies write a dot before idx.
    dotted = [name.replace("-idx", ".idx") for name in plain]
    return tuple(f"{name}|{name}.gz|{other}|{other}.gz" for name, other in zip(plain, dotted, strict=True))


def _archive(name: str, files: tuple[str, ...], num_classes: int) -> Layout[ImageSet]:
    def read(paths: list[Path]) -> ImageSet:
        (path,) = paths
        arrays = read_npz(path, PARTS)
        return _checked(name, [path] * 4, arrays, num_classes)

    return Layout((".", name), ("|".join(files),), read)


def _idx_parts(
    name: str, num_classes: int, paths: list[Path], transposed: bool = False, first_label: int = 0
) -> ImageSet:
    arrays = [read_idx(path, dimensions) for path, dimensions in zip(paths, (3, 1, 3, 1), strict=True)]
    if transposed:
        arrays[0::2] = [images.transpose(0, 2, 1) for images in arrays[0::2]]
    if first_label:
        for place in (1, 3):
            if (arrays[place] < first_label).any():
                raise bad_file(paths[place], "has the label 0", f"labels from {first_label}")
            arrays[place] = arrays[place] - np.uint8(first_label)
    return _checked(name, paths, arrays, num_classes)


def _checked(name: str, paths: list[Path], arrays: list[np.ndarray], num_classes: int) -> ImageSet:
    parts = []
    for place in (0, 2):
        images = checked_images(paths[place], arrays[place], SIDE, 1)
        labels = checked_labels(paths[place + 1], arrays[place + 1], len(images), num_classes)
        parts.append((images, labels))
    return make_image_set(name, parts[0], parts[1], num_classes)
