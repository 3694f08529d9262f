"""Families of native probes: the same streams moved in many ways, of which the fastest take part in the rounds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

from afflux.bench import machine, native
from afflux.bench.inputs import Case, Float32, Inputs
from afflux.bench.measure import Timed
from afflux.bench.native import MOST_GROUP, Placed, Variant
from afflux.bench.streams import Streams, Traffic, moved, spoken

AHEAD = (0, 256, 512, 1024, 2048, 4096)
TILES = (256, 1024, 4096)
#: Of all variants, so many are tried again at full length.
FINALISTS = 6


def generic(m: int) -> list[Traffic]:
    """What every case is measured with, whatever its rows are."""
    counts = [2**i for i in range(m.bit_length())] + [m + 1]
    reads = [Streams(reads=(4,) * count) for count in dict.fromkeys(counts)]
    written = [Streams(reads=(4,) * count, writes=(4,)) for count in (1, m + 1)]
    in_place = [Streams(in_place=(4,) * count) for count in (1, 2, 3)]
    return [(streams,) for streams in (*reads, *written, *in_place)]


def variants(traffic: Traffic) -> list[Variant]:
    """Every combination that makes a difference for these streams."""
    groups = (4, MOST_GROUP) if any(len(streams.reads) > 4 for streams in traffic) else (MOST_GROUP,)
    stores = (False, True) if any(streams.writes for streams in traffic) else (False,)
    return [Variant(*chosen) for chosen in product(AHEAD, TILES, groups, stores)]


def placed(memory: Iterable[Float32], sizes: Sequence[int], elements: int) -> Iterator[Placed]:
    """The streams one after the other in these flat arrays."""
    chunks = iter(memory)
    free = next(chunks)
    for size in sizes:
        words = math.ceil(elements * size / 4)
        while words > free.size:
            free = next(chunks)
        yield free[:words], size
        free = free[words:]


def sweep(inputs: Inputs, k: int, streams: Streams, variant: Variant, elements: int, laps: int) -> Callable[[], float]:
    """Reads the vectors of set k; writes the scratch vectors."""
    elements *= streams.times
    written = list(placed([inputs.scratch.reshape(-1)], streams.writes + streams.in_place, elements))
    return native.sweep(
        list(placed([inputs.updates[k].reshape(-1), inputs.params[k]], streams.reads, elements)),
        written[: len(streams.writes)],
        written[len(streams.writes) :],
        elements,
        variant,
        threads=inputs.num_threads,
        laps=laps,
    )


def ready(
    inputs: Inputs, case: Case, traffic: Traffic, variant: Variant, elements: int | None = None
) -> Callable[[int], object]:
    """A sample of this probe; laps that are all on one set are made by the native code."""
    laps = case.laps if case.warm else 1
    calls = [
        [sweep(inputs, k, streams, variant, elements or case.d, laps) for streams in traffic] for k in range(case.sets)
    ]

    def run(k: int) -> None:
        for call in calls[k]:
            call()

    return lambda number: run(number % case.sets) if case.warm else case.sample(run)(number)


def fastest(
    candidates: Sequence[Variant], samples: int, keep: int, prepared: Callable[[Variant], Callable[[int], object]]
) -> list[Variant]:
    """Those with the shortest sample."""

    def shortest(variant: Variant) -> float:
        sample = prepared(variant)
        seconds = []
        for number in range(samples):
            start = time.perf_counter()
            sample(number)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return sorted(candidates, key=shortest)[:keep]


def tried(inputs: Inputs, case: Case, traffic: Traffic, keep: int) -> list[Timed]:
    """The fastest variants: of all on a part that is larger than the caches, then of some on the whole."""
    an_element = moved(traffic, 1)
    part = case.d if case.warm else min(case.d, math.ceil(4 * machine.last_level() / an_element))
    few = fastest(variants(traffic), 2, FINALISTS, lambda v: ready(inputs, case, traffic, v, part))
    found = fastest(few, 3, keep, lambda v: ready(inputs, case, traffic, v))
    return [
        Timed(
            f"native: {spoken(traffic)}",
            str(variant),
            moved(traffic, case.d),
            sample=(sample := ready(inputs, case, traffic, variant)),
            laps=case.laps,
            traffic=traffic,
            prepare=sample if case.warm else lambda number: None,
        )
        for variant in found
    ]


def wanted(case: Case, rows: Iterable[Traffic]) -> dict[Traffic, int]:
    """How many variants of each family take part in the timed rounds: two of each row's own mix, one of the rest."""
    return dict.fromkeys(generic(case.m), 1) | dict.fromkeys(rows, 2)


def scratch(traffics: Iterable[Traffic]) -> int:
    """How many float32 vectors these families write."""
    return max((math.ceil(streams.written() / 4) for traffic in traffics for streams in traffic), default=0)
