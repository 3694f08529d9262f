"""The vectors of one run, and the check that they fit into memory."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.spec.arrays import HOST, Host, Vector

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LR = 0.7  #: the server's learning rate; not 1, so that a contender cannot leave out the multiplication
LIBRARIES = 500_000_000  #: bytes that Python and torch use, independent of d


@dataclass(frozen=True)
class Case:
    """The size of the inputs and the number of threads. Rows with the same case share the inputs."""

    d: int
    m: int
    threads: int
    separate: bool = False  #: whether the updates also exist as M separate arrays, as clients push them
    sets: int = 2  #: number of input sets, which are used in turn
    laps: int = 1  #: runs in a sample, each on the next set
    warm: bool = False  #: whether all laps of a sample use one set, which is in the cache if it fits
    clients: int | None = None  #: N; default 10 M
    device: str = "cpu"  #: or cuda

    def __str__(self) -> str:
        clients = f", N = {self.clients:_}" if self.clients else ""
        return f"d = {self.d:_}, M = {self.m:_}{clients}"

    def sample(self, run: Callable[[int], object]) -> Callable[[int], object]:
        """Make all runs of the sample with this number."""

        def laps(number: int) -> object:
            result = None
            for lap in range(self.laps):
                result = run((number if self.warm else number * self.laps + lap) % self.sets)
            return result

        return laps


@dataclass(frozen=True)
class Inputs:
    """The vectors that all contenders share. Only `out`, `scratch` and spare rows are written; each contender has its
    own state.

    On the host NumPy allocates all of it, with huge pages: baselines run on the same memory.
    """

    blocks: list[Vector]  #: per input set (1 + M, d), contiguous: a spare row, and the M updates
    updates: list[Vector]  #: per input set (M, d), contiguous: its rows are the M updates
    vectors: list[list[Vector]]  #: per input set the M updates: these rows, or separate copies of them
    params: list[Vector]  #: per input set (d,)
    out: Vector  #: (d,)
    scratch: Vector  #: (some, d): the output of probes
    staleness: Int64  #: (M,): 0 to 4 in turn
    weights: Float64  #: (M,): (1 + staleness)^-1/2 / M, as in FedBuff
    num_threads: int
    num_clients: int
    place: Host = HOST  #: the memory of all vectors

    @property
    def d(self) -> int:
        return int(self.out.shape[0])

    @property
    def m(self) -> int:
        return self.weights.size

    @property
    def equal_weights(self) -> Float64:
        return np.full(self.m, 1 / self.m)

    def read(self, k: int, weights: Float64, **state: Vector) -> dict[str, Vector]:
        """Return the inputs of a round on set k: params, updates, weights, and the contender's vectors, `state`."""
        return {"params": self.params[k], "updates": self.updates[k], "weights": weights, **state}

    def last_rows(self) -> Vector:
        """Return a copy of the rows as they are before set 0 is applied: the updates of the last set."""
        return self.place.copied(self.updates[-1])

    def last_mean(self) -> Vector:
        """Return the mean of the last set's updates; the same bits on the host and on a GPU."""
        mean = self.place.copied(self.updates[-1][0])
        for update in self.updates[-1][1:]:
            mean += update
        mean *= 1 / self.m  # to divide, torch multiplies on a GPU by the reciprocal
        return mean


def make(case: Case, scratch: int, place: Host = HOST) -> Inputs:
    """Make the inputs: normal vectors, params of size 0.1 and updates of size 0.01. All of their pages are written."""
    d, m, sets = case.d, case.m, case.sets
    blocks = [place.empty((1 + m, d)) for _ in range(sets)]
    updates = [block[1:] for block in blocks]
    params = [place.empty(d) for _ in range(sets)]
    jobs = [(row, 0.01) for block in updates for row in block] + [(p, 0.1) for p in params]

    def fill(job: tuple[int, tuple[Vector, float]]) -> None:
        seed, (vector, size) = job
        with place.written(vector) as values:
            np.random.default_rng(seed).standard_normal(out=values, dtype=np.float32)
            values *= np.float32(size)

    with ThreadPoolExecutor(case.threads) as pool:
        list(pool.map(fill, enumerate(jobs)))
    staleness = np.arange(m) % 5
    return Inputs(
        blocks=blocks,
        updates=updates,
        vectors=[[place.copied(row) if case.separate else row for row in block] for block in updates],
        params=params,
        out=place.filled(d, 1),
        scratch=place.filled((scratch, d), 1),
        staleness=staleness,
        weights=1 / np.sqrt(1.0 + staleness) / m,
        num_threads=case.threads,
        num_clients=case.clients or 10 * m,
        place=place,
    )


def shared_bytes(case: Case, scratch: int) -> int:
    vectors = case.sets * (case.m * (1 + case.separate) + 2)
    return 4 * case.d * (vectors + 1 + scratch)


def does_not_fit(needed: int, available: int, case: Case) -> str:
    """Return the message for a d that is too large; all memory but LIBRARIES is proportional to d."""
    fits = case.d * max(0, available - LIBRARIES) / (needed - LIBRARIES)
    digits = 10 ** max(0, math.floor(math.log10(max(1.0, fits))) - 1)
    return (
        f"{case} needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
        f"d = {int(fits // digits * digits):_} would fit"
    )
