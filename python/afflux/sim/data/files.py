"""The files of the user's data folder: regular files of bounded size, or links to them, in one of several layouts."""

import errno
import os
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO, Generic, TypeVar
from zipfile import BadZipFile

from afflux.ops.errors import ConfigError
from afflux.store.files import opened

Data = TypeVar("Data")

PAGE = "docs/reference/data.md"  #: The page that documents the formats and the folders.
#: The largest size of a file, also of its contents when decompressed: EMNIST's largest, all of byclass, has 638 MB.
MOST_BYTES = 1 << 30
#: What readers of formats raise for damaged and forged files.
_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, MemoryError, BadZipFile, zlib.error, UnpicklingError),
)


def bad_file(path: Path, found: str, expected: str) -> ConfigError:
    """Return an error that says how `path` differs from the expected file.

    Args:
        path: the file.
        found: the problem, as "has 3 dimensions".
        expected: the expected value, as "2 dimensions".
    """
    return ConfigError(f"{path} {found}; expected: {expected} (formats: {PAGE})")


@contextmanager
def readable(path: Path, expected: str) -> Iterator[None]:
    """Convert errors of reading and decoding into a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except _ERRORS as error:
        raise bad_file(path, f"cannot be read ({type(error).__name__}: {error})", expected) from None


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


def read_text(path: Path, expected: str, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file, with each end of a line as a line feed; see `open_file`.

    A file that begins with UTF-16's byte order mark is read as UTF-16.
    """
    content = read_bytes(path, expected)
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        encoding = "utf-16"
    with readable(path, expected):
        return StringIO(content.decode(encoding), newline=None).read()


@dataclass(frozen=True)
class FileLayout(Generic[Data]):
    """One layout of a data set's files in a folder."""

    folders: tuple[str, ...]  #: Folders below the user's; any of them; "." is the user's own.
    files: tuple[str, ...]  #: Files (or folders) that must all be there; alternatives of a name are separated by "|".
    read: Callable[[list[Path]], Data]  #: Reads these files.

    @property
    def description(self) -> str:
        """The first folder and its files, as in the documentation."""
        ends = dict.fromkeys(file.split("|")[0] for file in (self.files[0], self.files[-1]))
        return str(Path(self.folders[0], " ... ".join(ends)))

    def find(self, data_dir: Path) -> list[Path] | None:
        """Return the paths of the files; None if none of them exists. Raise ConfigError if only some exist."""
        for folder in (data_dir / name for name in self.folders):
            alternatives = [[folder / name for name in file.split("|")] for file in self.files]
            paths = [next((path for path in names if path.exists()), None) for names in alternatives]
            if all(paths):
                return [path for path in paths if path]
            if any(paths):
                absent = [file.replace("|", " or ") for file, path in zip(self.files, paths, strict=True) if not path]
                raise ConfigError(f"{folder} has no {', '.join(absent)} (folders: {PAGE})")
        return None


def data_folder(name: str, data_dir: Path | str | None) -> Path:
    """Return `data_dir`, or the folder of the environment variable AFFLUX_DATA; raise ConfigError without both."""
    folder = data_dir or os.environ.get("AFFLUX_DATA")
    if not folder:
        advice = f"give their folder with --data-dir or AFFLUX_DATA ({PAGE})"
        raise ConfigError(f"data {name!r} is read from files: {advice}")
    return Path(folder)


def read_first(name: str, data_dir: Path, layouts: Sequence[FileLayout[Data]]) -> Data:
    """Read a data set in the first layout that the folder has.

    Args:
        name: of the data set, for errors.
        data_dir: the user's folder.
        layouts: the layouts, in the order in which they are tried.

    Raises:
        ConfigError: no layout exists, or a file is missing or damaged.
    """
    if not os.path.isdir(data_dir):  # Path.is_dir raises for a name that is too long
        raise ConfigError(f"data {name!r}: there is no folder {data_dir} (folders: {PAGE})")
    for layout in layouts:
        if (paths := layout.find(data_dir)) is not None:
            return layout.read(paths)
    looked_for = "; ".join(layout.description for layout in layouts)
    raise ConfigError(f"data {name!r}: {data_dir} has none of: {looked_for} (folders: {PAGE})")
