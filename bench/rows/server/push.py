"""Copying and checking updates: `Server.push`, a plain copy, and the code of a careful server.

One sample is M pushes, each of a new vector into a new slot. The buffer holds more than M, so no server step is timed.
Between samples a last push, not timed, completes the round.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from afflux import Server, ops
from afflux.arrays.interop import on_host
from afflux.rules.presets.fedbuff import fedbuff
from bench.measure import machine
from bench.rows.gram import slices
from bench.spec.arrays import Conversion, Vector, as_numpy, as_tensor
from bench.spec.columns import BY_D, SPEED, Column, Line, number, relative_error
from bench.spec.contender import REST_OF_OPENBLAS, Arrays, Contender, Round, best, extra, ours
from bench.spec.inputs import Case, Float32, Float64, Inputs
from bench.spec.optional_torch import torch
from bench.spec.row import Asked, Exact, Row
from bench.spec.streams import Streams

FEW, MANY = 64, 4096  #: pushes of a sample that is in the cache, and the most pushes of a sample


def cases(asked: Asked) -> list[Case]:
    """Return one case per d, with one thread.

    M vectors fill 4 last-level caches; M is FEW if this would need more than MANY vectors.
    """

    def pushes(d: int) -> int:
        cold = math.ceil(4 * machine.last_level() / (4 * d))
        return FEW if asked.quick or cold > MANY else cold

    lengths = [asked.d] if asked.d else [10**power for power in range(3, 6 if asked.quick else 9)]
    return [Case(d, asked.m or pushes(d), threads=1, sets=asked.sets) for d in lengths]


def preparation(inputs: Inputs, run: Callable[[int], object], finish: Callable[[int], object]) -> Callable[[int], None]:
    """Return a function that completes the round before a sample.

    Afterwards the caches hold all vectors, or none if the vectors are larger than the last level.
    """
    fits = 2 * inputs.updates[0].nbytes <= machine.last_level()

    def prepare(k: int) -> None:
        finish(k)
        if fits:
            run(k)
            finish(k)
        else:
            inputs.updates[k - 1].max()

    return prepare


def reads(inputs: Inputs) -> Callable[[int], Arrays]:
    return lambda k: {"slots": inputs.updates[k], "norms": norms(inputs.updates[k])}


def norms(vectors: Iterable[Vector]) -> Float64:
    """Return the norms in float64, a piece at a time, of whole vectors, because `check` has only their ends."""
    squares = [
        [float(np.square(on_host(vector[piece]), dtype=np.float64).sum()) for piece in slices(vector.shape[0], 4)]
        for vector in vectors
    ]
    return np.sqrt([math.fsum(s) for s in squares])


def reference(before: Arrays) -> Exact:
    exact = {name: array.astype(np.float64) for name, array in before.items()}
    return {name: (array, np.abs(array)) for name, array in exact.items()}


def server_push(inputs: Inputs) -> Round:
    server = Server(fedbuff(buffer_size=inputs.m + 1), inputs.params[0], num_threads=inputs.num_threads)

    def run(k: int) -> object:
        push, version = server.push, server.version
        return [
            push(client=client_id, version=version, update=vector) for client_id, vector in enumerate(inputs.vectors[k])
        ]

    def finish(k: int) -> Any:
        if server.arrivals_waiting == 0:
            return None
        if server.arrivals_waiting != inputs.m:
            raise RuntimeError("a server step fell into a sample")
        return server.push(client=inputs.m, update=inputs.vectors[k][0], version=server.version).report

    def after(_: object) -> Arrays:
        return {"norms": finish(0).norms[: inputs.m]}

    return Round(run, reads(inputs), after, preparation(inputs, run, finish))


def into_slots(
    push: Callable[[Any, Any], Any], convert: Conversion = as_numpy, *, measured: bool = True
) -> Callable[[Inputs], Round]:
    """Return a contender that calls push(slot, vector) M times, on its own slots.

    With `measured`, push returns the norm.
    """

    def make(inputs: Inputs) -> Round:
        place = inputs.place
        slots = place.filled((inputs.m, inputs.d), 1)
        targets = [convert(place, slot) for slot in slots]
        sources = [[convert(place, vector) for vector in vectors] for vectors in inputs.vectors]

        def run(k: int) -> object:
            return list(map(push, targets, sources[k]))

        def after(result: Any) -> Arrays:
            return {"slots": slots} | ({"norms": np.array(result, np.float64)} if measured else {})

        return Round(run, reads(inputs), after, preparation(inputs, run, lambda k: None))

    return make


def ingest(slot: Float32, vector: Float32, num_threads: int = 1) -> float:
    facts = ops.ingest(vector, slot, num_threads=num_threads)
    if facts.first_nonfinite is not None:
        raise ValueError("not finite")
    return facts.norm


def numpy_careful(slot: Float32, vector: Float32) -> float:
    np.copyto(slot, vector)
    if not np.isfinite(slot).all():
        raise ValueError("not finite")
    return float(np.linalg.norm(slot))


def torch_copy(slot: Any, vector: Any) -> None:
    slot.copy_(vector)


def torch_careful(slot: Any, vector: Any) -> float:
    slot.copy_(vector)
    if not torch.isfinite(slot).all():
        raise ValueError("not finite")
    return float(torch.linalg.vector_norm(slot))


def slots(m: int) -> int:
    """Return the state of a contender, in vectors."""
    return m


ONLY_COPIES = "only copies: no check, no norm"

CONTENDERS = [
    ours("afflux", "Server.push", server_push, lambda m: m + 4),
    ours("afflux ingest", "ops.ingest alone", into_slots(ingest), slots),
    Contender(
        "numpy copyto",
        "np.copyto(slot, u)",
        into_slots(np.copyto, measured=False),
        slots,
        caveat=ONLY_COPIES,
        role="plain",
    ),
    Contender(
        "numpy, careful",
        "copyto, isfinite(slot).all(), linalg.norm(slot)",
        into_slots(numpy_careful),
        slots,
        temporary=0.25,
        rest=REST_OF_OPENBLAS,
    ),
    best("torch copy_", "slot.copy_(u)", into_slots(torch_copy, as_tensor, measured=False), slots, caveat=ONLY_COPIES),
    extra(
        "torch, careful",
        "copy_, isfinite(slot).all(), linalg.vector_norm(slot)",
        into_slots(torch_careful, as_tensor),
        slots,
        temporary=2,
    ),
]


def a_push(lines: list[Line]) -> None:
    """Add the time beyond 1.5 plain copies, and the cache that holds the vectors."""
    for line in lines:
        line["times_copy"] = 1 / line["times_plain"]
        line["us_over"] = line["us"] * (1 - 1.5 * line["times_plain"])
        line["lies_in"] = machine.holds(line["bytes"])


def brief(microseconds: float) -> str:
    return f"{microseconds:.{2 if abs(microseconds) < 100 else 0}f}"


NORM_ERROR = relative_error("norm's error")

PUSH = Row(
    name="push",
    formula="slot = u; all of u finite? |u|; the arrival joins the buffer",
    counted="8 d M: M vectors read, M slots written",
    traffic=lambda m: (Streams(reads=(4,), writes=(4,), times=m),),
    reference=reference,
    cases=cases,
    contenders=CONTENDERS,
    output="norms",
    columns=(
        BY_D,
        Column("in", lambda line: line["lies_in"]),
        Column("us a push", lambda line: brief(line["us"])),
        Column("min .. max", lambda line: " .. ".join(brief(1e6 * line[end] / line["m"]) for end in ("min", "max"))),
        number("x copy", "times_copy", ".2f"),
        Column("- 1.5 copies", lambda line: brief(line["us_over"])),
        *SPEED,
        NORM_ERROR,
    ),
    compare=a_push,
)
