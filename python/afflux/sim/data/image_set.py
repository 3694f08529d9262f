"""Images with labels, as read, and scaled for training; the data sets of images, and the layouts of their files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.sim.data.files import FileLayout, bad_file, read_idx, read_npz, read_records
from afflux.sim.errors import require

PARTS = ("x_train", "y_train", "x_test", "y_test")
INPUTS = ("standardised", "unit", "raw")
SPLIT_SEED = 20240  #: The split is part of the data set, not of a run: every seed is tested on the same images.


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images and labels, in the order of the files. All arrays are read-only."""

    name: str
    x_train: np.ndarray  #: (n, channels, height, width), uint8; float32 between 0 and 1 from LEAF.
    y_train: np.ndarray  #: (n,) int64, from 0 to num_classes - 1.
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    #: Names of the clients that own the images, such as writers; empty: the data set has none.
    owners: tuple[str, ...] = ()
    train_owner: np.ndarray | None = None  #: (n,) int64, index into `owners`.
    test_owner: np.ndarray | None = None
    #: Returns the arrays of the files, of which the setting `data` logs the digest; None: the digest is of this object.
    #:
    #: A function, because a digest of this object skips it.
    files: Callable[[], list[np.ndarray]] | None = None

    def __post_init__(self) -> None:
        """Make the arrays contiguous and read-only."""
        for field in (*PARTS, "train_owner", "test_owner"):
            if getattr(self, field) is not None:
                values = np.ascontiguousarray(getattr(self, field))
                values.flags.writeable = False
                object.__setattr__(self, field, values)

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width) of one image."""
        return self.x_train.shape[1:]

    def scaled(self, inputs: str = "standardised") -> tuple[np.ndarray, np.ndarray]:
        """Return both parts as new float32 arrays.

        Args:
            inputs: standardised: mean 0 and variance 1 in each channel of the training part; raw: as in the files,
                from 0 to 255; unit: a 255th of that, from 0 to 1. Images that are read as floats are in unit already.

        Raises:
            ConfigError: another scale.
        """
        known("inputs", inputs, INPUTS)
        if inputs != "standardised":
            scale = np.float32(255 if inputs == "unit" and self.x_train.dtype == np.uint8 else 1)
            return self.x_train / scale, self.x_test / scale
        parts = [np.empty(part.shape, np.float32) for part in (self.x_train, self.x_test)]
        for channel in range(self.shape[0]):
            mean, deviation = channel_moments(self.x_train[:, channel])
            # A part without variance stays at 0.
            divisor = deviation or 1.0
            for part, images in zip(parts, (self.x_train, self.x_test), strict=True):
                if images.dtype == np.uint8:
                    table = ((np.arange(256) - mean) / divisor).astype(np.float32)
                    np.take(table, images[:, channel], out=part[:, channel], mode="clip")  # "raise" copies
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
    # In pieces, because NumPy converts them to int64.
    pieces = np.array_split(values, 1 + values.size // 1_000_000)
    counts = np.sum([np.bincount(piece.ravel(), minlength=256) for piece in pieces], axis=0)
    mean = float(np.dot(counts, np.arange(256)) / counts.sum())
    return mean, float(np.sqrt(np.dot(counts, (np.arange(256) - mean) ** 2) / counts.sum()))


def stratified_split(labels: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) indices with `test_share` of every class in the test part."""
    rng = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: round(test_share * len(members))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def read_digits() -> ImageSet:
    """Return scikit-learn's 1797 handwritten digits of 8x8 pixels; one third is the test part."""
    images, labels = digits_of_scikit_learn()
    x = images.reshape(-1, 1, 8, 8).astype(np.uint8)
    train, test = stratified_split(labels, 1 / 3)
    return ImageSet("digits", x[train], labels[train], x[test], labels[test], 10, files=lambda: [images, labels])


