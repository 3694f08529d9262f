"""FedBuff on updates in bfloat16, as `Server(slot_dtype="bfloat16")` keeps them."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux import _engine, ops
from bench.measure.timing import CHECKED
from bench.rows import fedbuff
from bench.rows.passes import applied
from bench.spec.columns import ERROR, ROLE, TIME, TIMES_OURS, ULP, Line, number
from bench.spec.contender import Arrays, Round, best, ends, ours, plain
from bench.spec.inputs import LR, Float32, Inputs
from bench.spec.optional_torch import Tensor, torch
from bench.spec.row import Exact
from bench.spec.streams import Streams, Traffic

Bits = npt.NDArray[np.uint16]  # NumPy has no bfloat16


def traffic(m: int) -> Traffic:
    return (Streams(reads=(*(2,) * m, 4), writes=(4,)),)


def decoded(bits: Bits) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def reference(before: Arrays) -> Exact:
    """Compute FedBuff in float64 on the rounded updates."""
    updates = before["updates"]
    return fedbuff.reference(before | {"updates": decoded(updates) if updates.dtype == np.uint16 else updates})


def afflux_round(inputs: Inputs) -> Round:
    pool = _engine.Pool(inputs.d, "bfloat16", len(inputs.updates) * inputs.m)

    def taken(update: Float32) -> _engine.Buffer:
        buffer = _engine.Buffer(pool)
        ops.ingest(update, buffer)
        return buffer

    buffers = [[taken(update) for update in block] for block in inputs.updates]

    def before(k: int) -> Arrays:
        bits = np.array([ends(np.asarray(buffer), CHECKED) for buffer in buffers[k]])
        return inputs.read(k, inputs.weights) | {"updates": bits}

    return applied(inputs, inputs.weights, updates=buffers, before=before, step=ops.Step("sgd", LR))


def stack_mean(params: Tensor, updates: Tensor, weights: Tensor) -> Tensor:
    return fedbuff.stack_mean(params, list(updates), weights)


def mv(params: Tensor, updates: Tensor, weights: Tensor) -> None:
    params.add_(torch.mv(updates.T, weights.bfloat16()))


def copies(m: int) -> int:
    """Return both input sets in bfloat16, and params."""
    return m + 1


IN_BFLOAT16 = "rounds the mean to bfloat16"

CONTENDERS = [
    ours("afflux", "ops.apply on bfloat16 slots", afflux_round, copies),
    ours("afflux, float32", "the same on float32 updates", fedbuff.afflux_round(), traffic=fedbuff.traffic),
    plain(
        "torch stack().mean",
        "params + lr * torch.stack(updates).mean(0)",
        fedbuff.in_place(stack_mean, halves=True),
        copies,
        temporary=lambda m: m / 2 + 2,
        caveat=IN_BFLOAT16,
    ),
    best(
        "torch add_ loop",
        "params.add_(u, alpha=lr * w) for each u",
        fedbuff.in_place(fedbuff.add_loop, halves=True),
        copies,
        caveat="float32 sums; overwrites params",
    ),
    best(
        "torch mv",
        "params.add_(torch.mv(U.T, lr * w)), contiguous U",
        fedbuff.in_place(mv, halves=True),
        copies,
        temporary=0.5,
        caveat=IN_BFLOAT16,
    ),
]


def beside_float32(lines: list[Line]) -> None:
    """Add how many times faster each contender is than afflux's FedBuff on float32 updates."""
    float32: dict[Any, float] = {(line["d"], line["m"]): line["median"] for line in lines if line["part"]}
    for line in lines:
        line["times_float32"] = float32[line["d"], line["m"]] / line["median"]


FEDBUFF_BF16 = replace(
    fedbuff.FEDBUFF,
    name="fedbuff-bf16",
    formula="out = params + lr sum_i w_i u_i, u_i in bfloat16",
    counted="2 d M + 8 d: M updates of 2 bytes an element and params read, out written",
    traffic=traffic,
    reference=reference,
    contenders=CONTENDERS,
    dtype="bfloat16",
    columns=(ROLE, *TIME, TIMES_OURS, number("x float32", "times_float32", ".2f"), ERROR, ULP),
    compare=beside_float32,
)
