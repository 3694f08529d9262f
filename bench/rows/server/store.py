"""A store on disk: rounds compared with rounds in memory, and the cost of a store that survives a power cut.

The folders are created where Python puts temporary files ($TMPDIR); that disk is measured.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from afflux import Server
from afflux.ops import codecs
from afflux.rules.presets.ca2fl import mf_ca2fl as mf_ca2fl_rule
from bench.rows import ca2fl
from bench.spec.columns import BY_D, ERROR, SPAN, ULP, Line, number
from bench.spec.contender import Round, ours
from bench.spec.inputs import LR, Inputs
from bench.spec.row import Row, one_case
from bench.spec.streams import Streams, Traffic

BITS = 4
CODEC = codecs.affine(BITS)


def new_server(inputs: Inputs, buffer_size: int, store: bool | Path, **options: Any) -> Server:
    """Return a new server with a store at this path; True: in a folder that is removed with the server."""
    folder = TemporaryDirectory(prefix="afflux-bench-")
    server = Server(
        mf_ca2fl_rule(buffer_size=buffer_size, server_lr=LR, bits=BITS),
        inputs.params[0],
        num_clients=inputs.num_clients,
        num_threads=inputs.num_threads,
        store=Path(folder.name, "store") if store is True else store or None,
        **options,
    )
    weakref.finalize(server, folder.cleanup)
    return server


def pushed(*, disk: bool, last: bool = False, **options: Any) -> Callable[[Inputs], Round]:
    """Return a contender that pushes M vectors; the last one makes the step. With `last`, only the last is timed."""

    def make(inputs: Inputs) -> Round:
        server = new_server(inputs, inputs.m, disk, **options)

        def push(k: int, *clients: int) -> None:
            for client_id in clients:
                server.push(client=client_id, update=inputs.vectors[k][client_id], version=server.version)

        def prepare(k: int) -> None:
            if last:
                push(k, *range(inputs.m - 1))

        def run(k: int) -> object:
            push(k, *range(inputs.m - 1 if last else 0, inputs.m))
            return server.params

        prepare(0)
        before = partial(ca2fl.first_read, inputs)
        return Round(run, before, lambda params: {"params": np.asarray(params)}, prepare)

    return make


def taken_in(pushes: int | None = None) -> Callable[[int], Traffic]:
    """Return the streams of this number of vectors, None: all M, that are copied into slots, and of the round."""
    return lambda m: (Streams(reads=(4,), writes=(4,), times=pushes or m), *ca2fl.traffic(CODEC)(m))


#: float32 vectors as large as an encoded row
ROW = ca2fl.row_bytes(CODEC) / 4


def held(m: int) -> float:
    """Return M slots, params, sum and rows, each with its new values; on disk: in the page cache."""
    return m + 6 + 2 * m * ROW


def beside_memory(lines: list[Line]) -> None:
    """Add the ratio of the time on disk to the time in memory; of a whole round in memory if the same was not timed."""
    medians = {line["name"]: line["median"] for line in lines}
    for line in lines:
        same = line["name"].replace("afflux", "in memory", 1)
        line["times_memory"] = line["median"] / medians.get(same, medians["in memory"])


LAST = ", the last push"
STORE = Row(
    name="store",
    formula=f"a round of mf_ca2fl, {BITS} bits, through Server(store=PATH): M pushes, and the step of the last of them",
    counted="8 d M + those of mf-ca2fl-affine-4",
    traffic=taken_in(),
    reference=ca2fl.reference,
    contenders=[
        ours("afflux", "Server(store=PATH), a commit a round", pushed(disk=True), held),
        ours("in memory", "Server", pushed(disk=False), held),
        ours(
            f"afflux{LAST}",
            "it makes the step, and the commit",
            pushed(disk=True, last=True),
            held,
            traffic=taken_in(1),
        ),
        ours(f"in memory{LAST}", "it makes the step", pushed(disk=False, last=True), held, traffic=taken_in(1)),
    ],
    columns=(BY_D, *SPAN, number("x in memory", "times_memory", ".2f"), ERROR, ULP),
    compare=beside_memory,
)


ROUNDS = 10  #: rounds of a sample, and rounds between two commits if not every round has one

POWER = replace(
    STORE,
    name="store-power",
    formula=f"the same rounds with each durability; a sample is {ROUNDS} of them, a figure is one",
    cases=partial(one_case, d=1_000_000, laps=ROUNDS),
    contenders=[
        ours("afflux", 'durability="process", a commit a round', pushed(disk=True), held),
        ours("in memory", "Server", pushed(disk=False), held),
        ours("afflux, power", 'durability="power", a commit a round', pushed(disk=True, durability="power"), held),
        ours(
            f"afflux, power, every {ROUNDS}",
            f'durability="power", commit_every={ROUNDS}',
            pushed(disk=True, durability="power", commit_every=ROUNDS),
            held,
        ),
    ],
)
