"""WKAFL: the inner products of gradients with their estimate, the weights, and the step that uses them.

The weights depend on whole vectors, so their reference, `coefficients`, has the inner products of whole vectors. It
computes the paper's formulas in float64, without `CosineSelection`.
"""

from collections.abc import Callable
from math import e, inf, sqrt
from typing import Any

import numpy as np

from afflux import ops
from afflux.aggregation.inner_products import RoundVectors
from afflux.aggregation.local_plane import LocalPlane
from afflux.arrays.interop import on_host
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.rule import Arrivals, InnerSweep, Weights
from bench.rows import gram
from bench.rows.references import weighted_sum
from bench.spec.arrays import Conversion, Vector, as_tensor
from bench.spec.contender import Arrays, Round, best, compiled, ours, plain
from bench.spec.inputs import LR, Float64, Inputs, Int64
from bench.spec.optional_torch import Formula, Tensor, torch
from bench.spec.row import Exact, Row
from bench.spec.streams import Streams, Traffic

#: The clip is beyond all norms, up to 140 here: the first norm that it reaches costs a third sweep.
SELECTION = CosineSelection(clip=1e3)
ALPHA, SIM_MIN, BETA, CLIP = SELECTION.alpha, SELECTION.sim_min, SELECTION.beta, SELECTION.clip or inf


# The reference in float64


def shifted(products: Float64, shift: float = ALPHA) -> Float64:
    """Return all inner products of g_i + shift * e, (M, M), computed from those of [e, g_1 .. g_M]."""
    count = len(products) - 1
    sums = np.hstack([np.full((count, 1), shift), np.eye(count)])
    return np.asarray(sums @ products @ sums.T)


def exact_products(gradients: Vector, estimate: Vector) -> Float64:
    return shifted(gram.exact([estimate, *gradients])["gram"])


def coefficients(products: Float64, staleness: Int64) -> Float64:
    """Return (2, M): the coefficients of g'_i = g_i + alpha * estimate in the new estimate and in the direction."""
    norms = np.sqrt(np.diag(products))
    clips = np.minimum(1, CLIP / norms)
    trust = (e / 2) ** -staleness
    in_estimate = clips * trust / trust.sum()
    onto = products @ in_estimate
    cosines = onto / (norms * sqrt(in_estimate @ onto))
    chosen = np.where(cosines >= SIM_MIN, np.exp(BETA * cosines), 0)
    in_direction = clips * chosen / chosen.sum() if chosen.any() else in_estimate
    return np.array([in_estimate, in_direction])


def reference(before: Arrays) -> Exact:
    """Compute the round in float64 from the coefficients; or the inner products."""
    if "inner" in before:
        return {"inner": (before["inner"], before["terms"])}
    params, last = (before[name].astype(np.float64) for name in ("params", "estimate"))
    gradients, shift = before["updates"], -ALPHA * last
    (in_estimate, in_direction), shifts = before["weights"], [shift] * len(gradients)
    estimate, estimate_size = weighted_sum(in_estimate, gradients, shifts)
    direction, size = weighted_sum(in_direction, gradients, shifts)
    return {
        "params": (params - LR * direction, np.abs(params) + LR * size),
        "estimate": (estimate, estimate_size),
        "weights": (in_direction, in_direction),
    }


def ready(inputs: Inputs, run: Callable[[int], object], params: list[Any], estimate: Callable[[int], Any]) -> Round:
    """Return a round that reads params[k] and estimate(k); its run returns new params, new estimate and weights."""

    def before(k: int) -> Arrays:
        last = estimate(k)
        weights = coefficients(exact_products(inputs.updates[k], last), inputs.staleness)
        return inputs.read(k, weights, estimate=last) | {"params": params[k]}

    def after(result: Any) -> Arrays:
        return dict(zip(("params", "estimate", "weights"), result, strict=True))

    return Round(run, before, after)


# afflux


def weigh(inputs: Inputs, sweep: InnerSweep) -> Weights:
    """Compute the weights as a server does."""
    m, now = inputs.m, 4
    return SELECTION(
        Arrivals(
            version=now,
            client_ids=tuple(range(m)),
            versions=now - inputs.staleness,
            staleness=inputs.staleness,
            num_examples=np.ones(m, np.int64),
            losses=np.full(m, np.nan),
            measured_norms=np.full(m, np.nan),
            scalars=SELECTION.needs.scalars,
            inner_sweep=sweep,
        )
    )


