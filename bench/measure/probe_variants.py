"""Native probes that move the same streams in many variants; the fastest variants take part in the timing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, product
from math import ceil

from bench.measure import machine, native_probes
from bench.measure.native_probes import MOST_GROUP, Placed, Variant
from bench.measure.timing import Timed
from bench.spec.inputs import Case, Float32, Inputs
from bench.spec.row import Row
from bench.spec.streams import Streams, Traffic, moved, spoken

AHEAD = (0, 256, 512, 1024, 2048, 4096)
TILES = (256, 1024, 4096)
#: The number of variants that are tried again at full length.
FINALISTS = 6


def generic(m: int) -> list[Traffic]:
    """Return the traffic that is measured in every case, independent of its rows."""
    numbers = [2**i for i in range(m.bit_length())] + [m + 1]
    reads = [Streams(reads=(4,) * n) for n in dict.fromkeys(numbers)]
    written = [Streams(reads=(4,) * n, writes=(4,)) for n in (1, m + 1)]
    in_place = [Streams(in_place=(4,) * n) for n in (1, 2, 3)]
    return [(streams,) for streams in (*reads, *written, *in_place)]


def variants(traffic: Traffic) -> list[Variant]:
    """Return all variants that can differ in speed for these streams."""
    groups = (4, MOST_GROUP) if any(len(streams.reads) > 4 for streams in traffic) else (MOST_GROUP,)
    stores = (False, True) if any(streams.writes for streams in traffic) else (False,)
    return [Variant(*chosen) for chosen in product(AHEAD, TILES, groups, stores)]


def placed(memory: Iterable[Float32], sizes: Sequence[float], elements: int) -> Iterator[Placed]:
    """Place the streams one after the other in these flat arrays."""
    chunks = iter(memory)
    free = next(chunks)
    for size in sizes:
        words = ceil(elements * size / 4)
        while words > free.size:
            free = next(chunks)
        yield free[:words], size
        free = free[words:]


def sweep(inputs: Inputs, k: int, streams: Streams, variant: Variant, elements: int, laps: int) -> Callable[[], float]:
    """Return a sweep that reads the vectors of set k and writes the scratch vectors."""
    elements *= streams.times
    written = list(placed([inputs.scratch.reshape(-1)], streams.writes + streams.in_place, elements))
    return native_probes.sweep(
        list(placed([inputs.updates[k].reshape(-1), inputs.params[k]], streams.reads, elements)),
        written[: len(streams.writes)],
        written[len(streams.writes) :],
        elements,
        variant,
        threads=inputs.num_threads,
        laps=laps,
    )


def probe(inputs: Inputs, case: Case, traffic: Traffic, variant: Variant, elements: int) -> Timed:
    """Return streams that one variant moves. If all laps are on one set, the native code makes all laps."""
    laps = case.laps if case.warm else 1
    sweeps = [[sweep(inputs, k, s, variant, elements, laps) for s in traffic] for k in range(case.sets)]

    def run(k: int) -> None:
        for call in sweeps[k]:
            call()

    timed = Timed(
        f"native: {spoken(traffic)}", str(variant), moved(traffic, case.d), case.sample(run), case.laps, traffic
    )
    timed.rest = 0  # its threads have already ended
    if case.warm:
        timed.sample = timed.prepare = lambda number: run(number % case.sets)
    return timed


def fastest(variants: Iterable[Variant], make: Callable[[Variant], Timed], samples: int, keep: int) -> list[Variant]:
    """Return the variants with the shortest sample.

    Each starts with the input set after the last variant's, so that no set is in the cache.
    """
    numbers = count()

    def shortest(variant: Variant) -> float:
        timed = make(variant)
        return min(timed.seconds_of(number) for number in islice(numbers, samples))

    return sorted(variants, key=shortest)[:keep]


def tried(inputs: Inputs, case: Case, traffic: Traffic, keep: int, *, quick: bool) -> list[Timed]:
    """Return the fastest variants, ready to be timed: they have run on each set.

    All variants (quick: a few) run on a part that is larger than the caches; the fastest of them run on the whole.
    """
    part, fewer = case.d, case
    if not case.warm:
        part = min(case.d, ceil(4 * machine.last_level() / moved(traffic, 1)))
        fewer = replace(case, laps=ceil(case.laps / 20))
    few = variants(traffic)[:: 11 if quick else 1]
    for elements, samples, number in ((part, 2, FINALISTS), (case.d, 3, keep)):
        few = fastest(few, lambda v, size=elements: probe(inputs, fewer, traffic, v, size), samples, number)  # type: ignore[misc]
    probes = [probe(inputs, case, traffic, variant, case.d) for variant in few]
    for timed, number in product(probes, range(case.sets)):
        timed.sample(number)
    return probes


def wanted(case: Case, rows: Iterable[Row]) -> dict[Traffic, int]:
    """Return the streams that native probes move in a case, and how many variants of each are timed.

    Two of each row's own mix, one of the others.
    """
    return dict.fromkeys(generic(case.m), 1) | {row.traffic(case.m): 2 for row in rows}


def scratch(traffics: Iterable[Traffic]) -> int:
    """Return how many float32 vectors the probes of this traffic write."""
    return max((ceil(streams.written() / 4) for traffic in traffics for streams in traffic), default=0)
