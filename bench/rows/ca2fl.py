"""CA2FL: the cached difference, with rows, encoded or not, that are replaced in place."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from afflux import ops
from afflux.ops import codecs
from afflux.ops.codecs import Codec
from bench.measure.timing import CHECKED
from bench.rows.passes import applied
from bench.rows.references import weighted_sum
from bench.spec.arrays import Conversion, as_tensor
from bench.spec.contender import Arrays, Round, best, compiled, ends, extra, ours, plain
from bench.spec.inputs import LR, Inputs
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import Exact, Row
from bench.spec.streams import Streams, Traffic


def row_bytes(codec: Codec) -> float:
    """Return the bytes per element, with scales and grids."""
    size = 2**16
    return (codec.row_bytes(size) - codec.row_bytes(0)) / size


def traffic(codec: Codec) -> Callable[[int], Traffic]:
    """Return the streams: updates and params are read, `out` is written, rows and the float64 sum are replaced."""
    return lambda m: (Streams(reads=(4,) * (m + 1), writes=(4,), in_place=(*(row_bytes(codec),) * m, 8)),)


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


def reads(inputs: Inputs, state: Callable[[], Arrays]) -> Callable[[int], Arrays]:
    num_clients = np.array(inputs.num_clients)
    return lambda k: inputs.read(k, inputs.equal_weights, num_clients=num_clients, **state())


def first_read(inputs: Inputs, k: int) -> Arrays:
    """Return the inputs of a server's first round, before any client has a row."""
    state = {"rows": np.zeros_like(inputs.updates[k]), "h": np.zeros(inputs.d)}
    return reads(inputs, lambda: state)(k) | {"params": inputs.params[0]}


def afflux_round(codec: Codec) -> Callable[[Inputs], Round]:
    def make(inputs: Inputs) -> Round:
        place = inputs.place
        rows = [place.empty(codec.row_size(inputs.d), codec.row_dtype) for _ in range(inputs.m)]
        vector, total = place.empty(inputs.d), place.filled(inputs.d, 0, np.float64)
        for row, update in zip(rows, inputs.updates[-1], strict=True):
            ops.encode(update, row, codec=codec, num_threads=inputs.num_threads)
            ops.decode(row, vector, codec=codec, num_threads=inputs.num_threads)
            total += vector
        facts = [ops.RowFacts(key) for key in range(1, inputs.m + 1)] if codec.keyed else []
        difference = ops.CachedDifference(total, inputs.num_clients, rows, rows, codec, facts)

        def decoded() -> Arrays:
            parts = []
            for row in rows:
                ops.decode(row, vector, codec=codec, num_threads=inputs.num_threads)
                parts.append(ends(vector, CHECKED))
            # Multiplied: to divide, torch multiplies on a GPU by the reciprocal.
            return {"rows": np.array(parts), "h": total * (1 / inputs.num_clients)}

        step, before = ops.Step("sgd", LR), reads(inputs, decoded)
        return applied(inputs, inputs.equal_weights, decoded, before=before, calibrate=difference, step=step)

    return make


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


#: A formula, its rows and h, and a function that returns the values of both
Prepared = tuple[Formula, Any, Tensor, Callable[[], Arrays]]


#: Prepares a formula from the inputs, the converted updates and the function that converts vectors.
Prepare = Callable[[Inputs, list[Tensor], Formula], Prepared]


def with_rows(formula: Formula | None = None) -> Prepare:
    """Return a function that prepares a formula, by default difference_best, on float32 rows."""

    def prepare(inputs: Inputs, updates: list[Tensor], convert: Formula) -> Prepared:
        rows, h = convert(inputs.last_rows()), convert(inputs.last_mean())
        h *= inputs.m / inputs.num_clients
        return formula or difference_best(inputs), rows, h, lambda: {"rows": rows, "h": h}

    return prepare


def cached(prepare: Prepare, *, compiles: bool = False, convert: Conversion = as_tensor) -> Any:
    """Return a contender with its own rows and h, which `prepare` makes from the updates of the input sets."""

    def make(inputs: Inputs) -> Round:
        params = [convert(inputs.place, p) for p in inputs.params]
        updates = [convert(inputs.place, u) for u in inputs.updates]
        formula, rows, h, state = prepare(inputs, updates, partial(convert, inputs.place))
        call = torch.compile(formula, dynamic=False) if compiles else formula
        return Round(
            lambda k: call(params[k], updates[k], rows, h, inputs.num_clients),
            reads(inputs, state),
            lambda result: {"params": result, **state()},
        )

    return make


CA2FL = Row(
    name="ca2fl",
    formula="v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = u_i",
    counted="4 d (3 M + 2) + 16 d: M updates and M rows read, M rows written, params read, "
    "out written, the float64 sum read and written",
    traffic=traffic(codecs.float32),
    reference=reference,
    contenders=[
        ours("afflux", "ops.apply, rows in place, float64 sum", afflux_round(codecs.float32), lambda m: m + 3),
        extra(
            "torch stack",
            "h + (stack(u) - stack(rows)).mean(0), eager; float32 h",
            cached(with_rows(difference_stack)),
            lambda m: m + 1,
            lambda m: 3 * m + 2,
        ),
        plain(
            "torch loop",
            "total += u - row for each client, eager; float32 h",
            cached(with_rows(difference_loop)),
            lambda m: m + 1,
            4,
        ),
        best(
            "torch mv, addmv_",
            "contiguous buffers, nothing allocated; float32 h",
            cached(with_rows()),
            lambda m: m + 2,
            caveat="needs contiguous matrices; float32 sums",
        ),
        compiled(
            "the formula, compiled; float32 h",
            cached(with_rows(difference_sum), compiles=True),
            lambda m: m + 1,
            2,
        ),
    ],
)
