"""FADAS: one AMSGrad round on the mean of the updates.

Every contender keeps its own moments from round to round. They start as they would be after a long run,
with v near its expected value, so that no result depends on a division by almost 0.
"""

from collections.abc import Callable
from typing import Any

from afflux import ops
from afflux.rules.presets.fadas import BETA1, BETA2, EPSILON
from bench.rows.passes import applied
from bench.rows.references import adaptive_step, weighted_sum
from bench.spec.arrays import Conversion, Vector, as_tensor
from bench.spec.contender import Arrays, Round, best, compiled, ours, plain
from bench.spec.inputs import LR, Inputs
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import Exact, Row
from bench.spec.streams import Streams

#: The inputs of a round (without the updates) and its outputs.
NAMES = ("params", "m", "v", "v_hat")


def moments(inputs: Inputs) -> list[Vector]:
    """Return m, v and v_hat.

    m is the mean of the last set's updates. v and v_hat are its variance, so that a part of v_hat grows.
    """
    place = inputs.place
    return [inputs.last_mean(), *(place.filled(inputs.d, 0.01**2 / inputs.m) for _ in ("v", "v_hat"))]


def named(arrays: Any) -> Arrays:
    return dict(zip(NAMES, arrays, strict=True))


def reference(before: Arrays) -> Exact:
    direction, size = weighted_sum(before["weights"], before["updates"])
    return adaptive_step([before[name] for name in NAMES], direction, size, (BETA1, BETA2), EPSILON)


def afflux_round(inputs: Inputs) -> Round:
    states = moments(inputs)
    step = ops.Step("amsgrad", LR, BETA1, BETA2, EPSILON)

    def moved() -> Arrays:
        return dict(zip(NAMES[1:], states, strict=True))

    return applied(inputs, inputs.equal_weights, moved, step=step, states=states)


def amsgrad(params: Tensor, direction: Tensor, m: Tensor, v: Tensor, v_hat: Tensor, *, of: Any = torch) -> list[Tensor]:
    m = BETA1 * m + (1 - BETA1) * direction
    v = BETA2 * v + (1 - BETA2) * direction**2
    v_hat = of.maximum(v_hat, v)
    return [params + LR * m / (of.sqrt(v_hat) + EPSILON), m, v, v_hat]


def stack_mean(params: Tensor, updates: list[Tensor], *states: Tensor) -> list[Tensor]:
    return amsgrad(params, torch.stack(updates).mean(0), *states)


def summed(params: Tensor, updates: list[Tensor], *states: Tensor, of: Any = torch) -> list[Tensor]:
    """Compute the round as one expression, for the compiler and any library; only params are new memory."""
    out, *moved = amsgrad(params, sum(updates) / len(updates), *states, of=of)
    for state, new in zip(states, moved, strict=True):
        state[...] = new
    return [out, *states]


def functional(
    formula: Formula, *, compiles: bool = False, convert: Conversion = as_tensor
) -> Callable[[Inputs], Round]:
    """Return a contender that returns new params and states."""

    def make(inputs: Inputs) -> Round:
        call = torch.compile(formula, dynamic=False) if compiles else formula
        place = inputs.place
        params = [convert(place, p) for p in inputs.params]
        updates = [[convert(place, u) for u in block] for block in inputs.updates]
        states = [convert(place, state) for state in moments(inputs)]

        def run(k: int) -> object:
            out, *states[:] = call(params[k], updates[k], *states)
            return out, *states

        def before(k: int) -> Arrays:
            return inputs.read(k, inputs.equal_weights) | named([params[k], *states])

        return Round(run, before, named)

    return make


def eager_step(params: Tensor, direction: Tensor, m: Tensor, v: Tensor, v_hat: Tensor) -> Callable[[], object]:
    def step() -> None:
        m.lerp_(direction, 1 - BETA1)
        v.mul_(BETA2).addcmul_(direction, direction, value=1 - BETA2)
        torch.maximum(v_hat, v, out=v_hat)
        below = torch.sqrt(v_hat, out=direction).add_(EPSILON)
        params.addcdiv_(m, below, value=LR)

    return step


def fused_step(params: Tensor, direction: Tensor, m: Tensor, v: Tensor, v_hat: Tensor) -> Any:
    """Make torch's Adam with a step counter so large that its bias corrections, which FADAS does not have, are 1.

    Torch's Adam subtracts, so it gets -direction and keeps -m. Apart from the signs, the bits are the same.
    """
    states = {"exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": v_hat}
    optimizer = torch.optim.Adam([params], LR, (BETA1, BETA2), EPSILON, amsgrad=True, fused=True)
    optimizer.state[params] = {"step": torch.tensor(1e6, device=params.device), **states}
    params.grad = direction
    return optimizer.step


def in_place(make_step: Formula, *, sign: int = 1) -> Callable[[Inputs], Round]:
    """Return a contender that overwrites its own params, states and direction, and allocates nothing.

    `sign`: the sign with which direction and m are kept.
    """

    def make(inputs: Inputs) -> Round:
        place = inputs.place
        own = place.copied(inputs.params[0])
        m, v, v_hat = moments(inputs)
        m *= sign
        buffers = [place.tensor(array) for array in (own, place.filled(inputs.d, 0), m, v, v_hat)]
        direction, step = buffers[1], make_step(*buffers)
        updates = [place.tensor(u).T for u in inputs.updates]
        weights = place.tensor(sign * inputs.equal_weights).float()

        def run(k: int) -> object:
            torch.mv(updates[k], weights, out=direction)
            step()
            return None

        def now(_: object = None) -> Arrays:
            return named([own, sign * m, v, v_hat])

        def before(k: int) -> Arrays:
            return inputs.read(k, inputs.equal_weights) | now()

        return Round(run, before, now)

    return make


IN_FLOAT32 = "needs one contiguous matrix; float32 throughout; overwrites params"

CONTENDERS = [
    ours("afflux", "ops.apply, moments in place", afflux_round, kept=3),
    plain(
        "torch stack().mean",
        "m, v, v_hat = ..., params + lr * m / (sqrt(v_hat) + eps), eager",
        functional(stack_mean),
        3,
        lambda m: m + 8,
    ),
    best(
        "torch mv, addcdiv_",
        "mv, lerp_, addcmul_, maximum, sqrt, addcdiv_; nothing allocated",
        in_place(eager_step),
        5,
        caveat=IN_FLOAT32,
    ),
    best(
        "torch fused Adam",
        "mv, then torch.optim.Adam(amsgrad=True, fused=True) far from its first step",
        in_place(fused_step, sign=-1),
        5,
        caveat=IN_FLOAT32,
    ),
    compiled(
        "the formula, compiled; moments in place", functional(summed, compiles=True), 3, 1, caveat="float32 throughout"
    ),
]

FADAS = Row(
    name="fadas",
    formula="m = b1 m + (1-b1) D, v = b2 v + (1-b2) D^2, v_hat = max(v_hat, v), "
    "out = params + lr m / (sqrt(v_hat) + eps); D = 1/M sum_i u_i",
    counted="4 d (M + 8): M updates and params read, out written, m, v and v_hat read and written",
    traffic=lambda m: (Streams(reads=(4,) * (m + 1), writes=(4,), in_place=(4,) * 3),),
    reference=reference,
    contenders=CONTENDERS,
)
