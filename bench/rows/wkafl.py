"""WKAFL: the inner products of gradients with their estimate, the weights, and the step that uses them.

The weights depend on whole vectors, so their reference, `coefficients`, also reads whole vectors. It computes the
paper's formulas in float64, without the Gram matrix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import e, inf, sqrt
from typing import Any

import numpy as np

from afflux import ops
from afflux.aggregation.plane import LocalPlane
from afflux.aggregation.products import RoundVectors
from afflux.arrays.interop import on_host
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.rule import Arrivals, InnerSweep, Weights
from bench.rows import gram
from bench.rows.references import weighted_sum
from bench.spec.arrays import Conversion, Vector, as_cupy, as_tensor
from bench.spec.contender import Arrays, Round, best, ours, plain
from bench.spec.inputs import LR, Float64, Inputs, Int64
from bench.spec.optional_torch import Tensor, torch
from bench.spec.row import Exact, Row, one_case
from bench.spec.streams import Streams, Traffic

SELECTION = CosineSelection()
ALPHA, SIM_MIN, BETA, CLIP = SELECTION.alpha, SELECTION.sim_min, SELECTION.beta, SELECTION.clip or inf


# The reference in float64


def coefficients(gradients: Vector, estimate: Vector, staleness: Int64) -> Float64:
    """Return (2, M): the coefficients of g'_i = g_i + alpha * estimate in the new estimate and in the direction."""

    def pieces() -> Iterator[Float64]:
        for piece in gram.slices(estimate.shape[0], len(gradients)):
            yield on_host(gradients[:, piece]) + ALPHA * on_host(estimate[piece]).astype(np.float64)

    norms = np.sqrt(sum(np.square(piece).sum(axis=1) for piece in pieces()))
    clips = np.minimum(1, CLIP / norms)
    trust = (e / 2) ** -staleness
    in_estimate = clips * trust / trust.sum()
    onto, square = np.zeros_like(norms), 0.0
    for piece in pieces():
        part = in_estimate @ piece
        onto += piece @ part
        square += part @ part
    cosines = onto / (norms * sqrt(square))
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
        weights = coefficients(inputs.updates[k], last, inputs.staleness)
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
            norms=np.full(m, np.nan),
            scalars=SELECTION.needs.scalars,
            inner_sweep=sweep,
        )
    )


def two_sweeps(inputs: Inputs) -> Round:
    estimate = inputs.last_mean()
    gradients, plane = [list(block) for block in inputs.updates], LocalPlane(inputs.num_threads, {"estimate": estimate})

    def run(k: int) -> object:
        vectors = RoundVectors(gradients[k], ["estimate"], plane)
        weights = weigh(inputs, vectors)
        round = ops.Pass(
            inputs.params[k],
            inputs.out,
            ops.Combine(gradients[k], weights.vectors),
            step=ops.Sgd(-LR),
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
        squares, onto, terms, last = np.zeros(inputs.m), np.zeros(inputs.m), np.zeros(inputs.m), 0.0
        for piece in gram.slices(inputs.d, inputs.m):
            moved = on_host(inputs.updates[k][:, piece]) + ALPHA * on_host(estimate[piece]).astype(np.float64)
            part = even @ moved
            squares, last = squares + np.square(moved).sum(axis=1), last + float(part @ part)
            onto, terms = onto + moved @ part, terms + np.abs(moved) @ np.abs(part)
        return {"inner": np.array([*squares, *onto, last]), "terms": np.array([*squares, *terms, last])}

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


@dataclass(frozen=True)
class Sweeps:
    """Two sweeps over a block [estimate, g_1 .. g_M], with afflux's weights between them."""

    convert: Conversion
    inner: Callable[[Tensor], Tensor]  #: (1 + M, 1 + M): all inner products of the block's rows
    #: (parts, block, params, moved): moved = parts block, (2, d), in one product, which is faster than two `mv`.
    #: Then params += moved[1].
    step: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def step(parts: Tensor, block: Tensor, params: Tensor, moved: Tensor) -> None:
    torch.mm(parts, block, out=moved)
    params.add_(moved[1])


def in_torch() -> Sweeps:
    return Sweeps(as_tensor, gram.in_batches, step)


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


def compiled() -> Sweeps:
    return Sweeps(as_tensor, *(torch.compile(f, dynamic=False) for f in (elementwise_products, elementwise_step)))


def in_cupy() -> Sweeps:
    import cupy

    def step(parts: Tensor, block: Tensor, params: Tensor, moved: Tensor) -> None:
        cupy.matmul(parts, block, out=moved)
        params += moved[1]

    return Sweeps(as_cupy, gram.whole, step)


@dataclass(frozen=True)
class FromGram:
    """The result of ops.inner, computed from all inner products of [estimate, g_1 .. g_M]."""

    gram: Float64

    def __call__(
        self, weights: Float64 | None, rule_vector: str | None, shift: float, own_weight: float, /
    ) -> ops.InnerProducts:
        """Return what Arrivals.inner returns; own_weight is 0."""
        count = len(self.gram) - 1
        moved = np.hstack([np.full((count, 1), shift), np.eye(count)])
        products = moved @ self.gram @ moved.T
        given = np.zeros(count) if weights is None else weights
        onto = products @ given
        return ops.InnerProducts(np.diag(products), onto, float(given @ onto))


def products(made: Callable[[], Sweeps]) -> Callable[[Inputs], Round]:
    """Return a contender on the contiguous blocks, with its own params."""

    def make(inputs: Inputs) -> Round:
        sweeps, place = made(), inputs.place
        inputs.blocks[0][0] = inputs.last_mean()
        blocks = [sweeps.convert(place, block) for block in inputs.blocks]
        own = place.copied(inputs.params[0])
        params, moved = sweeps.convert(place, own), sweeps.convert(place, place.filled((2, inputs.d), 0))

        def run(k: int) -> object:
            gram = on_host(sweeps.inner(blocks[k])).astype(np.float64)
            weights = weigh(inputs, FromGram(gram))
            assert weights.next is not None
            parts = np.array([weights.next[0], [-LR * weights.rule_vectors[0], *(-LR * weights.vectors)]], np.float32)
            sweeps.step(sweeps.convert(place, parts), blocks[k], params, moved)
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
        products(in_torch),
        3,
        caveat=IN_FLOAT32,
    ),
    best(
        "torch.compile",
        "each product and both sums elementwise, compiled; our weights",
        products(compiled),
        3,
        caveat=f"{IN_FLOAT32}; compiles for each M",
        compiles=True,
    ),
]

WKAFL = Row(
    name="wkafl",
    formula="g' = g + alpha e, e = sum_i a_i g'_i, p_i ~ exp(beta cos(g'_i, e)) or 0, out = params - lr sum_i p_i g'_i",
    counted="4 d (2 M + 5): M gradients and the last estimate read twice, because the weights depend on all of them; "
    "params read, out and the new estimate written",
    traffic=traffic,
    reference=reference,
    cases=one_case,
    contenders=CONTENDERS,
)
