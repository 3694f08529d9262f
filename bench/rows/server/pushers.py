"""Clients that push at the same time, one thread each: the time of a push, and the number of pushes a second.

A lap is the M pushes of a round, shared by the threads. The time of each push, from its call to its receipt, is kept.
It includes the step, if the push makes one, and waiting times.
"""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter

import numpy as np

from afflux import Server
from afflux.rules.presets.fedbuff import fedbuff
from bench.rows.fedbuff import FEDBUFF
from bench.rows.server.streaming import OF_PUSHERS, SLOTS, buffered
from bench.spec.columns import BY_D, ROLE, SPEED, Line, number
from bench.spec.contender import Round, ours
from bench.spec.inputs import Case, Inputs
from bench.spec.row import Asked, Row
from bench.spec.streams import Streams

PUSHERS, QUICK_PUSHERS = [1, 2, 4, 8, 16, 32, 64], [1, 4]
SIZES, QUICK_SIZES = [14_563, 1_000_000], [1_000]
M = 64  #: at least one push for each thread
LAPS, SHORT = 10, 100_000  #: laps of a sample, if vectors are shorter than SHORT

#: The seconds of each push, by contender, d and number of threads.
_taken: dict[tuple[str, int, int], list[float]] = defaultdict(list)


def cases(asked: Asked) -> list[Case]:
    lengths = [asked.d] if asked.d else QUICK_SIZES if asked.quick else SIZES
    counts = QUICK_PUSHERS if asked.quick else PUSHERS
    return [
        Case(d, asked.m or M, 1, sets=asked.sets, laps=LAPS if d < SHORT else 1, clients=count)
        for d in lengths
        for count in counts
    ]


def by_threads(name: str, *, accumulate: bool) -> Callable[[Inputs], Round]:
    """Return the contender with this name: as many threads as the case has clients push the M vectors in turn."""

    def make(inputs: Inputs) -> Round:
        threads, m = inputs.num_clients, inputs.m
        slots = SLOTS if accumulate else None
        server = Server(fedbuff(buffer_size=m), inputs.params[0], num_threads=1, accumulate=accumulate, max_slots=slots)
        pool, together = ThreadPoolExecutor(threads), Barrier(threads)
        shares = np.array_split(np.arange(m), threads)
        taken = _taken[name, inputs.d, threads]

        def run(k: int) -> None:
            vectors = inputs.vectors[k]

            def push(own: list[int]) -> list[float]:
                seconds = []
                together.wait()
                for i in own:
                    start = perf_counter()
                    server.push(client=i, update=vectors[i], version=server.version)
                    seconds.append(perf_counter() - start)
                return seconds

            for seconds in pool.map(push, [share.tolist() for share in shares]):
                taken.extend(seconds)

        return Round(run)

    return make


def a_push(lines: list[Line]) -> None:
    for line in lines:
        taken = _taken[line["name"], line["d"], line["clients"]]
        line["p50"], line["p99"] = (float(np.percentile(taken, share)) for share in (50, 99))
        line["pushes"] = line["m"] / line["median"]


PUSHERS_ROW = Row(
    name="pushers",
    formula="pushes of fedbuff from N threads at a time, and their steps",
    counted="8 d M, and 4 d (M + 2) for the step",
    traffic=lambda m: (Streams(reads=(4,), writes=(4,), times=m), *FEDBUFF.traffic(m)),
    cases=cases,
    along="clients",
    contenders=[
        ours("afflux", "Server.push", by_threads("afflux", accumulate=False), buffered),
        ours(
            "afflux, streaming",
            f"Server(accumulate=True, max_slots={SLOTS}).push",
            by_threads("afflux, streaming", accumulate=True),
            OF_PUSHERS,
        ),
    ],
    columns=(
        BY_D,
        number("pushers", "clients", "_d"),
        ROLE,
        number("p50 us", "p50", ".1f", 1e6),
        number("p99 us", "p99", ".1f", 1e6),
        number("pushes a second", "pushes", "_.0f"),
        *SPEED,
    ),
    compare=a_push,
)
