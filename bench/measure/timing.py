"""Alternating timing: in each repeat every contender and probe runs once, in a new order, on the next input set."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afflux.arrays.interop import on_host
from bench.spec.arrays import Vector
from bench.spec.contender import REST, Arrays, Contender, Round, ends
from bench.spec.inputs import Case, Inputs
from bench.spec.row import Row
from bench.spec.streams import Traffic, moved

#: The elements at each end of a vector that are compared with float64, and the most elements of all M together.
CHECKED, CHECKED_OF_ALL = 2**19, 2**23


#: Starts a timer, and returns a function that stops it and returns the seconds.
Clock = Callable[[], Callable[[], float]]


def wall_clock() -> Callable[[], float]:
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


@dataclass
class Timed:
    """A contender or probe that is timed, and its samples in seconds per run."""

    name: str
    what: str
    bytes: int  #: the bytes that a run moves
    sample: Callable[[int], object]  #: makes all runs of the sample with this number
    laps: int = 1  #: the number of runs in a sample
    traffic: Traffic = ()  #: the traffic of a probe
    row: str = ""  #: the name of the row; empty for a probe
    by: Contender | None = None  #: the contender; None for a probe
    prepare: Callable[[int], object] = lambda number: None  #: called before a sample, and not timed
    rest: float = REST  #: seconds of rest before the next contender runs
    after: Callable[[Any], Arrays] = lambda result: {}  #: the outputs, given what the last run of a sample returned
    first: float = 0  #: seconds of its first run
    kernels: dict[str, float] = field(default_factory=dict)  #: seconds of each kernel of a run on a GPU
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def seconds_of(self, number: int, clock: Clock = wall_clock) -> float:
        """Make the sample with this number; return its seconds."""
        self.prepare(number)
        stop = clock()
        result = self.sample(number)
        seconds = stop()
        del result  # freeing it is not part of the round
        return seconds

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def alone(self) -> float | None:
        """The seconds of the kernels of a run on a GPU, without the host's."""
        return sum(self.kernels.values()) or None

    @property
    def gbps(self) -> float:
        """The bandwidth at the median, in 10^9 bytes per second."""
        return self.bytes / self.median / 1e9


def measure_groups(
    groups: Sequence[Sequence[Timed]],
    repeats: int,
    turn: Callable[[], object] = lambda: None,
    clock: Clock = wall_clock,
) -> None:
    """Measure groups whose members are compared: they run one after the other, in either order equally often.

    The order changes every two repeats, because two input sets alternate: each order runs with each set.
    """
    order = list(groups)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            shuffle(order)
            for timed in (timed for group in order for timed in group[:: -1 if repeat // 2 % 2 else 1]):
                timed.seconds.append(timed.seconds_of(repeat, clock) / timed.laps)
                time.sleep(timed.rest)
                turn()
    finally:
        gc.enable()


def entrant(case: Case, row: Row, by: Contender, shared: Inputs, checked: bool = True) -> Timed:
    """Return a contender, ready to be timed: it was made and checked, and has run on each set."""
    ready = by.make(shared)

    def prepare(number: int) -> None:
        ready.prepare(number % case.sets)
        if case.warm:
            ready.run(number % case.sets)

    timed = Timed(
        by.name,
        by.what,
        moved((by.traffic or row.traffic)(case.m), case.d),
        case.sample(ready.run),
        laps=case.laps,
        row=row.name,
        by=by,
        prepare=prepare,
        rest=by.rest,
        after=ready.after,
    )
    if checked:
        timed.errors, timed.first = check(row, shared, ready)
    else:
        stop = wall_clock()
        ready.run(0)
        timed.first = stop()
    # Timing begins with set 0, and rows must then be those of the last set.
    for k in range(1, case.sets):
        ready.prepare(k)
        ready.run(k)
    gc.collect()
    return timed


def check(row: Row, inputs: Inputs, ready: Round) -> tuple[dict[str, dict[str, float]], float]:
    """Run set 0 once; return the errors relative to the definition in float64, and the seconds."""
    size = max(1, min(CHECKED, CHECKED_OF_ALL // inputs.m))
    before = {name: sample(name, array, size) for name, array in ready.before(0).items()}
    stop = wall_clock()
    result = ready.run(0)
    seconds = stop()
    got = {name: sample(name, array, size) for name, array in ready.after(result).items()}
    exact = row.reference(before)
    return {name: error(array, *exact[name]) for name, array in got.items()}, seconds


def sample(name: str, array: Vector, size: int) -> np.ndarray:
    return on_host(array, copy=True) if name == "weights" else ends(array, size)


def error(got: np.ndarray, exact: np.ndarray, terms: np.ndarray) -> dict[str, float]:
    """Return the largest error, absolute and in float32 ulps of the exact value, and the largest sum of |terms|.

    If the terms cancel, the ulps of the result are small. A sum that is rounded once has an error of at most half an
    ulp even then.
    """
    difference = np.abs(got.astype(np.float64) - exact)
    ulps = difference / np.spacing(np.abs(exact).astype(np.float32))
    return {
        "abs": float(difference.max(initial=0)),
        "ulp": float(ulps.max(initial=0)),
        "terms": float(terms.max(initial=0)),
    }
