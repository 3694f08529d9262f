"""Random streams: one generator per (seed, purpose, key), so that runs with one seed are paired."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
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
    CLIENT_GLOBALS = 24  #: of a client's data, for `seed_globals`
    ATTACK = 25


def random_stream(seed: int, purpose: StreamPurpose, *key: int) -> np.random.Generator:
    """Return the generator for `purpose` under `seed`; `key` distinguishes, for example, dispatches.

    Streams are independent of each other and of the aggregation rule.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))))


def seed_globals(seed: int) -> None:
    """Seed the generators of `random` and `np.random`, from which a user's code may draw.

    Each call of such code is seeded, as torch's generator is, so that no state of them lasts from one to the next.
    """
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))  # noqa: NPY002 - that is the one


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore the generators of `seed_globals` after the block."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
