"""The operations: their bytes by definition, their float64 references, and afflux's own entry.

A new operation is one more `Row` in ROWS; a new baseline or peer is one more `Contender` in a row.
"""

from collections.abc import Callable

import numpy as np

from afflux import ops
from afflux.bench import baselines
from afflux.bench.columns import TIME, TIMES_PLAIN, ULP, Line, number
from afflux.bench.contender import Arrays, Contender, Round
from afflux.bench.fadas import FADAS
from afflux.bench.inputs import LR, Case, Float32, Inputs
from afflux.bench.peers import rows as peers
from afflux.bench.push import PUSH
from afflux.bench.row import QUICK_D, Asked, D, Exact, Row, one_case
from afflux.bench.wkafl import WKAFL

# FedBuff: params + lr * weighted mean


def fedbuff_bytes(d: int, m: int) -> int:
    return 4 * d * (m + 2)


def fedbuff_reference(before: Arrays) -> Exact:
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


def fedbuff_afflux(layout: Callable[[Inputs], list[list[Float32]]] = as_vectors) -> Callable[[Inputs], Round]:
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
        Case(asked.d or min(longest, max(shortest, all_of_them // m)), m, asked.threads, separate=True)
        for m in ([asked.m] if asked.m else [1, 10, 100, 1000])
    ]


def beside_m10(lines: list[Line]) -> None:
    """Everyone's share of the limit over its own share at M = 10, if that was timed."""
    shares = {line["name"]: line["percent_of_limit"] for line in lines if line["m"] == 10}
    for line in lines:
        share = shares.get(line["name"])
        line["times_m10"] = line["percent_of_limit"] / share if share else None


# CA2FL: the cached difference, with float32 rows that are replaced in place


def ca2fl_bytes(d: int, m: int) -> int:
    return 4 * d * (3 * m + 2) + 16 * d


def ca2fl_reference(before: Arrays) -> Exact:
    params, h = before["params"].astype(np.float64), before["h"].astype(np.float64)
    step, size = LR * h, np.abs(params) + np.abs(LR * h)
    new_h, h_size = h.copy(), np.abs(h)
    num_clients = int(before["num_clients"])
    for weight, update, row in zip(before["weights"], before["updates"], before["rows"], strict=True):
        new, old = update.astype(np.float64), row.astype(np.float64)
        magnitude = np.abs(new) + np.abs(old)
        step += LR * weight * (new - old)
        size += LR * weight * magnitude
        new_h += (new - old) / num_clients
        h_size += magnitude / num_clients
    rows = before["updates"].astype(np.float64)
    return {"params": (params + step, size), "h": (new_h, h_size), "rows": (rows, np.abs(rows))}


def ca2fl_afflux(inputs: Inputs) -> Round:
    rows = inputs.last_rows()
    total = rows.sum(axis=0, dtype=np.float64)
    passes = [
        ops.Pass(
            params,
            inputs.out,
            ops.Combine(list(updates), inputs.equal_weights),
            ops.CachedDifference(total, inputs.num_clients, list(rows), list(rows)),
            ops.Sgd(LR),
        )
        for params, updates in zip(inputs.params, inputs.updates, strict=True)
    ]

    def run(k: int) -> object:
        ops.apply(passes[k], num_threads=inputs.num_threads)
        return inputs.out

    def before(k: int) -> Arrays:
        return {
            "params": inputs.params[k],
            "updates": inputs.updates[k],
            "weights": inputs.equal_weights,
            "rows": rows,
            "h": total / inputs.num_clients,
            "num_clients": np.array(inputs.num_clients),
        }

    def after(_: object) -> Arrays:
        return {"params": inputs.out, "h": total / inputs.num_clients, "rows": rows}

    return Round(run, before, after)


ROWS = [
    Row(
        name="fedbuff",
        formula="out = params + lr sum_i w_i u_i",
        counted="4 d (M + 2): M updates and params read, out written",
        bytes=fedbuff_bytes,
        reference=fedbuff_reference,
        cases=one_case,
        contenders=[
            Contender("afflux", "ops.apply, weighted", fedbuff_afflux()),
            *baselines.FEDBUFF,
        ],
    ),
    Row(
        name="ca2fl",
        formula="v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = u_i",
        counted="4 d (3 M + 2) + 16 d: M updates and M rows read, M rows written, params read, "
        "out written, the float64 sum read and written",
        bytes=ca2fl_bytes,
        reference=ca2fl_reference,
        cases=one_case,
        contenders=[
            Contender(
                "afflux",
                "ops.apply, rows in place, float64 sum",
                ca2fl_afflux,
                kept=lambda d, m: 4 * d * m + 8 * d,
            ),
            *baselines.CA2FL,
        ],
    ),
    FADAS,
    WKAFL,
    Row(
        name="rounds",
        formula="fedbuff from M = 1 to 1000: out = params + lr sum_i w_i u_i",
        counted="4 d (M + 2), as fedbuff",
        bytes=fedbuff_bytes,
        reference=fedbuff_reference,
        cases=from_one_to_many,
        contenders=[
            Contender("afflux", "ops.apply, M separate updates", fedbuff_afflux()),
            Contender("afflux, one block", "ops.apply, updates side by side", fedbuff_afflux(as_rows)),
            *baselines.ROUNDS,
        ],
        columns=(
            number("M", "m", "_d"),
            number("d", "d", "_d"),
            *TIME,
            number("vs M = 10", "times_m10", ".2f"),
            TIMES_PLAIN,
            ULP,
        ),
        compare=beside_m10,
    ),
    PUSH,
    *peers.ROWS,
]
