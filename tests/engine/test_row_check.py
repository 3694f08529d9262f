"""A stored row is compared with its checksums beside the sweep that takes a vector in, on a helper or on the caller."""

import mmap

import numpy as np
import pytest

from afflux import ops
from afflux._engine import RowCheck, ingest, populate
from conftest import check_error

BLOCK, HEAD, SIZE = 1024, 24, 10_000


def mapped_row(path, size=SIZE):
    """A file of random bytes, mapped."""
    path.write_bytes(np.random.default_rng(0).bytes(size))
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def awake():
    """A sweep on two threads: its helper spins for work afterwards."""
    vectors = [np.ones(1 << 20, np.float32) for _ in range(2)]
    ops.gram(vectors, num_threads=2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_row_is_sound_if_each_byte_is_as_it_was(threads, as_parts, tmp_path):
    row, vector, slot = mapped_row(tmp_path / "row"), np.arange(70_000, dtype=np.float32), np.empty(70_000, np.float32)
    given = [vector[:10], vector[10:]] if as_parts else vector
    checksums = ops.crc32c(row, BLOCK, head=HEAD)
    for damaged in [None, 0, HEAD - 1, HEAD, HEAD + BLOCK, SIZE - 1, None]:
        awake()
        if damaged is not None:
            row[damaged] ^= 1
        check = RowCheck(row, BLOCK, HEAD, checksums, threads)
        assert not check.sound  # nothing was compared so far
        slot[:] = 0
        assert ingest(given, slot, threads, None, check) == ingest(given, slot.copy(), 1)
        assert check.sound == (damaged is None)
        assert (slot == vector).all()
        if damaged is not None:
            row[damaged] ^= 1


@pytest.mark.parametrize("threads", [1, 2])
def test_other_checksums_and_lengths(threads, tmp_path):
    row, vector = mapped_row(tmp_path / "row"), np.zeros(8, np.float32)
    right = ops.crc32c(row, BLOCK, head=HEAD)
    for checksums in [b"", right[:-4], right + right[:4], right[4:] + right[:4]]:
        check = RowCheck(row, BLOCK, HEAD, checksums, threads)
        ingest(vector, np.empty(8, np.float32), 1, None, check)
        assert not check.sound


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_was_cut_off_is_no_signal(threads, tmp_path):
    size = 1 << 20
    row = mapped_row(tmp_path / "row", size)
    checksums = ops.crc32c(row, size)
    with (tmp_path / "row").open("r+b") as file:
        file.truncate(0)
    if populate(row, False) == 0:
        pytest.skip("this system cannot tell before the signal")
    awake()
    check = RowCheck(row, size, 0, checksums, threads)
    slot = np.empty(3, np.float32)
    ingest(np.ones(3, np.float32), slot, 1, None, check)
    assert not check.sound
    assert slot.tolist() == [1, 1, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_the_sweep_is_raised(threads, tmp_path):
    row = mapped_row(tmp_path / "row")
    awake()
    check = RowCheck(row, BLOCK, HEAD, ops.crc32c(row, BLOCK, head=HEAD), threads)
    check_error("slot has 4 elements", ingest, np.ones(3, np.float32), np.empty(4, np.float32), 1, None, check)
    ingest(np.ones(3, np.float32), np.empty(3, np.float32), 1, None, check)  # it may be used again
    assert check.sound


def test_memory_that_is_strided(tmp_path):
    row = mapped_row(tmp_path / "row")
    check_error("not C-contiguous", RowCheck, row[::2], BLOCK, HEAD, b"", 1, error=ValueError)
