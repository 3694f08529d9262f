"""Data sets: images scaled to mean 0 and variance 1, a fixed train/test split, no downloads."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from afflux.sim.data.content_digest import content_digest
from afflux.sim.data.mnist import read_mnist
from afflux.sim.errors import ConfigError, known, require

SPLIT_SEED = 20240
"""The split is part of the data set, not of a run: every seed is tested on the same images."""


@dataclass(frozen=True, eq=False)
class DataSet:
    """One data set: float32 images (n, channels, height, width) and int64 labels (n,)."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    digest: str = ""
    """SHA-256 of the arrays as they were read, before they were scaled."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width


def stratified_split(labels: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) indices with `test_share` of every class in the test part."""
    rng = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: round(test_share * len(members))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale both by the mean and deviation of all training pixels; (n, h, w) -> (n, 1, h, w).

    One scale for all pixels: some border pixels of the digits never change.
    """
    mean = float(np.mean(train, dtype=np.float64))
    deviation = float(np.std(train, dtype=np.float64))
    scaled = [((part - mean) / deviation).astype(np.float32)[:, None] for part in (train, test)]
    return scaled[0], scaled[1]


def digits_of_scikit_learn() -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of sklearn.datasets.load_digits(return_X_y=True): (1797, 64) float64 and (1797,) int64.

    The file is read without an import of scikit-learn, which takes longer than many simulations.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        ConfigError: this version of scikit-learn has no such file, or it cannot be read.
    """
    require("sklearn")
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    try:
        table = np.loadtxt(path, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read the digits of scikit-learn, {path}: {error}") from None
    return table[:, :-1], table[:, -1].astype(np.int64)


def digits(data_dir: Path | None) -> DataSet:
    """Load scikit-learn's 1797 handwritten digits of 8x8 pixels; one third is the test part."""
    images, labels = digits_of_scikit_learn()
    train, test = stratified_split(labels, 1 / 3)
    x_train, x_test = standardised(images[train].reshape(-1, 8, 8), images[test].reshape(-1, 8, 8))
    return DataSet("digits", x_train, labels[train], x_test, labels[test], 10, content_digest([images, labels]) or "")


def mnist(data_dir: Path | None) -> DataSet:
    """Load mnist.npz: x_train (60000, 28, 28) uint8, y_train, x_test, y_test; or IDX files in mnist or MNIST/raw."""
    if data_dir is None:
        raise ConfigError("data 'mnist' is read from mnist.npz: give its folder with --data-dir or AFFLUX_DATA")
    path = data_dir / "mnist.npz"
    if not os.path.isfile(path) and any(os.path.isdir(data_dir / folder) for folder in ("mnist", "MNIST/raw")):
        images = read_mnist(data_dir)
        labels = [part.astype(np.uint8) for part in (images.y_train, images.y_test)]  # the digest of the archive
        return _scaled(images.x_train[:, 0], labels[0], images.x_test[:, 0], labels[1])
    if not os.path.isfile(path):
        raise ConfigError(f"data 'mnist' needs the file {path}, which does not exist")
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(path, allow_pickle=False) as archive:
            absent = [key for key in keys if key not in archive]
            if absent:
                raise ConfigError(f"{path} has no array {', '.join(absent)}")
            x_train, y_train, x_test, y_test = (archive[key] for key in keys)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, EOFError, MemoryError, BadZipFile) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if x.dtype != np.uint8 or x.shape[1:] != (28, 28) or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise ConfigError(f"{path} has {x.dtype} of shape {x.shape} and {y.dtype} of shape {y.shape}, no MNIST")
    return _scaled(x_train, y_train, x_test, y_test)


def _scaled(x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> DataSet:
    digest = content_digest([x_train, y_train, x_test, y_test]) or ""
    x_train, x_test = standardised(x_train, x_test)
    return DataSet("mnist", x_train, y_train.astype(np.int64), x_test, y_test.astype(np.int64), 10, digest)


DATASETS: dict[str, Callable[[Path | None], DataSet]] = {"digits": digits, "mnist": mnist}


def load_data_set(name: str, data_dir: Path | None = None) -> DataSet:
    """Load the data set `name`, once per process; the folder is `data_dir` or AFFLUX_DATA."""
    known("data", name, DATASETS)
    if data_dir is None and (folder := os.environ.get("AFFLUX_DATA")):
        data_dir = Path(folder)
    return _load(name, data_dir)


@lru_cache(maxsize=2)
def _load(name: str, data_dir: Path | None) -> DataSet:
    data = DATASETS[name](data_dir)
    for array in (data.x_train, data.y_train, data.x_test, data.y_test):
        array.flags.writeable = False
    return data
