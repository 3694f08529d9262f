"""Ways to move bytes with almost no arithmetic: the fastest in a run says what the machine can do.

No single probe will do: one read stream, many, or a read-modify-write come out first depending on
the machine, so the family is broad. Bytes are counted as for an operation: each read once, each
written once.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from afflux import ops
from afflux.bench import baselines
from afflux.bench.inputs import Inputs, scratch_vectors


@dataclass(frozen=True)
class Probe:
    name: str
    kind: str  #: what the memory sees: read, write, both, or both in place
    what: str  #: the streams
    vectors: Callable[[int], int]  #: of M: how many float32 vectors are read plus written
    make: Callable[[Inputs], Callable[[int], object]]

    def bytes(self, d: int, m: int) -> int:
        return 4 * d * self.vectors(m)


def copied(m: int) -> int:
    """How many vectors the copying probes read: as many as there is room to write."""
    return min(m, scratch_vectors(m))


def threaded(inputs: Inputs, size: int, work: Callable[[int, slice], object]) -> Callable[[int], object]:
    """work(k, range) on equal ranges at once; NumPy drops the interpreter lock meanwhile."""
    edges = [size * i // inputs.num_threads for i in range(inputs.num_threads + 1)]
    ranges = [slice(a, b) for a, b in pairwise(edges)]
    pool = ThreadPoolExecutor(inputs.num_threads)
    return lambda k: list(pool.map(lambda s: work(k, s), ranges))


def numpy_copy(inputs: Inputs) -> Callable[[int], object]:
    count = copied(inputs.m)
    target = inputs.scratch[:count].reshape(-1)
    sources = [u[:count].reshape(-1) for u in inputs.updates]
    return threaded(inputs, target.size, lambda k, s: np.copyto(target[s], sources[k][s]))


def numpy_max(inputs: Inputs) -> Callable[[int], object]:
    flat = [u.reshape(-1) for u in inputs.updates]
    return threaded(inputs, flat[0].size, lambda k, s: flat[k][s].max(initial=0))


def afflux_ingest(inputs: Inputs) -> Callable[[int], object]:
    return lambda k: ops.ingest(inputs.updates[k][0], inputs.scratch[0], num_threads=inputs.num_threads)


def afflux_gram(inputs: Inputs) -> Callable[[int], object]:
    return lambda k: ops.gram(list(inputs.updates[k][:2]), num_threads=inputs.num_threads)


PROBES = [
    Probe("numpy copyto", "both", "1 read, 1 write", lambda m: 2 * copied(m), numpy_copy),
    Probe("numpy max", "read", "1 read", lambda m: m, numpy_max),
    Probe("afflux ingest", "both", "1 read, 1 write", lambda m: 2, afflux_ingest),
    Probe("afflux gram of 2", "read", "2 reads", lambda m: min(m, 2), afflux_gram),
]

if baselines.torch is not None:
    torch = baselines.torch

    def torch_copy(inputs: Inputs) -> Callable[[int], object]:
        count = copied(inputs.m)
        target = torch.from_numpy(inputs.scratch[:count])
        sources = [torch.from_numpy(u[:count]) for u in inputs.updates]
        return lambda k: target.copy_(sources[k])

    def torch_fill(inputs: Inputs) -> Callable[[int], object]:
        target = torch.from_numpy(inputs.scratch)
        return lambda k: target.fill_(1.0)

    def torch_scale(inputs: Inputs) -> Callable[[int], object]:
        target = torch.from_numpy(inputs.scratch)
        return lambda k: target.mul_(1.0)

    def torch_add(inputs: Inputs) -> Callable[[int], object]:
        target = torch.from_numpy(inputs.scratch[0])
        pairs = [(torch.from_numpy(u[0]), torch.from_numpy(u[-1])) for u in inputs.updates]
        return lambda k: torch.add(*pairs[k], out=target)

    def torch_sum(inputs: Inputs) -> Callable[[int], object]:
        flat = [torch.from_numpy(u) for u in inputs.updates]
        return lambda k: flat[k].sum()

    def torch_dot(inputs: Inputs) -> Callable[[int], object]:
        half = max(1, inputs.m // 2)
        pairs = [
            (torch.from_numpy(u[:half].reshape(-1)), torch.from_numpy(u[-half:].reshape(-1))) for u in inputs.updates
        ]
        return lambda k: torch.dot(*pairs[k])

    def torch_sum_rows(inputs: Inputs) -> Callable[[int], object]:
        target = torch.from_numpy(inputs.scratch[0])
        blocks = [torch.from_numpy(u) for u in inputs.updates]
        return lambda k: torch.sum(blocks[k], 0, out=target)

    def torch_mv(inputs: Inputs) -> Callable[[int], object]:
        target = torch.from_numpy(inputs.scratch[0])
        blocks = [torch.from_numpy(u).T for u in inputs.updates]
        weights = torch.from_numpy(inputs.weights).float()
        return lambda k: torch.mv(blocks[k], weights, out=target)

    PROBES += [
        Probe("torch copy_", "both", "1 read, 1 write", lambda m: 2 * copied(m), torch_copy),
        Probe("torch fill_", "write", "1 write", scratch_vectors, torch_fill),
        Probe("torch mul_", "in place", "1 read, written back", lambda m: 2 * scratch_vectors(m), torch_scale),
        Probe("torch add", "both", "2 reads, 1 write", lambda m: min(m, 2) + 1, torch_add),
        Probe("torch sum", "read", "1 read", lambda m: m, torch_sum),
        Probe("torch dot", "read", "2 reads", lambda m: 2 * max(1, m // 2) if m > 1 else 1, torch_dot),
        Probe("torch sum over rows", "both", "M reads, 1 write", lambda m: m + 1, torch_sum_rows),
        Probe("torch mv", "both", "M reads, 1 write", lambda m: m + 1, torch_mv),
    ]
