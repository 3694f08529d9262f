"""The same operations in torch: plain, as papers' authors write them, and as well as torch can.

Every formula works on prebuilt tensors over the memory that afflux gets, on the host or on a GPU; those that take `of`,
or name no library, on CuPy's arrays too. Without torch the lists are empty.
"""

from typing import Any

import numpy as np

from afflux.bench.spec.arrays import Hand, Vector, as_tensor
from afflux.bench.spec.contender import Arrays, Contender, Round, nothing, vector_bytes
from afflux.bench.spec.inputs import LR, Inputs
from afflux.bench.spec.optional_torch import Formula, Tensor, torch

# FedBuff


def stack_mean(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    return params + LR * torch.stack(updates).mean(0)


def stack_weighted(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    return params + LR * (weights[:, None] * torch.stack(updates)).sum(0)


def weighted_sum(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    """For the compiler, which fuses it into one sweep."""
    return params + LR * sum(w * u for w, u in zip(weights, updates, strict=True))


def functional(formula: Formula, *, weighted: bool, compiled: bool = False, hand: Hand = as_tensor) -> Any:
    """A contender that returns new params and keeps no state."""

    def make(inputs: Inputs) -> Round:
        weights, place = inputs.weights if weighted else inputs.equal_weights, inputs.place
        call = torch.compile(formula, dynamic=False) if compiled else formula
        params = [hand(place, p) for p in inputs.params]
        updates = [[hand(place, v) for v in vectors] for vectors in inputs.vectors]
        own_weights = hand(place, weights.astype(np.float32))

        def run(k: int) -> object:
            return call(params[k], updates[k], own_weights)

        def before(k: int) -> Arrays:
            return {
                "params": inputs.params[k],
                "updates": inputs.updates[k],
                "weights": weights,
            }

        return Round(run, before, lambda result: {"params": result})

    return make


def add_loop(params: Tensor, updates: Tensor, weights: Tensor) -> None:
    for weight, update in zip(weights.tolist(), updates, strict=True):
        params.add_(update, alpha=weight)


def addmv(params: Tensor, updates: Tensor, weights: Tensor) -> None:
    """One matrix-vector product on the contiguous buffer."""
    params.addmv_(updates.T, weights)


def in_place(formula: Formula) -> Any:
    """A contender that overwrites its own params, which moves no more bytes than a separate out."""

    def make(inputs: Inputs) -> Round:
        place = inputs.place
        own = place.copied(inputs.params[0])
        params = place.tensor(own)
        updates = [place.tensor(u) for u in inputs.updates]
        weights = place.tensor(LR * inputs.weights).float()

        def run(k: int) -> object:
            return formula(params, updates[k], weights)

        def before(k: int) -> Arrays:
            return {"params": own, "updates": inputs.updates[k], "weights": inputs.weights}

        return Round(run, before, lambda _: {"params": own})

    return make


# CA2FL. h is the float32 mean of the rows, as authors keep it.


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
    """For the compiler, and any library: one expression without intermediate state."""
    total = sum(update - row for update, row in zip(updates, rows, strict=True))
    new_params = params + LR * (h + total / len(updates))
    h += total / num_clients
    for row, update in zip(rows, updates, strict=True):
        row[...] = update
    return new_params


def difference_best(inputs: Inputs) -> Formula:
    """Matrix-vector products on contiguous buffers, and no allocation."""
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


def summed(inputs: Inputs, rows: Vector) -> Vector:
    """Of all rows, in float64."""
    total = inputs.place.filled(inputs.d, 0, np.float64)
    for row in rows:
        total += row
    return total


def cached(formula: Formula | None = None, *, compiled: bool = False, hand: Hand = as_tensor) -> Any:
    """A contender with its own rows and h; without a formula, difference_best."""

    def make(inputs: Inputs) -> Round:
        place, rows, h = inputs.place, inputs.last_rows(), inputs.place.empty(inputs.d)
        h[...] = summed(inputs, rows) / inputs.num_clients
        call = formula or difference_best(inputs)
        if compiled:
            call = torch.compile(call, dynamic=False)
        params = [hand(place, p) for p in inputs.params]
        updates = [hand(place, u) for u in inputs.updates]
        own_rows, own_h = hand(place, rows), hand(place, h)

        def run(k: int) -> object:
            return call(params[k], updates[k], own_rows, own_h, inputs.num_clients)

        def before(k: int) -> Arrays:
            return {
                "params": inputs.params[k],
                "updates": inputs.updates[k],
                "weights": inputs.equal_weights,
                "rows": rows,
                "h": h,
                "num_clients": np.array(inputs.num_clients),
            }

        def after(result: Any) -> Arrays:
            return {"params": result, "h": h, "rows": rows}

        return Round(run, before, after)

    return make


STACK_MEAN = Contender(
    "torch stack().mean",
    "params + lr * torch.stack(updates).mean(0)",
    functional(stack_mean, weighted=False),
    temporary=vector_bytes(lambda m: m + 2),
    role="plain",
)
ADDMV = Contender(
    "torch addmv_",
    "params.addmv_(U.T, lr * w), contiguous U",
    in_place(addmv),
    vector_bytes(lambda m: 1),
    role="best",
    but="needs one contiguous matrix; float32 sums; overwrites params",
)


def fedbuff() -> list[Contender]:
    own = vector_bytes(lambda m: 1)
    return [
        STACK_MEAN,
        Contender(
            "torch stack, weighted",
            "params + lr * (w[:, None] * torch.stack(updates)).sum(0)",
            functional(stack_weighted, weighted=True),
            temporary=vector_bytes(lambda m: 2 * m + 2),
        ),
        Contender("torch add_ loop", "params.add_(u, alpha=lr * w) for each u", in_place(add_loop), own),
        ADDMV,
        Contender(
            "torch.compile",
            "the weighted sum, compiled",
            functional(weighted_sum, weighted=True, compiled=True),
            nothing,
            own,
            role="best",
            but="float32 sums; compiles for each M",
            compiles=True,
        ),
    ]


def ca2fl() -> list[Contender]:
    own = vector_bytes(lambda m: m + 1)
    return [
        Contender(
            "torch stack",
            "h + (stack(u) - stack(rows)).mean(0), eager; float32 h",
            cached(difference_stack),
            own,
            vector_bytes(lambda m: 3 * m + 2),
        ),
        Contender(
            "torch loop",
            "total += u - row for each client, eager; float32 h",
            cached(difference_loop),
            own,
            vector_bytes(lambda m: 4),
            role="plain",  # the faster of the two
        ),
        Contender(
            "torch mv, addmv_",
            "contiguous buffers, nothing allocated; float32 h",
            cached(),
            vector_bytes(lambda m: m + 2),
            role="best",
            but="needs contiguous matrices; float32 sums",
        ),
        Contender(
            "torch.compile",
            "the formula, compiled; float32 h",
            cached(difference_sum, compiled=True),
            own,
            vector_bytes(lambda m: 2),
            role="best",
            but="float32 sums; compiles for each M",
            compiles=True,
        ),
    ]


FEDBUFF = fedbuff() if torch is not None else []
CA2FL = ca2fl() if torch is not None else []
ROUNDS = [STACK_MEAN, ADDMV] if torch is not None else []
