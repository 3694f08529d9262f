"""The random streams of one purpose for consecutive keys, as `random_stream` makes them, in a tenth of the time.

NumPy hashes (seed, purpose, key) in Python for each generator. Here the part that does not depend on the key is hashed
once, and the rest for many keys at a time.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence

from afflux.sim.workload.random_streams import StreamPurpose, random_stream

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
    """`stream(key)` returns what `random_stream(seed, purpose, key)` returns."""

    def __init__(self, seed: int, purpose: StreamPurpose) -> None:
        self._seed, self._purpose = seed, purpose
        self._pool: Any = None
        if 0 <= seed < _WORD:
            words = [seed, 0, 0, 0, int(purpose)]
            self._pool = np.random.SeedSequence(np.array(words, np.uint32)).pool
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def stream(self, key: int) -> np.random.Generator:
        """Return a new generator."""
        if self._pool is None or not 0 <= key < _WORD - BLOCK:
            return random_stream(self._seed, self._purpose, key)
        number, place = divmod(key, BLOCK)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = _states(self._pool, np.arange(number * BLOCK, (number + 1) * BLOCK))
            if len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        sequence: Any = _KnownState(
            block[place], self._seed, self._purpose, key
        )  # NumPy's stubs know SeedSequence alone
        return np.random.Generator(np.random.PCG64(sequence))


class _KnownState(ISpawnableSeedSequence):
    """A seed sequence whose first state is known; for anything else it is NumPy's own."""

    __slots__ = ("_key", "_own", "_state")

    def __init__(self, state: np.ndarray, *key: int) -> None:
        self._state, self._key = state, key
        self._own: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        if n_words == len(self._state) and dtype is np.uint64:
            return self._state
        return self._numpy().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> Any:
        return self._numpy().spawn(n_children)

    def _numpy(self) -> np.random.SeedSequence:
        if self._own is None:
            seed, purpose, key = self._key
            self._own = np.random.SeedSequence(seed, spawn_key=(int(purpose), key))
        return self._own


def _states(pool: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the states (n, 4), uint64, of SeedSequence with `pool` after the words before each of `keys`."""
    keys = keys.astype(np.uint32)
    factor = _INIT_A * pow(_MULT_A, _BEFORE, _WORD) % _WORD
    mixed = []
    for word in pool:
        hashed = keys ^ np.uint32(factor)
        factor = factor * _MULT_A % _WORD
        hashed = hashed * np.uint32(factor)
        hashed ^= hashed >> _SHIFT
        with np.errstate(over="ignore"):
            found = word * _MIX_L - hashed * _MIX_R
        mixed.append(found ^ (found >> _SHIFT))
    words = np.empty((len(keys), _WORDS), np.uint32)
    factor = _INIT_B
    for place in range(_WORDS):
        value = mixed[place % _POOL] ^ np.uint32(factor)
        factor = factor * _MULT_B % _WORD
        value = value * np.uint32(factor)
        words[:, place] = value ^ (value >> _SHIFT)
    return words.astype("<u4").view("<u8").astype(np.uint64)