def two_sweeps(inputs: Inputs) -> Round:
    estimate = inputs.last_mean()
    gradients, plane = [list(block) for block in inputs.updates], LocalPlane(num_threads=inputs.num_threads)

    def run(k: int) -> object:
        vectors = RoundVectors(gradients[k], {"estimate": estimate}, plane.inner)
        weights = weigh(inputs, vectors)
        round = ops.Pass(
            inputs.params[k],
            inputs.out,
            ops.Combine(gradients[k], weights.vectors),
            step=ops.Step("sgd", -LR),
            rule_vectors=ops.RuleVectors([estimate], np.array(weights.rule_vectors), weights.next),
        )
        ops.apply(round, num_threads=inputs.num_threads)
        return inputs.out, estimate, weights.vectors

    return ready(inputs, run, inputs.params, lambda k: estimate)


def first_sweep(inputs: Inputs) -> Round:
    """Return a contender that computes only the inner products."""
    estimate, even = inputs.last_mean(), np.full(inputs.m, 1 / inputs.m)

    def run(k: int) -> ops.InnerProducts:
        vectors = list(inputs.updates[k])
        return ops.inner(vectors, even, memory=estimate, shift=ALPHA, num_threads=inputs.num_threads)

    def before(k: int) -> Arrays:
        products = exact_products(inputs.updates[k], estimate)
        squares, onto = np.diag(products), products @ even
        last = float(even @ onto)
        most = np.sqrt(squares * last)  # of the magnitudes of the products' terms, by Cauchy and Schwarz
        return {"inner": np.array([*squares, *onto, last]), "terms": np.array([*squares, *most, last])}

    def after(found: Any) -> Arrays:
        return {"inner": np.concatenate([found.squares, found.products, [found.square]])}

    return Round(run, before, after)


# torch


def client_by_client(params: Tensor, gradients: list[Tensor], last: Tensor, trust: Tensor) -> tuple[Tensor, ...]:
    """Compute the round client by client, as the paper writes it."""
    clipped, clips = [], []
    for gradient in gradients:
        gradient = gradient + ALPHA * last
        clips.append((CLIP / gradient.norm()).clamp(max=1))
        clipped.append(gradient * clips[-1])
    estimate = sum(a * gradient for a, gradient in zip(trust, clipped, strict=True))
    cosines = torch.stack([torch.cosine_similarity(gradient, estimate, dim=0) for gradient in clipped])
    kept = cosines >= SIM_MIN
    shares = torch.softmax(BETA * cosines.where(kept, -torch.inf), 0) if kept.any() else trust
    direction = sum(p * gradient for p, gradient in zip(shares, clipped, strict=True) if p > 0)
    return params - LR * direction, estimate, shares * torch.stack(clips)


def eager(inputs: Inputs) -> Round:
    convert = inputs.place.tensor
    params = [convert(p) for p in inputs.params]
    gradients = [[convert(g) for g in block] for block in inputs.updates]
    trust = convert((e / 2) ** -inputs.staleness).float()
    trust /= trust.sum()
    estimate = convert(inputs.last_mean())

    def run(k: int) -> object:
        nonlocal estimate
        out, estimate, weights = client_by_client(params[k], gradients[k], estimate, trust)
        return out, estimate, weights

    return ready(inputs, run, params, lambda k: estimate)


def step(parts: Tensor, block: Tensor, params: Tensor, moved: Tensor, *, of: Any = torch) -> None:
    """Compute moved = parts block, (2, d), in one product, which is faster than two `mv`; then params += moved[1]."""
    of.matmul(parts, block, out=moved)
    params += moved[1]


def elementwise_products(block: Tensor) -> Tensor:
    """Compute the products of the lower triangle, one sum each, for the compiler."""
    rows = list(block)
    made = {(i, j): (rows[i] * rows[j]).sum() for i in range(len(rows)) for j in range(i + 1)}
    every = range(len(rows))
    return torch.stack([made[max(i, j), min(i, j)] for i in every for j in every]).view(len(rows), len(rows))


