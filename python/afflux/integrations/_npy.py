"""Arrays from and to bytes in NumPy's file format, without a copy where possible.

bfloat16 has no name in this format: ml_dtypes writes it as two plain bytes, and the reader must know the dtype.
"""

import re
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from afflux.ops.errors import AffluxError
from afflux.ops.validation import reads

_MOST_HEADER = 2000  # bytes; 64 dimensions of 2**63 take 1400
#: The header that NumPy writes for an array without fields. NumPy reads it with Python's parser, which runs out of
#: memory or stack for some forged headers.
_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([^']{1,20})',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\((\d{0,19}(?:,\s*\d{1,19}){0,63}),?\s*\),?\s*\}\s*"
)


#: For functions that call `view_of`: its errors, and those of the objects that hold the bytes, are AffluxErrors.
reads_files = reads("an array in NumPy's file format")


def view_of(data: bytes, dtype: str = "") -> npt.NDArray[Any]:
    """Return a read-only view of the array in these bytes.

    Args:
        data: a file in NumPy's format.
        dtype: the name of the dtype, which identifies bfloat16.

    Raises:
        AffluxError: the bytes are no such file, are truncated, or hold Python objects.
    """
    start, length = _header_place(data)
    shape, fortran, header_dtype, count = _header(bytes(data[start:length]))
    if dtype == "bfloat16" and header_dtype.itemsize == 2 and header_dtype.kind == "V":
        header_dtype = np.dtype(_bfloat16())
    if length + count * header_dtype.itemsize != len(data):
        raise AffluxError(f"{len(data)} bytes hold an array of {length + count * header_dtype.itemsize}")
    flat = np.frombuffer(data, header_dtype, count, length) if count else np.frombuffer(b"", header_dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


#: As `view_of`; any error is an AffluxError.
array_of = reads_files(view_of)


def bytes_of(array: npt.NDArray[Any]) -> bytes:
    """Return the array as a file in NumPy's format; each element is copied once."""
    block = np.ascontiguousarray(array)
    return b"".join((_made_header(block.dtype, array.shape), block.reshape(-1).view(np.uint8).data))


def _header_place(data: bytes) -> tuple[int, int]:
    """Return the start and the end of the header."""
    if data[:6] != npy.MAGIC_PREFIX or len(data) < 12:
        raise AffluxError("not in NumPy's file format")
    if data[6] not in (1, 2, 3):
        raise AffluxError("a version of NumPy's file format that is not known")
    start = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _MOST_HEADER:
        raise AffluxError(f"a header of {length} bytes")
    return start, start + length


@lru_cache(4096)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, "np.dtype[Any]", int]:
    """Return the shape, whether the order is Fortran's, the dtype and the number of elements."""
    match = _HEADER.fullmatch(header)
    if match is None:
        raise AffluxError("not the header of an array of numbers in NumPy's file format")
    dtype = np.dtype(match[1].decode("ascii"))
    if dtype.hasobject or dtype.itemsize == 0:
        raise AffluxError("not an array of numbers")
    shape = tuple(int(n) for n in match[3].split(b",") if n.strip())
    return shape, match[2] == b"True", dtype, prod(shape)


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
        raise AffluxError("a bfloat16 array needs the package ml_dtypes") from None
    return bfloat16
