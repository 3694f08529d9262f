"""CRC-32C of blocks, by the CPU's instruction and by table, against another library's."""

import google_crc32c
import numpy as np
import pytest

from afflux import AffluxError, _engine, ops


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("block", [1, 7, 8, 64, 999, 4096, 2_000_000])
@pytest.mark.parametrize("size", [0, 1, 9, 8192, 30_001])
def test_blocks(rng, size, block, table):
    data = rng.bytes(size)
    expected = [google_crc32c.value(data[i : i + block]) for i in range(0, size, block)]
    got = np.frombuffer(_engine.crc32c(data, block, 2, table), np.uint32)
    assert got.tolist() == expected


def test_arrays_are_taken_as_bytes(rng):
    array = rng.standard_normal((5, 7))
    assert ops.crc32c(array, 64) == ops.crc32c(array.tobytes(), 64)
    with pytest.raises(AffluxError, match="not C-contiguous"):
        ops.crc32c(array[:, ::2], 64)
    with pytest.raises(AffluxError, match="block is 0"):
        ops.crc32c(array, 0)
