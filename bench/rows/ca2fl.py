"""CA2FL: the cached difference, with float32 rows that are replaced in place."""

from typing import Any

import numpy as np

from afflux import ops
from bench.rows.passes import applied
from bench.rows.references import weighted_sum
from bench.spec.arrays import Conversion, Vector, as_tensor
from bench.spec.contender import Arrays, Contender, Round, best, extra, ours, plain
from bench.spec.inputs import LR, Inputs
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import Exact, Row, one_case
from bench.spec.streams import Streams, Traffic


def traffic(m: int) -> Traffic:
    """Return the streams: updates and params are read, `out` is written, the rows and the float64 sum are replaced."""
    return (Streams(reads=(4,) * (m + 1), writes=(4,), in_place=(*(4,) * m, 8)),)


def reference(before: Arrays) -> Exact:
    """Compute the round in float64: the direction uses the old rows; then the updates, encoded or not, replace them."""
    params, h = before["params"].astype(np.float64), before["h"].astype(np.float64)
    updates, rows, weights = before["updates"], before["rows"], before["weights"]
    step, size = weighted_sum(LR * weights, updates, rows)
    change, change_size = weighted_sum(np.full(len(updates), 1 / before["num_clients"]), updates, rows)
    new_rows = updates.astype(np.float64)
    return {
        "params": (params + LR * h + step, np.abs(params) + np.abs(LR * h) + size),
        "h": (h + change, np.abs(h) + change_size),
        "rows": (new_rows, np.abs(new_rows)),
    }


def sum_of(inputs: Inputs, rows: Vector) -> Vector:
    """Return the sum of all rows, in float64."""
    total = inputs.place.filled(inputs.d, 0, np.float64)
    for row in rows:
        total += row
    return total


def first_read(inputs: Inputs, k: int) -> Arrays:
    """Return the inputs of a server's first round, before any client has a row."""
    rows, h, num_clients = np.zeros_like(inputs.updates[k]), np.zeros(inputs.d), np.array(inputs.num_clients)
    return inputs.read(k, inputs.equal_weights, rows=rows, h=h, num_clients=num_clients) | {"params": inputs.params[0]}


def afflux_round(inputs: Inputs) -> Round:
    rows = inputs.last_rows()
    total = sum_of(inputs, rows)
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

    def cache() -> Arrays:
        return {"h": total / inputs.num_clients, "rows": rows}

    def before(k: int) -> Arrays:
        return inputs.read(k, inputs.equal_weights, num_clients=np.array(inputs.num_clients), **cache())

    return applied(inputs, passes, before, cache)


# CA2FL. h is the float32 mean of the rows, as in the authors' code.


def difference_stack(params: Tensor, updates: Tensor, rows: Tensor, h: Tensor, num_clients: int) -> Tensor:
    difference = torch.stack(list(updates)) - torch.stack(list(rows))
    new_params = params + LR * (h + difference.mean(0))
    h += difference.sum(0) / num_clients
    for row, update in zip(rows, updates, strict=True):
        row.copy_(update)
    return new_params


def difference_loop(params: Tensor, updates: Tensor, rows: Tensor, h: Tensor, num_clients: int) -> Tensor:
    total = torch.zeros_like(params)
    for row, update in zip(rows, updates, strict=True):
        total += update - row
        row.copy_(update)
    new_params = params + LR * (h + total / len(updates))
    h += total / num_clients
    return new_params


def difference_sum(params: Tensor, updates: Tensor, rows: Tensor, h: Tensor, num_clients: int) -> Tensor:
    """Compute the sum of differences as one expression, for the compiler and any library."""
    total = sum(update - row for update, row in zip(updates, rows, strict=True))
    new_params = params + LR * (h + total / len(updates))
    h += total / num_clients
    for row, update in zip(rows, updates, strict=True):
        row[...] = update
    return new_params


def difference_best(inputs: Inputs) -> Formula:
    """Return the formula with matrix-vector products on contiguous buffers, which allocates nothing."""
    out = inputs.place.tensor(inputs.out)
    total, plus = torch.empty_like(out), out.new_ones(inputs.m)
    minus = -plus

    def formula(params: Tensor, updates: Tensor, rows: Tensor, h: Tensor, num_clients: int) -> Tensor:
        torch.mv(updates.T, plus, out=total)
        total.addmv_(rows.T, minus)
        torch.add(params, h, alpha=LR, out=out)
        out.add_(total, alpha=LR / len(updates))
        h.add_(total, alpha=1 / num_clients)
        rows.copy_(updates)
        return out

    return formula


def cached(formula: Formula | None = None, *, compiled: bool = False, convert: Conversion = as_tensor) -> Any:
    """Return a contender with its own rows and h; without a formula, it uses difference_best."""

    def make(inputs: Inputs) -> Round:
        place, rows, h = inputs.place, inputs.last_rows(), inputs.place.empty(inputs.d)
        h[...] = sum_of(inputs, rows) / inputs.num_clients
        call = formula or difference_best(inputs)
        if compiled:
            call = torch.compile(call, dynamic=False)
        params = [convert(place, p) for p in inputs.params]
        updates = [convert(place, u) for u in inputs.updates]
        own_rows, own_h = convert(place, rows), convert(place, h)

        def run(k: int) -> object:
            return call(params[k], updates[k], own_rows, own_h, inputs.num_clients)

        def before(k: int) -> Arrays:
            return inputs.read(k, inputs.equal_weights, rows=rows, h=h, num_clients=np.array(inputs.num_clients))

        def after(result: Any) -> Arrays:
            return {"params": result, "h": h, "rows": rows}

        return Round(run, before, after)

    return make


def in_torch() -> list[Contender]:

    def own(m: int) -> int:
        return m + 1

    return [
        extra(
            "torch stack",
            "h + (stack(u) - stack(rows)).mean(0), eager; float32 h",
            cached(difference_stack),
            own,
            lambda m: 3 * m + 2,
        ),
        plain("torch loop", "total += u - row for each client, eager; float32 h", cached(difference_loop), own, 4),
        best(
            "torch mv, addmv_",
            "contiguous buffers, nothing allocated; float32 h",
            cached(),
            lambda m: m + 2,
            caveat="needs contiguous matrices; float32 sums",
        ),
        best(
            "torch.compile",
            "the formula, compiled; float32 h",
            cached(difference_sum, compiled=True),
            own,
            2,
            caveat="float32 sums; compiles for each M",
            compiles=True,
        ),
    ]


CA2FL = Row(
    name="ca2fl",
    formula="v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = u_i",
    counted="4 d (3 M + 2) + 16 d: M updates and M rows read, M rows written, params read, "
    "out written, the float64 sum read and written",
    traffic=traffic,
    reference=reference,
    cases=one_case,
    contenders=[ours("afflux", "ops.apply, rows in place, float64 sum", afflux_round, lambda m: m + 2), *in_torch()],
)
