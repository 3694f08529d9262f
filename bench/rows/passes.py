"""afflux's own contenders: one call of `ops.apply` a round."""

from collections.abc import Callable, Sequence

from afflux import ops
from bench.spec.contender import Arrays, Round
from bench.spec.inputs import Inputs


def applied(
    inputs: Inputs,
    passes: Sequence[ops.Pass],
    before: Callable[[int], Arrays],
    state: Callable[[], Arrays] = dict,
) -> Round:
    """Return a round that applies passes[k].

    Its outputs are `inputs.out`, and the arrays that were updated in place, from `state`.
    """

    def run(k: int) -> object:
        ops.apply(passes[k], num_threads=inputs.num_threads)
        return inputs.out

    return Round(run, before, lambda out: {"params": out, **state()})
