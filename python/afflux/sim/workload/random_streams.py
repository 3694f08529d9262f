"""Random streams: one generator per (seed, purpose, key), so that runs with one seed are paired."""

from enum import IntEnum
from functools import cached_property, lru_cache, partial
from itertools import pairwise
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
    TRIALS = 10
    CLIENT_EVALUATION = 20
    AVAILABILITY = 21
    DROPOUT = 22
    SELECTION_LAW = 23  #: laws other than uniform and blocked-until-pass-ends


def random_stream(seed: int, purpose: StreamPurpose, *key: int) -> np.random.Generator:
    """Return the generator for `purpose` under `seed`; `key` distinguishes, for example, dispatches.

    Streams are independent of each other and of the aggregation rule.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, *key)))


def _sequence(seed: int, purpose: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))


#: Constants of numpy.random.SeedSequence, which NumPy guarantees not to change.
_MIX_L, _MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_POOL, _WORDS, _WORD = 4, 8, 2**32


def _factors(first: int, ratio: int, begin: int, count: int) -> list[tuple[np.uint32, np.uint32]]:
    """Return the two factors of each of `count` hashes; `begin` hashes came before."""
    factors = [np.uint32(first * pow(ratio, begin + place, _WORD) % _WORD) for place in range(count + 1)]
    return list(pairwise(factors))


#: Before the key, each word of the pool is hashed, each pair of them, and the purpose with each of them.
_KEY_FACTORS = _factors(0x43B0D7E5, 0x931E8875, _POOL + _POOL * (_POOL - 1) + _POOL, _POOL)
_WORD_FACTORS = _factors(0x8B51F9DD, 0x58F38DED, 0, _WORDS)

BLOCK = 256  #: number of keys that are hashed at a time
BLOCKS = 128  #: number of blocks that are kept


class StreamSeries:
    """`stream(key)` returns what `random_stream(seed, purpose, key)` returns, in a tenth of the time.

    NumPy hashes (seed, purpose, key) in Python for each generator. Here the part that does not depend on the key is
    hashed once, and the rest for many consecutive keys at a time.
    """

    def __init__(self, seed: int, purpose: StreamPurpose) -> None:
        self._key = seed, purpose
        self._end = _WORD - BLOCK if 0 <= seed < _WORD else 0
        if self._end:
            words = np.array([seed, 0, 0, 0, purpose], np.uint32)
            self._block = lru_cache(BLOCKS)(partial(_states, np.random.SeedSequence(words).pool))

    def stream(self, key: int) -> np.random.Generator:
        """Return a new generator."""
        if not 0 <= key < self._end:
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
    with np.errstate(over="ignore"):
        mixed = [
            _fold(word * _MIX_L - _fold((keys ^ a) * b) * _MIX_R)
            for word, (a, b) in zip(pool, _KEY_FACTORS, strict=True)
        ]
        words = [_fold((value ^ a) * b) for value, (a, b) in zip(mixed * 2, _WORD_FACTORS, strict=True)]
    return np.stack(words, axis=1).astype("<u4").view("<u8").astype(np.uint64)


def _fold(values: np.ndarray) -> np.ndarray:
    return np.asarray(values ^ (values >> np.uint32(16)))
