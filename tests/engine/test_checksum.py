"""CRC-32C of blocks, by the CPU's instruction and by table, against another library's."""

import google_crc32c
import numpy as np
import pytest

from afflux import AffluxError, _engine, ops


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("block", [1, 7, 8, 64, 999, 4096, 2_000_000])
@pytest.mark.parametrize("size", [0, 1, 9, 8192, 30_001])
@pytest.mark.parametrize("head", [0, 64])
def test_blocks(rng, head, size, block, table):
    data = rng.bytes(head + size)
    blocks = [data[:head]] * (head > 0) + [data[i : i + block] for i in range(head, head + size, block)]
    got = np.frombuffer(_engine.crc32c(data, block, head, 2, table), np.uint32)
    assert got.tolist() == [google_crc32c.value(block) for block in blocks]


def test_arrays_are_taken_as_bytes(rng):
    array = rng.standard_normal((5, 7))
    assert ops.crc32c(array, 64) == ops.crc32c(array.tobytes(), 64)
    with pytest.raises(AffluxError, match="not C-contiguous"):
        ops.crc32c(array[:, ::2], 64)
    with pytest.raises(AffluxError, match="block is 0"):
        ops.crc32c(array, 0)
    for head in (-1, 281):
        with pytest.raises(AffluxError, match=f"head is {head}, data has 280 bytes"):
            ops.crc32c(array, 64, head=head)
