"""Functions that read files of the user's data folder: regular files of bounded size, or links to them."""

import errno
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import BinaryIO

from afflux.sim.data.formats.errors import readable
from afflux.store.files import opened

#: The largest size of a file, also of its contents when decompressed: EMNIST's largest, all of byclass, has 638 MB.
MOST_BYTES = 1 << 30


@contextmanager
def open_file(path: Path, expected: str) -> Iterator[BinaryIO]:
    """Yield a file opened for reading.

    Args:
        path: the file.
        expected: its contents, for errors.

    Raises:
        ConfigError: the file cannot be opened, is a FIFO or of another kind, or has more than `MOST_BYTES` bytes; or
            the block raised an error that a damaged file causes.
    """
    with (
        readable(path, expected),
        opened(Path(os.path.realpath(path))) as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        if os.fstat(descriptor).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes")
        yield file


def read_bytes(path: Path, expected: str) -> bytes:
    """Return the contents of a file; see `open_file`."""
    with open_file(path, expected) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, expected: str, encoding: str = "utf-8") -> str:
    """Return the text of a file, with each end of a line as a line feed; see `open_file`.

    A file that begins with UTF-16's byte order mark is read as UTF-16.
    """
    content = read_bytes(path, expected)
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        encoding = "utf-16"
    with readable(path, expected):
        return StringIO(content.decode(encoding), newline=None).read()
