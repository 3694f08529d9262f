"""Files of NumPy that clients send: read as NumPy does, or refused before they cost memory."""

import io
import random

import numpy as np
import pytest

from afflux import AffluxError
from afflux.integrations._npy import array_of, bytes_of
from conftest import check_raises
from surroundings import traced_memory_below


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "|b1", "<i8", "|u1", "<c8"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 5), (1,) * 30])
@pytest.mark.parametrize("order", ["C", "F"])
def test_files_of_numpy_are_read(dtype, shape, order):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype, order=order)
    found = array_of(saved(array))
    assert found.dtype == array.dtype
    assert found.shape == shape
    assert found.tobytes() == array.tobytes()
    again = array_of(bytes_of(array))
    assert (again.shape, again.dtype, again.tobytes()) == (shape, array.dtype, array.tobytes())


def file_with(header, elements=b"", version=1):
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + elements


FLOAT = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        file_with(b"-" * 9000),
        file_with(b"-" * 1900),
        file_with(b"(" * 1900),
        file_with(b"-" * 9000, version=2),
        file_with(FLOAT % b"3,", bytes(8)),
        file_with(FLOAT % b"3,", bytes(16)),
        file_with(FLOAT % (b"9" * 19 + b",") * 60),
        file_with(FLOAT % (b"0, " + b"9" * 19)),
        file_with(FLOAT % b"1, " * 65),
        file_with(FLOAT % b"-3,", bytes(12)),
        file_with(FLOAT % b"3,", bytes(12), version=4),
        file_with(FLOAT.replace(b"<f4", b"|O") % b"1,", bytes(8)),
        file_with(FLOAT.replace(b"<f4", b"|V0") % b"1,"),
        file_with(FLOAT.replace(b"<f4", b"\xff\xfe") % b"1,"),
        file_with(FLOAT.replace(b"'<f4'", b"[('a', '<f4')]") % b"1,", bytes(4)),
        file_with(FLOAT.replace(b"'<f4'", b"__import__('os')") % b"1,", bytes(4)),
        saved(np.array(["a"], object), allow_pickle=True),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100),
    ],
)
def test_made_up_files_are_refused_at_once(data):
    with traced_memory_below(10**6):
        check_raises(AffluxError, array_of, data)


def test_random_bytes_are_refused_or_read():
    rng = random.Random(0)
    good = saved(np.arange(12.0, dtype=np.float32).reshape(3, 4))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            array_of(bytes(data))
        except AffluxError:
            continue
