"""A whole round of `Server.push`, vector by vector, which join a buffer of M or are added to a sum as they arrive.

The server copies and checks every vector; the baselines only add.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from afflux import Server
from afflux.rules.presets.fedbuff import fedbuff
from bench.rows.fedbuff import FEDBUFF
from bench.spec.arrays import HOST
from bench.spec.columns import BY_D, ERROR, ROLE, SPEED, TIMES_OURS, ULP, UPDATE, Line, number
from bench.spec.contender import Contender, Round, best, ours
from bench.spec.inputs import LR, Case, Float32, Inputs
from bench.spec.optional_torch import torch
from bench.spec.row import Asked, one_case

SMALL = 100_000  #: a d at which fixed costs are visible
PUSHERS, SLOTS = 4, 6  #: threads and slots of the contender with several threads


def cases(asked: Asked) -> list[Case]:
    return [*(one_case(asked, SMALL, SMALL) if asked.d is None else []), *one_case(asked)]


def a_round(*, at_once: bool = False, pushers: int = 1, **options: Any) -> Callable[[Inputs], Round]:
    """Return a contender that pushes M new vectors to a server with these options; the last one makes the step.

    Args:
        at_once: whether one `Server.step` takes all vectors, in place of pushes.
        pushers: the number of threads that push.
        options: of `Server`.
    """

    def make(inputs: Inputs) -> Round:
        rule = fedbuff(buffer_size=inputs.m, server_lr=LR)
        threads = inputs.num_threads
        server = Server(rule, inputs.params[0], num_threads=threads, push_threads=threads, **options)
        each = ThreadPoolExecutor(pushers).map if pushers > 1 else map

        def run(k: int) -> object:
            version = server.version

            def push(client_id: int, vector: Float32) -> None:
                server.push(client=client_id, update=vector, version=version)

            if at_once:
                server.step([(client_id, version, vector) for client_id, vector in enumerate(inputs.vectors[k])])
            else:
                list(each(push, range(inputs.m), inputs.vectors[k]))
            return server.params

        return Round(
            run,
            lambda k: inputs.read(k, inputs.equal_weights) | {"params": server.params},
            lambda params: {"params": np.asarray(params)},
        )

    return make


def added(view: Callable[[Float32], Any], add: Callable[[Any, Any, float], object]) -> Callable[[Inputs], Round]:
    """Return a contender that adds each vector to a float32 sum, and the sum to params."""

    def make(inputs: Inputs) -> Round:
        total, out = view(HOST.filled(inputs.d, 0)), view(inputs.out)
        sources = [[view(vector) for vector in vectors] for vectors in inputs.vectors]
        params = [view(p) for p in inputs.params]

        def run(k: int) -> object:
            total[:] = 0
            for vector in sources[k]:
                add(total, vector, 1 / inputs.m)
            out[:] = params[k]
            add(out, total, LR)
            return inputs.out

        return Round(run, lambda k: inputs.read(k, inputs.equal_weights), lambda params: {"params": np.asarray(params)})

    return make


def numpy_add(total: Float32, vector: Float32, weight: float) -> None:
    total += np.float32(weight) * vector


def torch_add(total: Any, vector: Any, weight: float) -> object:
    return total.add_(vector, alpha=weight)


# What a contender holds beside params, in float32 vectors: always the next version, and a sum of float64 or float32


def buffered(m: int) -> int:
    """Return M slots and the next version."""
    return m + 1


#: SLOTS slots, the sum and the next version
OF_PUSHERS = SLOTS + 3


CONTENDERS = [
    ours("afflux", "Server(accumulate=True).push, M times", a_round(accumulate=True), 4),
    ours(
        f"afflux, {PUSHERS} pushers",
        f"Server(accumulate=True, max_slots={SLOTS}).push from {PUSHERS} threads: terms that wait share a sweep",
        a_round(accumulate=True, max_slots=SLOTS, pushers=PUSHERS),
        OF_PUSHERS,
    ),
    ours("afflux, buffered", "Server.push, M times", a_round(), buffered),
    ours("afflux, step", "Server.step of M vectors, read in place", a_round(at_once=True), 1),
    Contender(
        "numpy +=",
        "total += w * u, no copy and no check",
        added(np.asarray, numpy_add),
        2,
        temporary=1,
        caveat="checks nothing, float32 sums",
        role="plain",
    ),
    best(
        "torch add_",
        "total.add_(u, alpha=w), no copy and no check",
        added(lambda array: torch.from_numpy(array), torch_add),
        2,
        caveat="checks nothing, float32 sums",
    ),
]


def an_update(lines: list[Line]) -> None:
    """Add the server's bytes between updates."""
    held = {contender.name: contender.kept_bytes for contender in CONTENDERS}
    for line in lines:
        line["held"] = held[line["name"]](line["d"], line["m"])


STREAMING = replace(
    FEDBUFF,
    name="streaming",
    formula="M pushes, one by one, and their step: out = params + lr sum_i u_i / M",
    counted="4 d (M + 2), as fedbuff",
    cases=cases,
    contenders=CONTENDERS,
    columns=(BY_D, ROLE, *UPDATE, number("MB held", "held", ".1f", 1e-6), *SPEED, TIMES_OURS, ERROR, ULP),
    compare=an_update,
)