def digits_of_scikit_learn() -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of sklearn.datasets.load_digits(return_X_y=True): (1797, 64) float64 and (1797,) int64.

    The file is read without an import of scikit-learn, which takes longer than many simulations.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        ConfigError: this version of scikit-learn has no such file, or it cannot be read.
    """
    require("sklearn")
    spec = find_spec("sklearn")
    path = Path(str(spec and spec.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read the digits of scikit-learn, {path}: {error}") from None
    return table[:, :-1], table[:, -1].astype(np.int64)


@dataclass(frozen=True)
class Images:
    """The images of a data set: square, with labels from 0 to num_classes - 1."""

    name: str
    num_classes: int
    side: int = 28
    channels: int = 1

    def checked(self, path: Path, images: np.ndarray) -> np.ndarray:
        """Return uint8 images as (n, channels, side, side), from that shape or with the channels last or left out.

        Raises:
            ConfigError: another dtype or shape, or no image; the error names `path`.
        """
        side, channels = self.side, self.channels
        if images.dtype == np.uint8 and images.ndim > 1 and len(images):
            planes = images[:, None] if channels == 1 and images.ndim == 3 else images
            if planes.shape[1:] == (channels, side, side):
                return planes
            if planes.shape[1:] == (side, side, channels):
                return planes.transpose(0, 3, 1, 2)
        shapes = f"(n, {side}, {side})" if channels == 1 else f"(n, {side}, {side}, {channels})"
        raise bad_file(path, f"has images of dtype {images.dtype} and shape {images.shape}", f"uint8 of shape {shapes}")

    def checked_labels(self, path: Path, labels: np.ndarray, count: int) -> np.ndarray:
        """Return `count` labels as int64 of shape (count,), from that shape or (count, 1).

        Raises:
            ConfigError: another dtype, shape or range; the error names `path`.
        """
        expected = f"{count} whole numbers from 0 to {self.num_classes - 1}"
        if labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count, 1)):
            raise bad_file(path, f"has labels of dtype {labels.dtype} and shape {labels.shape}", expected)
        flat = labels.reshape(count)
        if count and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_classes:
            raise bad_file(path, f"has labels from {flat.min()} to {flat.max()}", expected)
        return flat.astype(np.int64)

    def part(self, files: Sequence[Path], images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return checked images and labels, which came from the first and the last of `files`."""
        images = self.checked(files[0], images)
        return images, self.checked_labels(files[-1], labels, len(images))

    def of_arrays(self, files: Sequence[Path], arrays: list[np.ndarray]) -> ImageSet:
        """Return the data set of the arrays `PARTS`, which came from one file or from four."""
        train = self.part(files[:2], *arrays[:2])
        # Only mnist was a data set of the setting `data` when its logs were given this digest.
        read = (lambda: arrays) if self.name == "mnist" else None
        return ImageSet(self.name, *train, *self.part(files[-2:], *arrays[2:]), self.num_classes, files=read)

    def archive(self, *files: str) -> FileLayout[ImageSet]:
        """Return the layout of an archive of NumPy's, which may have one of several names."""

        def read(paths: list[Path]) -> ImageSet:
            return self.of_arrays(paths, read_npz(paths[0], PARTS))

        return FileLayout((".", self.name), ("|".join(files or (f"{self.name}.npz",)),), read)

    def idx(
        self, folders: tuple[str, ...], train: str, test: str, columns: bool = False, first_label: int = 0
    ) -> FileLayout[ImageSet]:
        """Return the layout of the four IDX files in which MNIST and its successors are published.

        Args:
            folders: of the files.
            train: begin of the names of the training part.
            test: begin of the names of the test part.
            columns: whether the files hold the columns of an image one after the other; it is returned upright.
            first_label: the least label of the files, which is returned as 0.
        """
        plain = [f"{part}-{kind}" for part in (train, test) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        # Some copies write a dot before idx.
        names = [(name, name.replace("-idx", ".idx")) for name in plain]
        files = tuple("|".join(f"{name}{suffix}" for name in pair for suffix in ("", ".gz")) for pair in names)

        def read(paths: list[Path]) -> ImageSet:
            arrays = [read_idx(path, dimensions) for path, dimensions in zip(paths, (3, 1, 3, 1), strict=True)]
            if columns:
                arrays[::2] = [images.transpose(0, 2, 1) for images in arrays[::2]]
            if first_label:
                for place in (1, 3):
                    if (arrays[place] < first_label).any():
                        raise bad_file(paths[place], "has the label 0", f"labels from {first_label}")
                    arrays[place] = arrays[place] - np.uint8(first_label)
            return self.of_arrays(paths, arrays)

        return FileLayout(folders, files, read)

    def batches(
        self, folders: tuple[str, ...], suffix: str, read: Callable[[Path], Sequence[np.ndarray]]
    ) -> FileLayout[ImageSet]:
        """Return a layout of CIFAR's batches; `read` returns the images and labels of a file."""
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        if self.name == "cifar100":
            names = ["train", "test"]

        def read_all(paths: list[Path]) -> ImageSet:
            images, labels = zip(*(self.part([path], *read(path)) for path in paths), strict=True)
            train = np.concatenate(images[:-1]), np.concatenate(labels[:-1])
            return ImageSet(self.name, *train, images[-1], labels[-1], self.num_classes)

        return FileLayout(folders, tuple(f"{name}{suffix}" for name in names), read_all)


def _like_mnist(name: str, folders: tuple[str, ...], *archives: str) -> list[FileLayout[ImageSet]]:
    # The IDX files of both have the same names: they are not looked for in the user's own folder.
    images = Images(name, 10)
    return [images.archive(*archives), images.idx(folders, "train", "t10k")]


def _emnist(split: str, num_classes: int) -> list[FileLayout[ImageSet]]:
    images = Images(f"emnist-{split}", num_classes)
    folders, names = ("emnist", "EMNIST/raw", "gzip", "."), (f"{images.name}-train", f"{images.name}-test")
    return [images.archive(), images.idx(folders, *names, columns=True, first_label=int(split == "letters"))]


_CIFAR10, _CIFAR100 = Images("cifar10", 10, 32, 3), Images("cifar100", 100, 32, 3)
#: Classes of each of EMNIST's data sets.
EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}

LAYOUTS: Mapping[str, list[FileLayout[ImageSet]]] = {
    "mnist": _like_mnist("mnist", ("mnist", "MNIST/raw")),
    "fashion-mnist": _like_mnist(
        "fashion-mnist", ("fashion-mnist", "FashionMNIST/raw"), "fashion-mnist.npz", "fashion_mnist.npz"
    ),
    **{f"emnist-{split}": _emnist(split, count) for split, count in EMNIST_CLASSES.items()},
    "cifar10": [
        _CIFAR10.archive(),
        _CIFAR10.batches(("cifar10", "."), ".npz", partial(read_npz, names=("x", "y"))),
        _CIFAR10.batches(("cifar-10-batches-bin", "cifar10"), ".bin", partial(read_records, label_bytes=1)),
    ],
    "cifar100": [
        _CIFAR100.archive(),
        _CIFAR100.batches(("cifar-100-binary", "cifar100"), ".bin", partial(read_records, label_bytes=2)),
    ],
}
