"""Pushes whose clients' rows are only on disk, compared with pushes of rows in memory, and with plain reading."""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from afflux import Server
from bench.rows import ca2fl
from bench.rows.server.store import BITS, CODEC, new_server
from bench.spec.columns import BY_D, ROLE, SPAN, Line, number
from bench.spec.contender import Contender, Round, ours
from bench.spec.inputs import Inputs
from bench.spec.row import Row
from bench.spec.streams import Streams, Traffic

BLOCK = 2**20  #: bytes of one read() in `plain_reading`


def evict(file: Path) -> None:
    """Drop the file's pages from the page cache; this does not drop mapped pages."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pushed(*, cold: bool) -> Callable[[Inputs], Round]:
    """Return a contender that pushes M vectors of clients that have a row; one more push would make the step."""

    def make(inputs: Inputs) -> Round:
        folder, m = TemporaryDirectory(prefix="afflux-bench-"), inputs.m
        path = Path(folder.name, "store")
        served = [new_server(inputs, m + 1, path)]

        def push(k: int, first: int, count: int) -> None:
            for i in range(count):
                served[0].push(client=first + i, update=inputs.vectors[k][i % m], version=served[0].version)

        def prepare(k: int) -> None:
            """Close and open the store, because a map keeps its pages.

            Pushes of other clients then load its slots.
            """
            served.pop().close(checkpoint=False)
            gc.collect()
            for segment in path.glob("rows/c/*/0") if cold else ():
                evict(segment)
            served.append(Server.open(path, num_threads=inputs.num_threads))
            push(k, m + 1, m)
            served[0].discard()

        push(0, 0, m + 1)
        prepare(0)
        weakref.finalize(inputs, folder.cleanup)
        return Round(lambda k: push(k, 0, m), prepare=prepare)

    return make


def plain_reading(inputs: Inputs) -> Round:
    """Return a contender that reads one file of the size of M rows, from its beginning to its end."""
    folder = TemporaryDirectory(prefix="afflux-bench-")
    path, block = Path(folder.name, "rows"), bytearray(BLOCK)
    path.write_bytes(np.random.default_rng(0).bytes(inputs.m * CODEC.row_bytes(inputs.d)))
    weakref.finalize(inputs, folder.cleanup)

    def run(k: int) -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    evict(path)
    return Round(run, prepare=lambda k: evict(path))


def only_linux() -> str | None:
    return None if hasattr(os, "posix_fadvise") else "this system cannot evict a file's pages (posix_fadvise)"


def beside_both(lines: list[Line]) -> None:
    """Add the comparisons with pushes whose rows are in memory, and with plain reading."""
    ours, warm, reading = (line["median"] for line in lines)
    lines[0]["times_both"] = ours / (warm + reading)
    lines[0]["times_reading"] = (ours - warm) / reading


def read(m: int) -> Traffic:
    return (Streams(reads=(ca2fl.row_bytes(CODEC),) * m),)


def read_and_taken_in(m: int) -> Traffic:
    return (Streams(reads=(4,), writes=(4,), times=m), *read(m))


COLD = Row(
    name="store-cold",
    formula=f"M pushes of clients whose rows, {BITS} bits, were evicted from the page cache; each is read and checked",
    counted="8 d M and M encoded rows",
    traffic=read_and_taken_in,
    contenders=[
        ours("afflux", "rows on disk only", pushed(cold=True), requirement=only_linux),
        ours("afflux, warm", "rows in the page cache", pushed(cold=False), requirement=only_linux),
        Contender(
            "plain reading",
            "read() of 1 MiB, again and again, of one file as long as the rows",
            plain_reading,
            caveat="reads only",
            traffic=read,
            requirement=only_linux,
        ),
    ],
    columns=(
        BY_D,
        ROLE,
        *SPAN,
        number("x (warm + reading)", "times_both", ".2f"),
        number("(- warm) x reading", "times_reading", ".2f"),
    ),
    compare=beside_both,
)
