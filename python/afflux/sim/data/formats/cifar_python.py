"""CIFAR's python version: pickles of a dict with the rows of pixels and the labels."""

from pathlib import Path

import numpy as np

from afflux.sim.data.formats.array_pickle import read_pickle
from afflux.sim.data.formats.cifar_binary import PIXELS
from afflux.sim.data.formats.errors import bad_file


def read_batch(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and labels of one file.

    Args:
        path: the file, as data_batch_1 of CIFAR-10 or train of CIFAR-100.
        labels: key of the labels: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Returns:
        Images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        ConfigError: the file cannot be read, or has other contents than CIFAR's batches.
    """
    expected = f"a dict with 'data', uint8 of shape (n, {PIXELS}), and {labels!r}, a list of n whole numbers"
    data, values = read_pickle(path, ("data", labels))
    if not isinstance(data, np.ndarray) or data.shape[1:] != (PIXELS,):
        content = f"an array of shape {data.shape}" if isinstance(data, np.ndarray) else "a list"
        raise bad_file(path, f"has as 'data' {content}", expected)
    if not isinstance(values, list) or not all(0 <= value < 256 for value in values):
        raise bad_file(path, f"has as {labels!r} something else than a list of labels", expected)
    if len(values) != len(data):
        raise bad_file(path, f"has {len(data)} images and {len(values)} labels", expected)
    return data.reshape(-1, 3, 32, 32), np.array(values, dtype=np.int64)
