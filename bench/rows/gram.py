"""The inner products of all updates, for rules that compare directions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from afflux import ops
from afflux.arrays.interop import on_host
from bench.rows.fedbuff import as_rows
from bench.spec.arrays import Conversion, Vector, as_numpy, as_tensor
from bench.spec.columns import ROLE, TIME, TIMES_OURS, relative_error
from bench.spec.contender import REST_OF_OPENBLAS, Arrays, Contender, Round, best, extra, ours, plain
from bench.spec.inputs import Inputs
from bench.spec.optional_torch import Tensor, torch
from bench.spec.row import Exact, Row
from bench.spec.streams import Streams


def slices(d: int, m: int) -> list[slice]:
    """Return pieces of the vectors, so that M of them are small in float64."""
    length = max(1, 2**22 // m)
    return [slice(i, i + length) for i in range(0, d, length)]


def reference(before: Arrays) -> Exact:
    return {"gram": (before["gram"], np.abs(before["gram"]))}


def exact(rows: list[Vector]) -> Arrays:
    """Compute the products in float64, of whole vectors, because `check` has only their ends."""
    gram = np.zeros((len(rows), len(rows)))
    for piece in slices(rows[0].shape[0], len(rows)):
        part = np.array([on_host(row[piece]) for row in rows], np.float64)
        gram += part @ part.T
    return {"gram": gram}


def named(gram: Any) -> Arrays:
    return {"gram": gram}


def afflux_round(inputs: Inputs) -> Round:
    rows = as_rows(inputs)
    return Round(lambda k: ops.gram(rows[k], num_threads=inputs.num_threads), lambda k: exact(rows[k]), named)


def product(formula: Callable[[Any], Any], convert: Conversion = as_tensor) -> Callable[[Inputs], Round]:
    """Return a contender on the updates as one matrix (M, d)."""

    def make(inputs: Inputs) -> Round:
        blocks = [convert(inputs.place, block) for block in inputs.updates]
        return Round(lambda k: formula(blocks[k]), lambda k: exact(as_rows(inputs)[k]), named)

    return make


def whole(block: Tensor) -> Tensor:
    return block @ block.T


def in_batches(block: Tensor) -> Tensor:
    """Compute the products in batches of columns; the product of the whole matrix and its transpose takes longer."""
    columns = 1024
    count = block.shape[1] // columns
    batches = block[:, : count * columns].unflatten(1, (count, columns)).transpose(0, 1)
    rest = block[:, count * columns :]
    return torch.bmm(batches, batches.transpose(1, 2)).sum(0) + whole(rest)


ONE_MATRIX = "needs one contiguous matrix; float32 sums"

CONTENDERS = [
    ours("afflux", "ops.gram", afflux_round),
    Contender(
        "numpy U @ U.T",
        "float32, on all cores",
        product(whole, as_numpy),
        caveat=ONE_MATRIX,
        numpy=True,
        rest=REST_OF_OPENBLAS,
    ),
    plain("torch U @ U.T", "float32", product(whole), caveat=ONE_MATRIX),
    best("torch bmm", "float32, in batches of 1024 columns", product(in_batches), caveat=ONE_MATRIX),
    extra(
        "torch U @ U.T, float64",
        "U.double() @ U.double().T",
        product(lambda u: whole(u.double())),
        temporary=lambda m: 2 * m,
    ),
]

GRAM = Row(
    name="gram",
    formula="G_ij = <u_i, u_j>",
    counted="4 d M: M updates read",
    traffic=lambda m: (Streams(reads=(4,) * m),),
    reference=reference,
    contenders=CONTENDERS,
    output="gram",
    columns=(ROLE, *TIME, TIMES_OURS, relative_error("error / largest")),
)
