"""CIFAR's binary version: records of one or two label bytes and 3072 bytes of pixels (red, green, blue plane)."""

from pathlib import Path

import numpy as np

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import read_bytes

PIXELS = 3 * 32 * 32


def read_records(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the records of one file.

    Args:
        path: the file, as data_batch_1.bin of CIFAR-10 or train.bin of CIFAR-100.
        label_bytes: before the pixels of an image: 1 for CIFAR-10, 2 for CIFAR-100 (the coarse label, then the fine
            one, which is returned).

    Returns:
        Images (n, 3, 32, 32) and labels (n,), both uint8 and read-only.

    Raises:
        ConfigError: the file cannot be read, or is not made of whole records.
    """
    size = label_bytes + PIXELS
    expected = f"records of {size} bytes: {label_bytes} of labels and {PIXELS} of pixels"
    content = read_bytes(path, expected)
    if not content or len(content) % size:
        raise bad_file(path, f"has {len(content)} bytes", expected)
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]
