"""Shared functions of the float64 references. Each value comes with the sum of its terms' magnitudes."""

from collections.abc import Sequence

import numpy as np

from bench.spec.arrays import Vector
from bench.spec.inputs import LR, Float64
from bench.spec.row import Exact


def weighted_sum(
    weights: Vector, vectors: Sequence[Vector], subtracted: Sequence[Vector] | None = None
) -> tuple[Float64, Float64]:
    """Return sum_i w_i (x_i - y_i) and sum_i |w_i| (|x_i| + |y_i|); one vector at a time keeps temporaries small."""
    total, magnitudes = np.zeros((2, len(vectors[0])))
    for i, weight in enumerate(weights):
        term = vectors[i].astype(np.float64)
        magnitude = np.abs(term)
        if subtracted is not None:
            other = subtracted[i].astype(np.float64)
            term -= other
            magnitude += np.abs(other)
        total += weight * term
        magnitudes += abs(weight) * magnitude
    return total, magnitudes


def adaptive_step(
    states: Sequence[Vector], direction: Float64, size: Float64, betas: tuple[float, float], epsilon: float
) -> Exact:
    """Compute one step of Adam without bias correction on params, m and v; of AMSGrad if v_hat follows them.

    `size`: the magnitudes of the direction's terms. The division is applied to them to first order.
    """
    params, m, v, *v_hat = (state.astype(np.float64) for state in states)
    beta1, beta2 = betas
    m_size = beta1 * np.abs(m) + (1 - beta1) * size
    v_size = beta2 * v + (1 - beta2) * size**2
    m = beta1 * m + (1 - beta1) * direction
    v = beta2 * v + (1 - beta2) * direction**2
    divisor = np.maximum(v_hat[0], v) if v_hat else v
    root = np.sqrt(divisor)
    below = root + epsilon
    step_size = LR * (m_size / below + np.abs(m) * v_size / (2 * root * below**2))
    step: Exact = {
        "params": (params + LR * m / below, np.abs(params) + step_size),
        "m": (m, m_size),
        "v": (v, v_size),
    }
    return step | {"v_hat": (divisor, np.maximum(v_hat[0], v_size))} if v_hat else step
