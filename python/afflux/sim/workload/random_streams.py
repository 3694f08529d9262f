"""Random streams: one generator per (seed, purpose, key), so that runs with one seed are paired."""

from enum import IntEnum

import numpy as np


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
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))))
