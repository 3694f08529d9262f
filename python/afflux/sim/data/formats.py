"""Readers of the formats of data sets: IDX, NumPy's archives, CIFAR's records, tables."""

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile

import numpy as np

from afflux.arrays.npy import array_of
from afflux.ops.validation import brief
from afflux.sim.data.files import MOST_BYTES, bad_file, open_file, read_bytes, read_text

#: Bytes of an image of CIFAR.
PIXELS = 3 * 32 * 32
CHUNK = 1 << 20
#: zipfile decompresses LZMA without a limit, at most 7,000 bytes for each that it reads, and reads so many at least.
LEAST_CHUNK = 4096


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
        found = f"has {'more than ' * (len(values) > size)}{min(len(values), size)} bytes after its header"
        raise bad_file(path, found, f"{size} bytes for the shape {shape}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _at_most(file: IO[bytes] | gzip.GzipFile, count: int, chunk: int = CHUNK) -> bytes:
    """Read up to `count` bytes, in pieces, because a damaged header may name more bytes than the memory has."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, chunk))):
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
                chunk = LEAST_CHUNK if member.compress_type == ZIP_LZMA else CHUNK
                contents.append(array_of(_at_most(content, member.file_size, chunk)))
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
