"""The float64 references, from the tests' oracle. Each value comes with the sum of its terms' magnitudes."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.spec.arrays import Vector
from bench.spec.inputs import LR, Float64
from bench.spec.row import Exact

sys.path.append(str(Path(__file__).parents[2] / "tests" / "oracle"))
oracle: Any = import_module("oracle")


def weighted_sum(
    weights: Vector, vectors: Sequence[Vector], subtracted: Sequence[Vector] | None = None
) -> tuple[Float64, Float64]:
    """Return sum_i w_i (x_i - y_i) and sum_i |w_i| (|x_i| + |y_i|)."""
    zero = np.zeros(len(vectors[0]))
    if subtracted is None:
        return oracle.combine(zero, vectors, weights)  # type: ignore[no-any-return]
    return oracle.cached_difference(vectors, weights, subtracted, zero, 1)  # type: ignore[no-any-return]


def adaptive_step(
    states: Sequence[Vector], direction: Float64, size: Float64, betas: tuple[float, float], epsilon: float
) -> Exact:
    """Compute one step of Adam without bias correction on params, m and v; of AMSGrad if v_hat follows them.

    `size`: the magnitudes of the direction's terms. The division is applied to them to first order.
    """
    params, m, v, *v_hat = (state.astype(np.float64) for state in states)
    new = oracle.step("amsgrad" if v_hat else "adam", params, direction, [m, v, *v_hat], LR, *betas, epsilon)
    m_size, v_size = betas[0] * np.abs(m) + (1 - betas[0]) * size, betas[1] * v + (1 - betas[1]) * size**2
    root = np.sqrt(new[-1])  # of v_hat, or of v
    below = root + epsilon
    step_size = LR * (m_size / below + np.abs(new[1]) * v_size / (2 * root * below**2))
    sizes = np.abs(params) + step_size, m_size, v_size, *(np.maximum(old, v_size) for old in v_hat)
    return dict(zip(("params", "m", "v", "v_hat"), zip(new, sizes, strict=True), strict=False))
