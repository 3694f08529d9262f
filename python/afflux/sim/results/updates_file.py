"""The kept updates of a run: a .npy file of float32 rows, valid after every row."""

import os
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.store.files import opened


class UpdatesFile(AbstractContextManager["UpdatesFile"]):
    """A .npy file to which rows (d,) are appended.

    The header counts a row only after its write, so np.load always works.
    """

    def __init__(self, path: Path, d: int, count: int = 0) -> None:
        """Create the file `path`, which must not exist yet; with `count`, continue an existing file after `count`
        rows.
        """
        self._d = d
        self._count = count
        if count:
            truncate_file(path, len(self._header()) + 4 * d * count)
        self._file = path.open("r+b" if count else "xb", buffering=0)
        self._file.write(self._header())

    def append(self, update: np.ndarray) -> None:
        """Write one row (d,) float32: 4 d bytes."""
        self._file.seek(0, 2)
        row = memoryview(update.astype("<f4").tobytes())
        while row:
            row = row[self._file.write(row) :]
        self._count += 1
        self._file.seek(0)
        self._file.write(self._header())

    def _header(self) -> bytes:
        # NumPy pads the header so that its length stays the same while the first axis grows.
        header = BytesIO()
        facts = {"descr": "<f4", "fortran_order": False, "shape": (self._count, self._d)}
        np.lib.format.write_array_header_1_0(header, facts)
        return header.getvalue()

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to its first `size` bytes.

    Raises:
        ConfigError: the file has fewer bytes, or is no regular file: a link is not followed.
    """
    try:
        with opened(path, os.O_RDWR) as descriptor:
            if os.fstat(descriptor).st_size < size:
                raise ConfigError(f"{path} is shorter than the {size} bytes of the checkpoint")
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise ConfigError(f"cannot continue {path}: {error.strerror}") from error


def read_updates(path: Path, d: int) -> np.ndarray:
    """Map the complete rows of `path`, (n, d) float32, read-only: of a truncated file, fewer rows than its header says.

    Raises:
        ConfigError: there is no such file, or it does not hold float32 updates of length d.
    """
    try:
        with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"is a .npy file of version {version}")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            start, size = file.tell(), os.fstat(descriptor).st_size
    except FileNotFoundError:
        raise ConfigError(f"the kept updates {path} are missing") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} holds no kept updates: {error}") from error
    if len(shape) != 2 or shape[1] != d or dtype != np.dtype("<f4") or fortran:
        raise ConfigError(f"{path} holds {dtype} of shape {shape}, not float32 updates of shape (n, {d})")
    count = min(shape[0], (size - start) // (4 * d))
    if count <= 0:
        return np.zeros((0, d), np.float32)
    return np.memmap(path, "<f4", "r", start, (count, d))
