"""FedBuff: params plus the weighted mean of the updates; at one size, from M = 1 to 1000, and in the caches."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from operator import attrgetter
from typing import Any

import numpy as np

from afflux import ops
from bench.measure import machine
from bench.rows.passes import applied
from bench.rows.references import oracle
from bench.spec.arrays import Conversion, as_tensor
from bench.spec.columns import BY_D, BY_M, ERROR, ROLE, TIME, TIMES_OURS, ULP, Column, Line, number
from bench.spec.contender import Arrays, Round, best, compiled, extra, ours, plain
from bench.spec.inputs import LR, Case, Float32, Inputs
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import QUICK_D, Asked, D, Exact, Row
from bench.spec.streams import Streams, Traffic, moved


def traffic(m: int) -> Traffic:
    return (Streams(reads=(4,) * (m + 1), writes=(4,)),)


def reference(before: Arrays) -> Exact:
    step = oracle.combine(before["params"], before["updates"], LR * before["weights"], params_weight=1.0)
    return {"params": step}


def as_rows(inputs: Inputs) -> list[list[Float32]]:
    return [list(block) for block in inputs.updates]


def afflux_round(layout: Callable[[Inputs], list[list[Float32]]] = attrgetter("vectors")) -> Callable[[Inputs], Round]:
    """Return a contender on the M updates of each input set, in the memory that `layout` picks."""
    return lambda inputs: applied(inputs, inputs.weights, updates=layout(inputs), step=ops.Step("sgd", LR))


# torch: formulas on prebuilt tensors over the memory that afflux gets


def stack_mean(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    return params + LR * torch.stack(updates).mean(0)


def stack_weighted(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    return params + LR * (weights[:, None] * torch.stack(updates)).sum(0)


def one_expression(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    """Compute the round as one expression, which the compiler fuses into one sweep."""
    return params + LR * sum(w * u for w, u in zip(weights, updates, strict=True))


def functional(formula: Formula, *, weighted: bool, compiles: bool = False, convert: Conversion = as_tensor) -> Any:
    """Return a contender that returns new params and keeps no state."""

    def make(inputs: Inputs) -> Round:
        weights, place = inputs.weights if weighted else inputs.equal_weights, inputs.place
        call = torch.compile(formula, dynamic=False) if compiles else formula
        params = [convert(place, p) for p in inputs.params]
        updates = [[convert(place, v) for v in vectors] for vectors in inputs.vectors]
        own_weights = convert(place, weights.astype(np.float32))

        def run(k: int) -> object:
            return call(params[k], updates[k], own_weights)

        return Round(run, lambda k: inputs.read(k, weights), lambda result: {"params": result})

    return make


def add_loop(params: Tensor, updates: Tensor, weights: Tensor) -> None:
    for weight, update in zip(weights.tolist(), updates, strict=True):
        params.add_(update, alpha=weight)


def addmv(params: Tensor, updates: Tensor, weights: Tensor) -> None:
    """Compute the round by one matrix-vector product on the contiguous buffer."""
    params.addmv_(updates.T, weights)


def in_place(formula: Formula, *, halves: bool = False) -> Any:
    """Return a contender that overwrites its own params, on one matrix (M, d) of float32, or of bfloat16.

    It moves no more bytes than a contender with a separate out.
    """

    def make(inputs: Inputs) -> Round:
        place = inputs.place
        own = place.copied(inputs.params[0])
        params = place.tensor(own)
        updates = [place.tensor(u).bfloat16() if halves else place.tensor(u) for u in inputs.updates]
        weights = place.tensor(LR * inputs.weights).float()

        def before(k: int) -> Arrays:
            rounded = {"updates": updates[k].view(torch.uint16).numpy()} if halves else {}
            return inputs.read(k, inputs.weights) | {"params": own} | rounded

        def after(result: Any) -> Arrays:
            return {"params": own if result is None else result}

        return Round(lambda k: formula(params, updates[k], weights), before, after)

    return make


STACK_MEAN = plain(
    "torch stack().mean",
    "params + lr * torch.stack(updates).mean(0)",
    functional(stack_mean, weighted=False),
    temporary=lambda m: m + 2,
)
ADDMV = best(
    "torch addmv_",
    "params.addmv_(U.T, lr * w), contiguous U",
    in_place(addmv),
    1,
    caveat="needs one contiguous matrix; float32 sums; overwrites params",
)


IN_TORCH = [
    STACK_MEAN,
    extra(
        "torch stack, weighted",
        "params + lr * (w[:, None] * torch.stack(updates)).sum(0)",
        functional(stack_weighted, weighted=True),
        temporary=lambda m: 2 * m + 2,
    ),
    extra("torch add_ loop", "params.add_(u, alpha=lr * w) for each u", in_place(add_loop), 1),
    ADDMV,
    compiled("the weighted sum, compiled", functional(one_expression, weighted=True, compiles=True), temporary=1),
]


#: The contenders of rows with many sizes: the papers' formula, and the fastest code.
FEW_IN_TORCH = [STACK_MEAN, ADDMV]


# The same from M = 1 to 1000, on updates in separate arrays, as clients send them


def from_one_to_many(asked: Asked) -> list[Case]:
    """Return one case for each M, each with about as many bytes, which are far more than the caches hold."""
    longest, shortest, all_of_them = (QUICK_D, 2_000, 2_000_000) if asked.quick else (D, 500_000, 250_000_000)
    return [
        Case(asked.d or min(longest, max(shortest, all_of_them // m)), m, asked.threads, separate=True, sets=asked.sets)
        for m in ([asked.m] if asked.m else [1, 10, 100, 1000])
    ]


def beside_m10(lines: list[Line]) -> None:
    """Add each contender's share of the limit divided by its share at M = 10, if M = 10 was timed."""
    shares = {line["name"]: line["percent_of_limit"] for line in lines if line["m"] == 10}
    for line in lines:
        share = shares.get(line["name"])
        line["times_m10"] = line["percent_of_limit"] / share if share else None


# Vectors that fit into a core's own cache, and into half of the shared cache

L2, L3 = 2**20, 2**25  #: bytes, if the system does not report them
WARM_BYTES, QUICK_BYTES = 100_000_000, 5_000_000  #: the bytes that all laps of a sample move together


def in_caches(asked: Asked) -> list[Case]:
    """Return cases whose laps use one input set, which stays in the cache: 2/3 of L2, which also holds other data."""
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
    contenders=[ours("afflux", "ops.apply, weighted", afflux_round()), *IN_TORCH],
)

ROUNDS = replace(
    FEDBUFF,
    name="rounds",
    formula="fedbuff from M = 1 to 1000: out = params + lr sum_i w_i u_i",
    counted="4 d (M + 2), as fedbuff",
    cases=from_one_to_many,
    contenders=[
        ours("afflux", "ops.apply, M separate updates", afflux_round()),
        ours("afflux, one block", "ops.apply, updates side by side", afflux_round(as_rows)),
        *FEW_IN_TORCH,
    ],
    columns=(BY_M, BY_D, ROLE, *TIME, number("vs M = 10", "times_m10", ".2f"), TIMES_OURS, ULP),
    compare=beside_m10,
)

CACHED = replace(
    FEDBUFF,
    name="cached",
    formula="fedbuff in the caches: out = params + lr sum_i w_i u_i",
    counted="4 d (M + 2), as fedbuff",
    cases=in_caches,
    columns=(BY_D, Column("in", lambda line: line["lies_in"]), ROLE, *TIME, TIMES_OURS, ERROR, ULP),
    compare=lies_in,
)
