"""The formulas of the rows in CuPy, one kernel for each operation: contenders on a GPU."""

from collections.abc import Callable
from functools import partial

from bench.rows import ca2fl, fadas, fedbuff, gram, mf_ca2fl, wkafl
from bench.spec.arrays import as_cupy
from bench.spec.contender import Contender, Round
from bench.spec.inputs import Inputs
from bench.spec.optional_torch import Tensor


def adaptive(params: Tensor, updates: list[Tensor], *states: Tensor) -> list[Tensor]:
    import cupy

    return fadas.summed(params, updates, *states, of=cupy)


def two_sums(parts: Tensor, block: Tensor, params: Tensor, moved: Tensor) -> None:
    import cupy

    wkafl.step(parts, block, params, moved, of=cupy)


def contender(what: str, make: Callable[[Inputs], Round], kept: int = 0) -> Contender:
    return Contender("CuPy", what, make, kept, 4)


def coded(bits: int) -> Contender:
    what = "min, max, stochastic rounding, total += u - row; codes of a byte, one scale a vector; float32 h"
    return contender(
        what, ca2fl.cached(mf_ca2fl.client_by_client(partial(mf_ca2fl.CuPyCoder, bits)), convert=as_cupy), 8
    )


#: The contenders of each row.
CONTENDERS = {
    "gram": contender("U @ U.T, float32", gram.product(gram.whole, as_cupy)),
    "fedbuff": contender(
        "params + lr * sum(w * u)", fedbuff.functional(fedbuff.one_expression, weighted=True, convert=as_cupy)
    ),
    "fadas": contender("the formula", fadas.functional(adaptive, convert=as_cupy), 3),
    "ca2fl": contender(
        "the formula; float32 h", ca2fl.cached(ca2fl.with_rows(ca2fl.difference_sum), convert=as_cupy), 11
    ),
    "wkafl": contender(
        "U @ U.T, our weights, one matmul for estimate and step", wkafl.two_products(gram.whole, two_sums, as_cupy), 3
    ),
    **{f"mf-ca2fl-{codec.name}": coded(bits) for codec, bits in mf_ca2fl.CODECS.items()},
}
