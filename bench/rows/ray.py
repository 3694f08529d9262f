"""Rounds and pushes of a server whose vectors are in two shards on Ray, of one thread each, and in one process of two.

One sample is one push, or the round of M arrivals, which `Server.flush` makes. Slices of d elements cross to the shards
with a push; a round sends no vector.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from afflux import Server
from afflux.rules.presets.fedbuff import fedbuff
from bench.rows.fedbuff import FEDBUFF
from bench.spec.columns import BY_D, ERROR, SPAN, TIMES_OURS, Line, number
from bench.spec.contender import Contender, Round
from bench.spec.inputs import LR, Case, Inputs
from bench.spec.row import Asked, Row, one_case
from bench.spec.streams import Streams

SHARDS, THREADS, M = 2, 2, 4


def cases(asked: Asked) -> list[Case]:
    return [Case(each.d, each.m, THREADS, sets=each.sets) for each in one_case(asked, m=M)]


def server_of(inputs: Inputs, on_ray: bool) -> Server:
    """Return a server whose rounds `flush` makes."""
    options: dict[str, Any] = {"rounds": "flush"}
    if on_ray:
        from afflux.distributed import RayPlane

        options["plane"] = RayPlane(SHARDS)
    threads = THREADS // SHARDS if on_ray else THREADS
    rule = fedbuff(buffer_size=inputs.m, server_lr=LR)
    return Server(rule, inputs.params[0], num_threads=threads, push_threads=threads, **options)


def a_round(on_ray: bool) -> Callable[[Inputs], Round]:
    def make(inputs: Inputs) -> Round:
        server = server_of(inputs, on_ray)

        def prepare(k: int) -> None:
            for client, vector in enumerate(inputs.vectors[k]):
                server.push(client=client, version=server.version, update=vector)

        def before(k: int) -> dict[str, Any]:
            prepare(k)
            return inputs.read(k, inputs.equal_weights) | {"params": server.params}

        return Round(lambda k: server.flush(), before, lambda report: {"params": server.params}, prepare)

    return make


def a_push(on_ray: bool) -> Callable[[Inputs], Round]:
    def make(inputs: Inputs) -> Round:
        server = server_of(inputs, on_ray)
        return Round(
            lambda k: server.push(client=0, version=0, update=inputs.vectors[k][0]), prepare=lambda k: server.discard()
        )

    return make


def requirement() -> str | None:
    """Return the reason why Ray cannot run; it is not imported, because afflux sets its environment before that."""
    return None if find_spec("ray") else "ModuleNotFoundError: No module named 'ray'"


def slices(lines: list[Line], each: int) -> None:
    """Add the bytes of vectors that go to other processes, `each` for an element."""
    for line in lines:
        line["crossing"] = each * line["d"] if line["name"] == "Ray" else 0


def pair(call: str, make: Callable[[bool], Callable[[Inputs], Round]]) -> list[Contender]:
    return [
        Contender("one process", call, make(False), kept=M + 2, role="ours"),
        Contender("Ray", f"{call}, plane=RayPlane({SHARDS})", make(True), kept=M + 3, requirement=requirement),
    ]


COLUMNS = (BY_D, *SPAN, TIMES_OURS, number("MB to other processes", "crossing", ".1f", 1e-6))
RAY = [
    replace(
        FEDBUFF,
        name="ray-round",
        formula="fedbuff on Ray: the round of two shards with a thread each, beside one process with two",
        cases=cases,
        contenders=pair("Server.flush of M arrivals", a_round),
        columns=(*COLUMNS, ERROR),
        compare=lambda lines: slices(lines, 0),
    ),
    Row(
        name="ray-push",
        formula="a push to two shards with a thread each on Ray, beside one process with two",
        counted="8 d: a vector read, a slot written",
        traffic=lambda m: (Streams(reads=(4,), writes=(4,)),),
        cases=cases,
        contenders=pair("Server.push", a_push),
        columns=COLUMNS,
        compare=lambda lines: slices(lines, 4),
    ),
]
