"""Streams are those of NumPy's seed sequences, to the bit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from afflux.sim.workload.random_streams import StreamPurpose, random_stream

NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**34), st.sampled_from([2**31, 2**32 - 1, 2**32, 2**64 + 1]))


@given(NUMBERS, st.sampled_from(StreamPurpose), st.lists(NUMBERS, max_size=2))
def test_a_stream_is_numpys(seed, purpose, key):
    """Also its children, which a training function of the user may spawn."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))
    ours, theirs = random_stream(seed, purpose, *key), np.random.Generator(np.random.PCG64(sequence))
    for left, right in zip([ours, *ours.spawn(2)], [theirs, *theirs.spawn(2)], strict=True):
        assert left.bit_generator.state == right.bit_generator.state
