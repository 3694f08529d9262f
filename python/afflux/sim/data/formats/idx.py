"""IDX files, the format of MNIST: a header with the dimensions, then the bytes; plain or compressed with gzip.

Header, big-endian: two zero bytes, one byte for the type (8 is uint8), one for the number of dimensions, then each
dimension in four bytes.
"""

import gzip
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.data.formats.files import MOST_BYTES, open_file

UINT8 = 8
CHUNK = 1 << 20


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of uint8 from an IDX file.

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
        if header[2] != UINT8 or header[3] != dimensions:
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


def _at_most(file: BinaryIO | gzip.GzipFile, count: int) -> bytes:
    """Read up to `count` bytes, in pieces, because a damaged header may name more bytes than the memory has."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, CHUNK))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
