"""A store on disk: whole rounds beside the same in memory, and rows that only the disk has beside plain reading.

The folders lie where Python puts temporary files ($TMPDIR); what is measured is that disk.
"""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from afflux import Server, codecs
from afflux.bench import mf_ca2fl
from afflux.bench.columns import BY_D, ERROR, ROLE, SPAN, ULP, Line, number
from afflux.bench.contender import Arrays, Contender, Round
from afflux.bench.inputs import LR, Inputs
from afflux.bench.row import Exact, Row, one_case
from afflux.bench.streams import Streams, Traffic
from afflux.rules.ca2fl import mf_ca2fl as mf_ca2fl_rule
from afflux.store.disk import DiskRows

BITS = 4
CODEC = codecs.affine(BITS)
BLOCK = 2**20  #: bytes that are read at once by who only reads


def new_server(inputs: Inputs, folder: str | None) -> Server:
    """For M clients; the folder, if there is one, is made here."""
    return Server(
        mf_ca2fl_rule(buffer_size=inputs.m, server_lr=LR, bits=BITS),
        inputs.params[0],
        num_clients=inputs.num_clients,
        num_threads=inputs.num_threads,
        store=folder,
    )


def pushed(*, disk: bool, last: bool) -> Callable[[Inputs], Round]:
    """A contender that pushes M vectors, of which the last makes the step; `last`: only that one is timed."""

    def make(inputs: Inputs) -> Round:
        folder = TemporaryDirectory(prefix="afflux-bench-")
        server = new_server(inputs, f"{folder.name}/store" if disk else None)
        weakref.finalize(server, folder.cleanup)

        def push(k: int, *clients: int) -> None:
            for client_id in clients:
                server.push(client_id, inputs.vectors[k][client_id], version=server.version)

        def prepare(k: int) -> None:
            if last:
                push(k, *range(inputs.m - 1))

        def run(k: int) -> object:
            push(k, *range(inputs.m - 1 if last else 0, inputs.m))
            return server.params

        def before(k: int) -> Arrays:
            """At the first round nobody has a row yet."""
            return {
                "params": inputs.params[0],
                "updates": inputs.updates[k],
                "weights": inputs.equal_weights,
                "rows": np.zeros_like(inputs.updates[k]),
                "h": np.zeros(inputs.d),
            }

        prepare(0)
        return Round(run, before, lambda params: {"params": np.asarray(params)}, prepare)

    return make


def taken_in(pushes: int) -> Callable[[int], Traffic]:
    """So many vectors of M copied into slots, and the round."""
    return lambda m: (Streams(reads=(4,), writes=(4,), times=min(pushes, m)), *mf_ca2fl.traffic(CODEC)(m))


def whole(m: int) -> Traffic:
    return taken_in(m)(m)


def held(d: int, m: int) -> int:
    """M slots, params and the sum, each with its successor, and each row likewise: on disk it is the page cache's."""
    return 4 * d * (m + 2) + 16 * d + 2 * m * CODEC.row_bytes(d)


def beside_memory(lines: list[Line]) -> None:
    """Times of what is on disk over the same in memory."""
    medians = {line["name"]: line["median"] for line in lines}
    for line in lines:
        line["times_memory"] = line["median"] / medians[line["name"].replace("afflux", "in memory", 1)]


LAST = ", the last push"
STORE = Row(
    name="store",
    formula=f"a round of mf_ca2fl, {BITS} bits, through Server(store=PATH): M pushes, and the step of the last of them",
    counted="8 d M + those of mf-ca2fl-affine-4",
    traffic=whole,
    reference=lambda before: {"params": mf_ca2fl.reference(before)["params"]},
    cases=one_case,
    contenders=[
        Contender("afflux", "Server(store=PATH), a commit a round", pushed(disk=True, last=False), held, role="ours"),
        Contender("in memory", "Server", pushed(disk=False, last=False), held, role="ours"),
        Contender(
            f"afflux{LAST}",
            "it makes the step, and the commit",
            pushed(disk=True, last=True),
            held,
            role="ours",
            traffic=taken_in(1),
        ),
        Contender(
            f"in memory{LAST}",
            "it makes the step",
            pushed(disk=False, last=True),
            held,
            role="ours",
            traffic=taken_in(1),
        ),
    ],
    columns=(BY_D, *SPAN, number("x in memory", "times_memory", ".2f"), ERROR, ULP),
    compare=beside_memory,
)


def evict(file: Path) -> None:
    """Only the disk has it from now on, as long as nobody maps it."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fetched(inputs: Inputs) -> Round:
    """Rows that a server has left there; a map keeps its pages, so each time it is closed and opened anew."""
    folder = TemporaryDirectory(prefix="afflux-bench-")
    path = Path(folder.name, "store")
    with new_server(inputs, str(path)) as server:
        for client_id, vector in enumerate(inputs.vectors[0]):
            server.push(client_id, vector, version=0)
    served = [server]

    def prepare(k: int) -> None:
        served.pop().close()
        gc.collect()
        for segment in path.glob("rows/c/*/0"):
            evict(segment)
        served.append(Server.open(path, num_threads=inputs.num_threads))

    def run(k: int) -> None:
        rows = served[0].rows
        assert isinstance(rows, DiskRows)
        for client_id in range(inputs.m):
            rows.fetch(client_id)

    prepare(0)
    weakref.finalize(inputs, folder.cleanup)
    return Round(run, nothing_before, nothing_after, prepare)


def plain_reading(inputs: Inputs) -> Round:
    """As many bytes from one file, from its beginning to its end."""
    folder = TemporaryDirectory(prefix="afflux-bench-")
    path, block = Path(folder.name, "rows"), bytearray(BLOCK)
    path.write_bytes(np.random.default_rng(0).bytes(inputs.m * CODEC.row_bytes(inputs.d)))
    weakref.finalize(inputs, folder.cleanup)

    def run(k: int) -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    evict(path)
    return Round(run, nothing_before, nothing_after, lambda k: evict(path))


def nothing_before(k: int) -> Arrays:
    return {}


def nothing_after(result: object) -> Arrays:
    return {}


def no_outputs(before: Arrays) -> Exact:
    return {}


def only_linux() -> str | None:
    return None if hasattr(os, "posix_fadvise") else "this system cannot be asked to forget a file's pages"


def beside_reading(lines: list[Line]) -> None:
    """Times of plain reading."""
    for line in lines:
        line["times_reading"] = line["median"] / lines[-1]["median"]


COLD = Row(
    name="store-cold",
    formula=f"M rows of {BITS} bits fetched from a store whose pages the system was told to forget, and checked",
    counted="M encoded rows",
    traffic=lambda m: (Streams(reads=(mf_ca2fl.row_bytes(CODEC),) * m),),
    reference=no_outputs,
    cases=one_case,
    contenders=[
        Contender("afflux", "fetch, as a push does", fetched, role="ours", absent=only_linux),
        Contender(
            "plain reading",
            "read() of 1 MiB, again and again, of one file",
            plain_reading,
            role="plain",
            but="checks nothing",
            absent=only_linux,
        ),
    ],
    columns=(BY_D, ROLE, *SPAN, number("GB/s", "gbps", ".2f"), number("x reading", "times_reading", ".2f")),
    compare=beside_reading,
)
