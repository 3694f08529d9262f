"""FedBuff: params and the weighted mean of the updates; at one size, from M = 1 to 1000, and in the caches."""

from collections.abc import Callable
from math import ceil

import numpy as np

from afflux import ops
from afflux.bench.measure import machine
from afflux.bench.rows import torch_contenders
from afflux.bench.spec.columns import BY_D, BY_M, ERROR, ROLE, TIME, TIMES_OURS, ULP, Column, Line, number
from afflux.bench.spec.contender import Arrays, Contender, Round
from afflux.bench.spec.inputs import LR, Case, Float32, Inputs
from afflux.bench.spec.row import QUICK_D, Asked, D, Exact, Row, one_case
from afflux.bench.spec.streams import Streams, Traffic, moved


def traffic(m: int) -> Traffic:
    return (Streams(reads=(4,) * (m + 1), writes=(4,)),)


def reference(before: Arrays) -> Exact:
    """One update at a time, so that the temporaries stay small."""
    params = before["params"].astype(np.float64)
    step, size = np.zeros_like(params), np.abs(params)
    for weight, update in zip(before["weights"], before["updates"], strict=True):
        term = LR * weight * update.astype(np.float64)
        step += term
        size += np.abs(term)
    return {"params": (params + step, size)}


def as_vectors(inputs: Inputs) -> list[list[Float32]]:
    return inputs.vectors


def as_rows(inputs: Inputs) -> list[list[Float32]]:
    return [list(block) for block in inputs.updates]


def afflux_round(layout: Callable[[Inputs], list[list[Float32]]] = as_vectors) -> Callable[[Inputs], Round]:
    """A contender on the M updates of each input set, in the memory that `layout` picks."""

    def make(inputs: Inputs) -> Round:
        passes = [
            ops.Pass(params, inputs.out, ops.Combine(updates, inputs.weights), step=ops.Sgd(LR))
            for params, updates in zip(inputs.params, layout(inputs), strict=True)
        ]

        def run(k: int) -> object:
            ops.apply(passes[k], num_threads=inputs.num_threads)
            return inputs.out

        def before(k: int) -> Arrays:
            return {
                "params": inputs.params[k],
                "updates": inputs.updates[k],
                "weights": inputs.weights,
            }

        return Round(run, before, lambda _: {"params": inputs.out})

    return make


# The same from M = 1 to 1000, on updates that lie apart as they do when clients hand them in


def from_one_to_many(asked: Asked) -> list[Case]:
    """As many bytes at each M as memory and long enough vectors allow, and far more than the caches hold."""
    longest, shortest, all_of_them = (QUICK_D, 2_000, 2_000_000) if asked.quick else (D, 500_000, 250_000_000)
    return [
        Case(asked.d or min(longest, max(shortest, all_of_them // m)), m, asked.threads, separate=True, sets=asked.sets)
        for m in ([asked.m] if asked.m else [1, 10, 100, 1000])
    ]


def beside_m10(lines: list[Line]) -> None:
    """Everyone's share of the limit over its own share at M = 10, if that was timed."""
    shares = {line["name"]: line["percent_of_limit"] for line in lines if line["m"] == 10}
    for line in lines:
        share = shares.get(line["name"])
        line["times_m10"] = line["percent_of_limit"] / share if share else None


# What fits into a core's own cache, and into half of the one that they share

L2, L3 = 2**20, 2**25  #: where the system does not tell
WARM_BYTES, QUICK_BYTES = 100_000_000, 5_000_000  #: that a sample moves, all laps together


def in_caches(asked: Asked) -> list[Case]:
    """Laps on one input set, which stays in the cache. 2/3 of L2, because it is not empty otherwise."""
    caches, m = machine.cache_bytes(), asked.m or 10
    amounts = caches.get("L2", L2) * 2 // 3, caches.get("L3", L3) // 2
    lengths = [asked.d] if asked.d else [amount // moved(traffic(m), 1) for amount in amounts]
    amount = QUICK_BYTES if asked.quick else WARM_BYTES
    return [
        Case(d, m, asked.threads, sets=asked.sets, laps=ceil(amount / moved(traffic(m), d)), warm=True) for d in lengths
    ]


def lies_in(lines: list[Line]) -> None:
    for line in lines:
        line["lies_in"] = machine.holds(line["bytes"])


FEDBUFF = Row(
    name="fedbuff",
    formula="out = params + lr sum_i w_i u_i",
    counted="4 d (M + 2): M updates and params read, out written",
    traffic=traffic,
    reference=reference,
    cases=one_case,
    contenders=[
        Contender("afflux", "ops.apply, weighted", afflux_round(), role="ours"),
        *torch_contenders.FEDBUFF,
    ],
)

ROUNDS = Row(
    name="rounds",
    formula="fedbuff from M = 1 to 1000: out = params + lr sum_i w_i u_i",
    counted="4 d (M + 2), as fedbuff",
    traffic=traffic,
    reference=reference,
    cases=from_one_to_many,
    contenders=[
        Contender("afflux", "ops.apply, M separate updates", afflux_round(), role="ours"),
        Contender("afflux, one block", "ops.apply, updates side by side", afflux_round(as_rows), role="ours"),
        *torch_contenders.ROUNDS,
    ],
    columns=(
        BY_M,
        BY_D,
        ROLE,
        *TIME,
        number("vs M = 10", "times_m10", ".2f"),
        TIMES_OURS,
        ULP,
    ),
    compare=beside_m10,
)

CACHED = Row(
    name="cached",
    formula="fedbuff in the caches: out = params + lr sum_i w_i u_i",
    counted="4 d (M + 2), as fedbuff",
    traffic=traffic,
    reference=reference,
    cases=in_caches,
    contenders=FEDBUFF.contenders,
    columns=(BY_D, Column("in", lambda line: line["lies_in"]), ROLE, *TIME, TIMES_OURS, ERROR, ULP),
    compare=lies_in,
)
