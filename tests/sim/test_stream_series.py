"""Streams that are made many at a time are NumPy's own, to the bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afflux.sim.workload.random_streams import BLOCK, BLOCKS, StreamPurpose, StreamSeries, random_stream

SEEDS = st.one_of(st.integers(0, 5), st.integers(0, 2**32 + 5), st.sampled_from([2**31, 2**32 - 1, 2**32, 2**64 + 1]))
KEYS = st.one_of(st.integers(0, 3 * BLOCK), st.integers(0, 2**33), st.sampled_from([2**32 - 257, 2**32 - 256, 2**32]))


@given(SEEDS, st.sampled_from(StreamPurpose), KEYS)
def test_a_stream_is_numpys(seed, purpose, key):
    ours, theirs = StreamSeries(seed, purpose).stream(key), random_stream(seed, purpose, key)
    assert ours.bit_generator.state == theirs.bit_generator.state
    assert ours.integers(0, 10, 5).tolist() == theirs.integers(0, 10, 5).tolist()


@pytest.mark.parametrize("order", ["up", "down", "far apart"])
def test_keys_in_any_order(order):
    keys = {
        "up": range(3 * BLOCK),
        "down": range(3 * BLOCK, 0, -1),
        "far apart": range(0, 3 * BLOCKS * BLOCK, BLOCK - 1),
    }
    series = StreamSeries(7, StreamPurpose.BATCHES)
    for key in list(keys[order])[::37]:
        expected = random_stream(7, StreamPurpose.BATCHES, key).bit_generator.state
        assert series.stream(key).bit_generator.state == expected
        assert series._block.cache_info().currsize <= BLOCKS


def test_children_are_numpys():
    ours = StreamSeries(7, StreamPurpose.BATCHES).stream(3)
    theirs = random_stream(7, StreamPurpose.BATCHES, 3)
    for left, right in zip(ours.spawn(2), theirs.spawn(2), strict=True):
        assert left.bit_generator.state == right.bit_generator.state
    left, right = (each.bit_generator.seed_seq.generate_state(3) for each in (ours, theirs))
    assert np.array_equal(left, right)
