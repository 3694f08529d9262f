"""The growth of the time of a round: proportional to d and M, independent of the number of clients N."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil

from afflux import Server
from afflux.rules.presets.ca2fl import ca2fl as ca2fl_rule
from bench.measure import machine
from bench.rows import ca2fl, fedbuff
from bench.spec.columns import BY_D, BY_M, BY_N, ERROR, ROLE, TIME, TIMES_OURS
from bench.spec.contender import Round, ours
from bench.spec.inputs import LR, Case, Inputs
from bench.spec.row import Asked, Row
from bench.spec.streams import Streams, Traffic, moved

LENGTHS = [10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000]
COUNTS = [1, 3, 10, 30, 100, 300, 1000]
CLIENTS = [100, 1_000, 10_000, 100_000, 1_000_000]
D, M, SEEN = 100_000, 10, 100
FEW = 3  #: cases of a quick run


def cold(asked: Asked, d: int, m: int) -> Case:
    """Return a case with so many input sets that they exceed the caches; each sample uses them one after the other."""
    laps = 2 if asked.quick else max(1, ceil(4 * machine.last_level() / moved(fedbuff.traffic(m), d)))
    return Case(d, m, asked.threads, sets=max(asked.sets, laps), laps=laps)


def some(grid: list[int], asked: Asked) -> list[int]:
    return grid[:FEW] if asked.quick else grid


def over_d(asked: Asked) -> list[Case]:
    return [cold(asked, d, asked.m or M) for d in ([asked.d] if asked.d else some(LENGTHS, asked))]


def over_m(asked: Asked) -> list[Case]:
    return [cold(asked, asked.d or D, m) for m in ([asked.m] if asked.m else some(COUNTS, asked))]


def over_n(asked: Asked) -> list[Case]:
    return [
        Case(asked.d or D, asked.m or M, asked.threads, sets=asked.sets, laps=2 if asked.quick else 10, clients=clients)
        for clients in some(CLIENTS, asked)
    ]


def server_traffic(m: int) -> Traffic:
    """Return the streams of M pushes, and of the round that the last push makes."""
    return Streams(reads=(4,), writes=(4,), times=m), *ca2fl.CA2FL.traffic(m)


def server_round(inputs: Inputs) -> Round:
    """Return a contender in which M of SEEN clients, spread over all N, push in turn; the M-th push makes the step."""
    server = Server(
        ca2fl_rule(buffer_size=inputs.m, server_lr=LR),
        inputs.params[0],
        num_clients=inputs.num_clients,
        num_threads=inputs.num_threads,
    )
    seen = max(SEEN, inputs.m)
    turns: Iterator[int] = (turn % seen * (inputs.num_clients // seen) for turn in count())

    def run(k: int) -> object:
        version = server.version
        return [server.push(client=next(turns), update=vector, version=version) for vector in inputs.updates[k]]

    return Round(run, partial(ca2fl.first_read, inputs), lambda _: {"params": server.params})


SCALING = [
    *(
        replace(
            fedbuff.FEDBUFF,
            name=f"scaling-{along}",
            formula=f"fedbuff over {by_size.head}",
            counted="4 d (M + 2), as fedbuff",
            cases=cases,
            along=along,
            contenders=[ours("afflux", "ops.apply", fedbuff.afflux_round()), *fedbuff.FEW_IN_TORCH],
            columns=(by_size, ROLE, *TIME, TIMES_OURS, ERROR),
        )
        for along, by_size, cases in (("d", BY_D, over_d), ("m", BY_M, over_m))
    ),
    Row(
        name="scaling-n",
        formula="ca2fl through Server: M pushes and the step, over N",
        counted="8 d M + 4 d (3 M + 2) + 16 d: M vectors taken in, then as ca2fl",
        traffic=server_traffic,
        reference=ca2fl.reference,
        cases=over_n,
        along="clients",
        contenders=[ours("afflux", "Server.push, ca2fl", server_round, kept=lambda m: SEEN + 2 * m + 10)],
        columns=(BY_N, *TIME, ERROR),
    ),
]
