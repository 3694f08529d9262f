"""CRC-32C of blocks, by the CPU's instruction and by table, against another library's."""

import google_crc32c
import numpy as np
import pytest

from afflux import _engine, ops
from conftest import check_error


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("block", [1, 7, 8, 64, 999, 4096, 2_000_000])
@pytest.mark.parametrize("size", [0, 1, 9, 8192, 30_001])
@pytest.mark.parametrize("head", [0, 64])
def test_blocks(rng, head, size, block, table):
    data = rng.bytes(head + size)
    blocks = [data[:head]] * (head > 0) + [data[i : i + block] for i in range(head, head + size, block)]
    got = np.frombuffer(_engine.crc32c(data, block, head, 2, table), np.uint32)
    assert got.tolist() == [google_crc32c.value(block) for block in blocks]


@pytest.mark.parametrize("block", [2**62, 2**63 - 1, 2**63, 2**64, 10**30])
@pytest.mark.parametrize("head", [0, 9])
def test_blocks_at_the_end_of_64_bits(rng, head, block):
    """Blocks that are longer than the data: the borders of later ones are not computed, and overflow nowhere."""
    data = rng.bytes(30_001)
    blocks = [data[:head]] * (head > 0) + [data[head:]]
    expected = [google_crc32c.value(part) for part in blocks]
    assert np.frombuffer(ops.crc32c(data, block, head=head), np.uint32).tolist() == expected
    assert ops.crc32c(b"", block) == b""


def test_arrays_are_taken_as_bytes(rng):
    array = rng.standard_normal((5, 7))
    assert ops.crc32c(array, 64) == ops.crc32c(array.tobytes(), 64)
    check_error("not C-contiguous", ops.crc32c, array[:, ::2], 64)
    check_error("block is 0", ops.crc32c, array, 0)
    for head in (-1, 281):
        check_error(f"head is {head}, data has 280 bytes", ops.crc32c, array, 64, head=head)
