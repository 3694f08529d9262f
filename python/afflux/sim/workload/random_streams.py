"""Random streams: one generator per (seed, purpose, key), so that runs with one seed are paired."""

from enum import IntEnum
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence


class StreamPurpose(IntEnum):
    """Purpose of a stream; the results of a seed depend on these numbers, so they are never changed or reused."""

    PARTITION = 0
    DELAY_CLIENTS = 1
    DELAY_TIMES = 2
    SELECTION = 3
    BATCHES = 4
    MODEL = 5
    STALE_MODELS = 6
    VALIDATION = 7
    CLIENT_DATA = 8
    TORCH = 9


def random_stream(seed: int, purpose: StreamPurpose, *key: int) -> np.random.Generator:
    """Return the generator for `purpose` under `seed`; `key` distinguishes, for example, dispatches.

    Streams are independent of each other and of the aggregation rule.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, *key)))


def _sequence(seed: int, purpose: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))


#: Constants of numpy.random.SeedSequence, which NumPy guarantees not to change.
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT, _POOL, _WORDS = np.uint32(16), 4, 8
_WORD = 2**32
#: Hashes before the key: each word of the pool, each pair of them, and the purpose with each of them.
_BEFORE = _POOL + _POOL * (_POOL - 1) + _POOL

BLOCK = 256  #: number of keys that are hashed at a time
BLOCKS = 128  #: number of blocks that are kept


class StreamSeries:
    """`stream(key)` returns what `random_stream(seed, purpose, key)` returns, in a tenth of the time.

    NumPy hashes (seed, purpose, key) in Python for each generator. Here the part that does not depend on the key is
    hashed once, and the rest for many consecutive keys at a time.
    """

    def __init__(self, seed: int, purpose: StreamPurpose) -> None:
        self._key = seed, purpose
        self._most = 0
        if 0 <= seed < _WORD:
            self._most = _WORD - BLOCK
            words = np.array([seed, 0, 0, 0, purpose], np.uint32)
            self._block = lru_cache(BLOCKS)(partial(_states, np.random.SeedSequence(words).pool))

    def stream(self, key: int) -> np.random.Generator:
        """Return a new generator."""
        if not 0 <= key < self._most:
            return random_stream(*self._key, key)
        # NumPy's stubs know SeedSequence alone.
        sequence: Any = _KnownState(self._block(key // BLOCK)[key % BLOCK], *self._key, key)
        return np.random.Generator(np.random.PCG64(sequence))


class _KnownState(ISpawnableSeedSequence):
    """A seed sequence whose first state is known; for anything else it is NumPy's own."""

    def __init__(self, state: np.ndarray, *key: int) -> None:
        self._state, self._key = state, key

    @cached_property
    def _numpy(self) -> np.random.SeedSequence:
        return _sequence(*self._key)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        if n_words == len(self._state) and dtype is np.uint64:
            return self._state
        return self._numpy.generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> Any:
        return self._numpy.spawn(n_children)


def _states(pool: np.ndarray, block: int) -> np.ndarray:
    """Return the states (BLOCK, 4), uint64, of SeedSequence with `pool` after the words before each key of a block."""
    keys = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint32)
    factor = _INIT_A * pow(_MULT_A, _BEFORE, _WORD) % _WORD
    mixed = []
    for word in pool:
        hashed = keys ^ np.uint32(factor)
        factor = factor * _MULT_A % _WORD
        hashed = hashed * np.uint32(factor)
        hashed ^= hashed >> _SHIFT
        with np.errstate(over="ignore"):
            value = word * _MIX_L - hashed * _MIX_R
        mixed.append(value ^ (value >> _SHIFT))
    words = np.empty((BLOCK, _WORDS), np.uint32)
    factor = _INIT_B
    for place in range(_WORDS):
        value = mixed[place % _POOL] ^ np.uint32(factor)
        factor = factor * _MULT_B % _WORD
        value = value * np.uint32(factor)
        words[:, place] = value ^ (value >> _SHIFT)
    return words.astype("<u4").view("<u8").astype(np.uint64)
