"""The files of the user's data folder, in one of several layouts, and readers of their formats: IDX, NumPy's archives,
CIFAR's records, tables. Files are regular ones of bounded size, or links to them.
"""

import csv
import errno
import gzip
import math
import os
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, BinaryIO, Generic, TypeVar
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from afflux.integrations._npy import array_of
from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief
from afflux.store.files import opened

Data = TypeVar("Data")

PAGE = "docs/reference/data.md"  #: The page that documents the formats and the folders.
#: The largest size of a file, also of its contents when decompressed: EMNIST's largest, all of byclass, has 638 MB.
MOST_BYTES = 1 << 30
#: What readers of formats raise for damaged and forged files.
_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, MemoryError, BadZipFile, zlib.error, LZMAError),
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


#: Bytes of an image of CIFAR.
PIXELS = 3 * 32 * 32
#: Bytes read at once. zipfile decompresses LZMA without a limit, up to 7,000 bytes for each that it reads.
CHUNK = 4096


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of uint8 from an IDX file, the format of MNIST.

    Its header is big-endian: two zero bytes, one byte for the type (8 is uint8), one for the number of dimensions,
    then each dimension in four bytes.

    Args:
        path: the file; with the suffix .gz it is decompressed.
        dimensions: that the array must have: 3 for images, 1 for labels.

    Returns:
        The array, read-only.

    Raises:
        ConfigError: the file cannot be read, or is not an IDX file of uint8 with these dimensions and bytes.
    """
    expected = f"an IDX file of uint8 with {dimensions} dimension{'s' * (dimensions > 1)}"
    with open_file(path, expected) as raw, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw as file:
        header = file.read(4)
        if len(header) < 4 or header[:2] != b"\0\0":
            raise bad_file(path, f"begins with the bytes {header.hex(' ')}", f"{expected}: 00 00 08 0{dimensions}")
        if header[2] != 8 or header[3] != dimensions:
            raise bad_file(path, f"has values of type {header[2]:#04x} and {header[3]} dimensions", expected)
        lengths = file.read(4 * dimensions)
        if len(lengths) < 4 * dimensions:
            raise bad_file(path, "ends within its header", expected)
        shape = tuple(int(length) for length in np.frombuffer(lengths, ">u4"))
        size = math.prod(shape)
        if math.prod(max(length, 1) for length in shape) > MOST_BYTES:
            raise bad_file(path, f"has the shape {shape}", f"at most {MOST_BYTES} bytes")
        values = _at_most(file, size + 1)
    if len(values) != size:
        length = f"{'more than ' * (len(values) > size)}{min(len(values), size)}"
        raise bad_file(path, f"has {length} bytes after its header", f"{size} bytes for the shape {shape}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _at_most(file: IO[bytes] | gzip.GzipFile, count: int) -> bytes:
    """Read up to `count` bytes, in pieces, because a damaged header may name more bytes than the memory has."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, CHUNK))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_npz(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Read arrays from an archive of NumPy's. Arrays of Python objects are refused: they are pickles.

    Args:
        path: the file.
        names: the names of the arrays to read; other arrays in the archive are not read.

    Returns:
        The arrays, read-only, in the order of `names`.

    Raises:
        ConfigError: the file cannot be read, an array is absent, or the arrays have more than `MOST_BYTES` bytes.
    """
    expected = f"an .npz archive with the arrays {', '.join(names)}"
    with open_file(path, expected) as file, ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        absent = [name for name in names if f"{name}.npy" not in members]
        if absent:
            raise bad_file(path, f"has no array {', '.join(absent)}", expected)
        arrays = [members[f"{name}.npy"] for name in names]
        size = sum(member.file_size for member in arrays)
        if size > MOST_BYTES:
            raise bad_file(path, f"has arrays of {size} bytes", f"at most {MOST_BYTES} bytes")
        if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED, ZIP_LZMA) for member in arrays):
            raise bad_file(path, "is compressed by another method than deflate and LZMA", expected)
        contents = []
        for member in arrays:
            with archive.open(member) as content:
                contents.append(array_of(_at_most(content, member.file_size)))
        return contents


def read_records(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of CIFAR's binary version: records of label bytes and pixels (red, green, blue plane).

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


def read_table(path: Path, columns: Sequence[str], quoted: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line of a table, and the line's values in some columns.

    Args:
        path: the file, in UTF-8 or UTF-16; its first line names the columns.
        columns: those that are read; others are ignored.
        quoted: whether values are separated by commas, semicolons or tabs, and may be in double quotes, as in CSV;
            otherwise they are separated by tabs.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a line has another number of values.
    """
    kind = "a CSV file with the columns" if quoted else "a table with tabs whose first line names the columns"
    expected = f"{kind} {', '.join(columns)}"
    lines = read_text(path, expected).split("\n")  # a value may hold other ends of lines of Unicode
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if quoted:
        dialect = {"delimiter": max(",;\t", key=lines[0].count), "skipinitialspace": True}
    rows = csv.reader(lines, strict=True, **dialect)
    try:
        header = [name.strip() for name in next(rows, [])]
        if absent := [column for column in columns if column not in header]:
            its = f"only {brief(', '.join(header))}" if header else "it is empty"
            raise bad_file(path, f"has no column {', '.join(absent)}, {its}", expected)
        places = [header.index(column) for column in columns]
        for values in filter(None, rows):
            if len(values) != len(header):
                problem = f"has {len(values)} values in line {rows.line_num}"
                raise bad_file(path, problem, f"{len(header)}, as in its first line")
            yield rows.line_num, [values[place] for place in places]
    except csv.Error as error:
        raise bad_file(path, f"is no table in line {rows.line_num}: {error}", expected) from None
