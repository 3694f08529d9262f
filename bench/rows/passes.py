"""afflux's own contenders: one call of `ops.apply` a round."""

from collections.abc import Callable, Sequence
from typing import Any

from afflux import ops
from bench.spec.contender import Arrays, Round
from bench.spec.inputs import Float64, Inputs


def applied(
    inputs: Inputs,
    weights: Float64,
    state: Callable[[], Arrays] = dict,
    *,
    updates: Sequence[Sequence[Any]] | None = None,
    before: Callable[[int], Arrays] | None = None,
    trim: float = 0.0,
    noise: ops.Noise | None = None,
    **stages: Any,
) -> Round:
    """Return a round that applies the pass of set k, on `updates`, by default the inputs', with these stages.

    Its outputs are `inputs.out`, and the arrays that were updated in place, from `state`. Without `before`, its inputs
    are those of `Inputs.read` and these arrays.
    """
    passes = [
        ops.Pass(params, inputs.out, ops.Combine(list(vectors), weights, trim=trim, noise=noise), **stages)
        for params, vectors in zip(inputs.params, updates or inputs.updates, strict=True)
    ]

    def run(k: int) -> object:
        ops.apply(passes[k], num_threads=inputs.num_threads)
        return inputs.out

    read = before or (lambda k: inputs.read(k, weights, **state()))
    return Round(run, read, lambda out: {"params": out, **state()})
