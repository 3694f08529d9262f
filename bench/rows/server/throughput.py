"""The number of pushes a second of one server with encoded rows, a store on disk and many clients.

Clients push in turn, in an order that was shuffled once; each has pushed before, so that every push reads a row and
every round replaces M of them. The folders are created where Python puts temporary files ($TMPDIR).
"""

from collections.abc import Callable
from itertools import cycle

import numpy as np

from bench.rows.server.store import BITS, ROW, new_server, taken_in
from bench.spec.columns import BY_N, ROLE, Line, number
from bench.spec.contender import Round, ours
from bench.spec.inputs import Case, Inputs
from bench.spec.row import Asked, Row

TOUCHED, QUICK_TOUCHED = 20_000, 200  #: the most clients that push
CLIENTS = [1_000, 10_000, 100_000, 1_000_000]
D, QUICK_D = 100_000, 1_000
ROUNDS = 100  #: rounds of a sample


def cases(asked: Asked) -> list[Case]:
    d, m = asked.d or (QUICK_D if asked.quick else D), asked.m or 10
    laps, counts = (2, CLIENTS[:2]) if asked.quick else (ROUNDS, CLIENTS)
    return [Case(d, m, asked.threads, sets=asked.sets, laps=laps, clients=clients) for clients in counts]


def pushed(*, disk: bool) -> Callable[[Inputs], Round]:
    """Return a contender that pushes the vectors of the next M clients; the last one makes the step."""

    def make(inputs: Inputs) -> Round:
        server = new_server(inputs, inputs.m, disk)
        touched = min(inputs.num_clients, TOUCHED if inputs.d > QUICK_D else QUICK_TOUCHED)
        order = np.random.default_rng(0).permutation(touched) * (inputs.num_clients // touched)
        turns = cycle(order.tolist())

        def run(k: int) -> None:
            push, version = server.push, server.version
            for vector in inputs.vectors[k]:
                push(client=next(turns), update=vector, version=version)

        for number_of_round in range(-(-touched // inputs.m)):
            run(number_of_round % len(inputs.vectors))
        return Round(run)

    return make


def held(m: int) -> float:
    """Return the rows of the clients that push, M slots, params and the sum; on disk rows are in the page cache."""
    return TOUCHED * ROW + m + 6


def a_second(lines: list[Line]) -> None:
    for line in lines:
        line["pushes"] = line["m"] / line["median"]
        line["fewest"], line["most"] = line["m"] / line["max"], line["m"] / line["min"]


THROUGHPUT = Row(
    name="throughput",
    formula=f"pushes of mf_ca2fl, {BITS} bits, through Server: {TOUCHED:_} of N clients push, one after the other",
    counted="8 d M + those of mf-ca2fl-affine-4",
    traffic=taken_in(),
    cases=cases,
    along="clients",
    contenders=[
        ours("afflux", 'Server(store=PATH), durability="process"', pushed(disk=True), held),
        ours("in memory", "Server", pushed(disk=False), held),
    ],
    columns=(
        BY_N,
        ROLE,
        number("pushes a second", "pushes", "_.0f"),
        number("fewest", "fewest", "_.0f"),
        number("most", "most", "_.0f"),
        number("GB/s", "gbps", ".1f"),
    ),
    compare=a_second,
)
