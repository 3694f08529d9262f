"""Probes written with torch, beside the native ones."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.measure.timing import Timed
from bench.spec.inputs import Case, Inputs
from bench.spec.optional_torch import torch
from bench.spec.streams import Streams, Traffic, moved

#: The most vectors that the copying probes write: enough that they are not in the cache.
COPIED = 4


@dataclass(frozen=True)
class Probe:
    name: str
    traffic: Callable[[int], Traffic]  #: of M
    make: Callable[[Inputs], Callable[[int], object]]


def copied(m: int) -> int:
    return min(m, COPIED)


def copying(m: int) -> Traffic:
    return (Streams(reads=(4,), writes=(4,), times=copied(m)),)


def reading(m: int) -> Traffic:
    return (Streams(reads=(4,), times=m),)


def threaded(num_threads: int, size: int) -> Callable[[Callable[[slice], Any]], list[Any]]:
    """Return a function that calls another one on equal ranges in parallel; NumPy releases the interpreter lock."""
    ranges = [slice(a, b) for a, b in pairwise(size * i // num_threads for i in range(num_threads + 1))]
    pool = ThreadPoolExecutor(num_threads)
    return lambda work: list(pool.map(work, ranges))


PROBES: list[Probe] = []

if torch is not None:

    def torch_copy(inputs: Inputs) -> Callable[[int], object]:
        count = copied(inputs.m)
        target = inputs.place.tensor(inputs.scratch[:count])
        sources = [inputs.place.tensor(u[:count]) for u in inputs.updates]
        return lambda k: target.copy_(sources[k])

    def torch_add(inputs: Inputs) -> Callable[[int], object]:
        target = inputs.place.tensor(inputs.scratch[0])
        pairs = [(u[0], p) for u, p in zip(inputs.updates, inputs.params, strict=True)]
        tensors = [tuple(map(inputs.place.tensor, pair)) for pair in pairs]
        return lambda k: torch.add(*tensors[k], out=target)

    def torch_scale(inputs: Inputs) -> Callable[[int], object]:
        target = inputs.place.tensor(inputs.scratch[:COPIED])
        return lambda k: target.mul_(1.0)

    def torch_sum(inputs: Inputs) -> Callable[[int], object]:
        flat = [inputs.place.tensor(u) for u in inputs.updates]
        return lambda k: flat[k].sum()

    def torch_mv(inputs: Inputs) -> Callable[[int], object]:
        target = inputs.place.tensor(inputs.scratch[0])
        blocks = [inputs.place.tensor(u).T for u in inputs.updates]
        weights = inputs.place.tensor(inputs.weights).float()
        return lambda k: torch.mv(blocks[k], weights, out=target)

    PROBES = [
        Probe("torch copy_", copying, torch_copy),
        Probe("torch add", lambda m: (Streams(reads=(4, 4), writes=(4,)),), torch_add),
        Probe("torch mul_", lambda m: (Streams(in_place=(4,), times=COPIED),), torch_scale),
        Probe("torch sum", reading, torch_sum),
        Probe("torch mv", lambda m: (Streams(reads=(4,) * m, writes=(4,)),), torch_mv),
    ]


def timed(probe: Probe, case: Case, inputs: Inputs) -> Timed:
    """Return the probe, ready to be timed: it has run on each set."""
    run, traffic = probe.make(inputs), probe.traffic(case.m)
    for k in range(case.sets):
        run(k)
    return Timed(probe.name, "", moved(traffic, case.d), case.sample(run), case.laps, traffic)
