"""The statistics and the copied arrays of a model after a round: its buffers, such as those of BatchNorm.

    s' = sum_i c_i s_i,  c_i = w_i / W,  W = sum_i w_i             rules that take updates or gradients
    s' = sum_i c_i s_i + c_0 s,  c_i = min(lr, 1 / W) w_i,  c_0 = max(0, 1 - lr W)     rules that take models

over the accepted arrivals, in canonical order and in float64. No c is negative, so that no variance becomes so. With
`Weights.trim` the sums over the arrivals are trimmed as those of their vectors.
"""

from collections.abc import Sequence

import numpy as np

from afflux import ops
from afflux.arrays.interop import immutable_copy
from afflux.ops.exact import ordered_sum
from afflux.rules.rule import Float64, Kind


def mixed_buffers(
    kind: Kind,
    current: Float64 | None,
    vectors: Sequence[Float64 | None],
    weights: Float64,
    accepted: Sequence[bool],
    lr: float,
    averaged: int | None = None,
    trim: float = 0.0,
) -> Float64 | None:
    """Return the model's buffers after a round.

    If all weights are equal, or one is negative, or their sum is not positive, the statistics are the plain mean (of
    rules that take models only in the last two cases). An element in which all accepted arrivals and the server agree
    keeps its bits. The buffers of a single accepted arrival replace the server's, except where a rule that takes models
    leaves these a share. If all arrivals are rejected, nothing changes.

    Args:
        kind: the kind of the rule.
        current: (d_b,) the server's buffers; None: the model has none.
        vectors: (d_b,) those of the arrivals, in canonical order.
        weights: (M,) the final weights.
        accepted: whether each arrival is accepted.
        lr: the learning rate of the round; it only matters for rules that take models.
        averaged: the number of statistics; copied arrays follow. None: all are statistics.
        trim: the share that is cut at both ends.
    """
    pairs = [(v, w) for v, w, yes in zip(vectors, weights.tolist(), accepted, strict=True) if yes and v is not None]
    if current is None or not pairs:
        return current
    values: tuple[Float64, ...]
    shares: tuple[float, ...]
    values, shares = zip(*pairs, strict=True)
    if len(pairs) == 1 and (kind != "model" or lr * shares[0] >= 1.0):
        return values[0]
    out = np.empty(current.size)
    before, mean, statistics = current, out, values
    if averaged is not None and averaged < current.size:
        before, mean, statistics = current[:averaged], out[:averaged], tuple(v[:averaged] for v in values)
        out[averaged:] = values[shares.index(max(shares))][averaged:]
    if before.size:
        _mix(kind, before, statistics, shares, lr, mean, trim)
        same = statistics[0] == before
        for vector in statistics[1:]:
            same &= vector == before
        np.putmask(mean, same, before)
    return immutable_copy(out)


def _mix(
    kind: Kind,
    current: Float64,
    vectors: tuple[Float64, ...],
    weights: tuple[float, ...],
    lr: float,
    out: Float64,
    trim: float,
) -> None:
    """Write the mean of the vectors to `out`."""
    total = ordered_sum(weights)
    plain = not total > 0 or min(weights) < 0
    if kind == "model" and not plain:
        base = max(0.0, 1.0 - lr * total)
        shares = [lr * weight if base else weight / total for weight in weights]
        mix = ops.Combine(vectors, np.array(shares), base, trim=trim)
        ops.apply(ops.Pass(current, out, mix, step=ops.Step("assign")), num_threads=1)
        return
    shares, scale = [1.0] * len(vectors), 1.0 / len(vectors)
    if not plain and weights.count(weights[0]) < len(weights):
        shares, scale = [weight / total for weight in weights], 1.0
    mix = ops.Combine(vectors, np.array(shares), trim=trim)
    ops.apply(ops.Pass(np.zeros(out.size), out, mix, step=ops.Step("sgd", scale)), num_threads=1)
