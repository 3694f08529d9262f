"""CA2FL: the cached difference, with float32 rows that are replaced in place."""

import numpy as np

from afflux import ops
from afflux.bench.rows import torch_contenders
from afflux.bench.spec.contender import Arrays, Contender, Round
from afflux.bench.spec.inputs import LR, Inputs
from afflux.bench.spec.row import Exact, Row, one_case
from afflux.bench.spec.streams import Streams, Traffic


def traffic(m: int) -> Traffic:
    """Updates and params; out; the rows, and the float64 sum."""
    return (Streams(reads=(4,) * (m + 1), writes=(4,), in_place=(*(4,) * m, 8)),)


def reference(before: Arrays) -> Exact:
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


def afflux_round(inputs: Inputs) -> Round:
    rows = inputs.last_rows()
    total = torch_contenders.summed(inputs, rows)
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


CA2FL = Row(
    name="ca2fl",
    formula="v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = u_i",
    counted="4 d (3 M + 2) + 16 d: M updates and M rows read, M rows written, params read, "
    "out written, the float64 sum read and written",
    traffic=traffic,
    reference=reference,
    cases=one_case,
    contenders=[
        Contender(
            "afflux",
            "ops.apply, rows in place, float64 sum",
            afflux_round,
            kept=lambda d, m: 4 * d * m + 8 * d,
            role="ours",
        ),
        *torch_contenders.CA2FL,
    ],
)
