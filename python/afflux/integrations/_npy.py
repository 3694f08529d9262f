"""Arrays from and to bytes in NumPy's file format, without a copy where there need be none.

bfloat16 has no name in that format: ml_dtypes writes it as two plain bytes, and the reader must know.
"""

from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

_MOST_HEADER = 10_000  # NumPy's own limit on what it parses


def array_of(data: bytes, dtype: str = "") -> npt.NDArray[Any]:
    """A read-only view of the array in these bytes.

    Args:
        data: a file in NumPy's format.
        dtype: its name beside the bytes, which tells bfloat16.

    Raises:
        ValueError: it is none, is cut off, or holds Python objects.
    """
    length = _header_length(data)
    shape, fortran, found = _header(bytes(data[:length]))
    if dtype == "bfloat16" and found.itemsize == 2 and found.kind == "V":
        found = np.dtype(_bfloat16())
    count = 1
    for n in shape:
        count *= n
    flat = np.frombuffer(data, found, count, length) if count else np.frombuffer(b"", found)
    if length + flat.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes hold an array of {length + flat.nbytes}")
    return flat.reshape(shape, order="F" if fortran else "C")


def bytes_of(array: npt.NDArray[Any]) -> bytes:
    """The array as a file in NumPy's format; each element is copied once."""
    own = np.ascontiguousarray(array)
    return b"".join((_made_header(own.dtype, array.shape), own.reshape(-1).view(np.uint8).data))


def _header_length(data: bytes) -> int:
    """Bytes before the elements."""
    if data[:6] != npy.MAGIC_PREFIX:
        raise ValueError("not in NumPy's file format")
    wide = data[6] > 1
    length = int.from_bytes(data[8 : 12 if wide else 10], "little")
    if length > _MOST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return length + (12 if wide else 10)


@lru_cache(4096)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, "np.dtype[Any]"]:
    file = BytesIO(header)
    version = npy.read_magic(file)
    read: Callable[..., Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(
        version, _unknown
    )
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return shape, fortran, dtype


def _unknown(file: BytesIO) -> None:
    raise ValueError("a version of NumPy's file format that is not known")


@lru_cache(4096)
def _made_header(dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> bytes:
    file = BytesIO()
    descr = npy.dtype_to_descr(dtype) if dtype.kind != "V" else "|V2"
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _bfloat16() -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ValueError("a bfloat16 array needs the package ml_dtypes") from None
    return bfloat16