def elementwise_step(parts: Tensor, block: Tensor, params: Tensor, moved: Tensor) -> None:
    """Compute the step as one expression, for the compiler."""
    for out, row in zip(moved, parts, strict=True):
        out.copy_(sum(part * vector for part, vector in zip(row, block, strict=True)))
    params.add_(moved[1])


def inner_sweep(products: Float64) -> InnerSweep:
    """Return a function as Arrivals.inner, from all inner products of [estimate, g_1 .. g_M]; own_weight is 0."""

    def inner(
        weights: Float64 | None, rule_vector: str | None, shift: float, own_weight: float, /
    ) -> ops.InnerProducts:
        of_sums = shifted(products, shift)
        onto = of_sums @ (np.zeros(len(of_sums)) if weights is None else weights)
        return ops.InnerProducts(np.diag(of_sums), onto, 0.0 if weights is None else float(weights @ onto))

    return inner


def two_products(
    inner: Formula, step: Formula, convert: Conversion = as_tensor, *, compiles: bool = False
) -> Callable[[Inputs], Round]:
    """Return a contender on contiguous blocks [estimate, g_1 .. g_M], with its own params and afflux's weights.

    Args:
        inner: computes all inner products of a block's rows, (1 + M, 1 + M).
        step: takes the coefficients of the block's rows in the new estimate and in the step, the block, params and
            memory for both sums.
        convert: converts the vectors.
        compiles: whether both are compiled.
    """

    def make(inputs: Inputs) -> Round:
        place = inputs.place
        calls: list[Formula] = [torch.compile(f, dynamic=False) if compiles else f for f in (inner, step)]
        inputs.blocks[0][0] = inputs.last_mean()
        blocks = [convert(place, block) for block in inputs.blocks]
        own = place.copied(inputs.params[0])
        params, moved = convert(place, own), convert(place, place.filled((2, inputs.d), 0))

        def run(k: int) -> object:
            weights = weigh(inputs, inner_sweep(on_host(calls[0](blocks[k])).astype(np.float64)))
            assert weights.next is not None
            parts = np.array([weights.next[0], [-LR * weights.rule_vectors[0], *(-LR * weights.vectors)]], np.float32)
            calls[1](convert(place, parts), blocks[k], params, moved)
            blocks[(k + 1) % len(blocks)][0] = moved[0]  # the next round reads it there
            return params, moved[0], weights.vectors

        return ready(inputs, run, [own] * len(blocks), lambda k: inputs.blocks[k][0])

    return make


def traffic(m: int) -> Traffic:
    """Return the streams of two sweeps.

    inner reads the gradients and the last estimate. apply reads gradients and params, writes `out`, and replaces the
    estimate.
    """
    return Streams(reads=(4,) * (m + 1)), Streams(reads=(4,) * (m + 1), writes=(4,), in_place=(4,))


IN_FLOAT32 = "needs one contiguous matrix; float32 products and sums; uses our weights"

CONTENDERS = [
    ours("afflux", "ops.inner, CosineSelection, ops.apply", two_sweeps, 1),
    ours("afflux inner", "the first sweep alone", first_sweep, 1, traffic=lambda m: traffic(m)[:1]),
    plain(
        "torch, client by client",
        "g + alpha e, norm, clip, cosine_similarity, softmax, sum(p * g), eager",
        eager,
        1,
        lambda m: m + 6,
    ),
    best(
        "torch bmm, mm",
        "U U^T in batches, our weights, one mm for estimate and step; contiguous U",
        two_products(gram.in_batches, step),
        3,
        caveat=IN_FLOAT32,
    ),
    compiled(
        "each product and both sums elementwise, compiled; our weights",
        two_products(elementwise_products, elementwise_step, compiles=True),
        3,
        caveat=IN_FLOAT32,
    ),
]

WKAFL = Row(
    name="wkafl",
    formula="g' = g + alpha e, e = sum_i a_i g'_i, p_i ~ exp(beta cos(g'_i, e)) or 0, out = params - lr sum_i p_i g'_i",
    counted="4 d (2 M + 5): M gradients and the last estimate read twice, because the weights depend on all of them; "
    "params read, out and the new estimate written",
    traffic=traffic,
    reference=reference,
    contenders=CONTENDERS,
)
