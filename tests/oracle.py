"""The papers' formulas in plain float64 NumPy, written without a look at the engine; imports nothing of afflux.
The rules of the papers are in papers.py, their bounds in bounds.py; here are the stages that the engine is made of.

Bounds. eps = 2^-53 is the unit roundoff of float64, u32 = 2^-24 that of float32. A float64 sum of n terms, in any order
and with rounded products, differs from the exact one by at most (n + 2) eps sum |terms| (Higham, Accuracy and
Stability, section 4.2, to first order; the +2 leaves room for the second). One rounding to float32 adds u32 |result|,
or half the smallest subnormal. The oracle makes errors of the same size, so that a bound between engine and oracle is
twice that.
"""

import numpy as np

from papers import ROUNDS, VECTORS, f64, hinge, polynomial, start

__all__ = [
    "EPS", "ROUNDS", "TINY32", "U32", "VECTORS", "bfloat16", "cached_difference", "combine", "f64", "hinge",
    "polynomial", "rounded_bound", "start", "sum_bound",
]  # fmt: skip

EPS = 2.0**-53
U32 = 2.0**-24
TINY32 = 2.0**-150


def sum_bound(terms_abs_sum, n):
    """Two float64 sums of the same n products in different orders differ by at most this."""
    return 2 * (n + 2) * EPS * terms_abs_sum


def rounded_bound(result, terms_abs_sum, n, dtype=np.float32):
    """As sum_bound, when the engine's result is then rounded to `dtype`: to float32, or not again to float64."""
    if dtype == np.float64:
        return sum_bound(terms_abs_sum, n)
    return sum_bound(terms_abs_sum, n) + U32 * np.abs(result) * (1 + 1e-6) + TINY32


def bfloat16(array):
    """Float32 values rounded to 8 significant bits, half to even, in bfloat16's range; as float32."""
    exact = f64(np.asarray(array, np.float32))
    exponent = np.maximum(np.frexp(exact)[1], -125)  # below it, subnormals all have the unit 2^-133
    unit = np.ldexp(1.0, exponent - 8)
    rounded = np.rint(exact / unit) * unit
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded).astype(np.float32)


def combine(params, updates, weights, params_weight=0.0):
    """v = c x + sum_i w_i u_i, and the sum of the terms' magnitudes."""
    v = params_weight * f64(params)
    size = np.abs(v)
    for update, weight in zip(updates, weights, strict=True):
        if weight != 0:
            v = v + weight * f64(update)
            size = size + np.abs(weight * f64(update))
    return v, size


def cached_difference(updates, weights, rows, cache_sum, num_clients):
    """CA2FL, Algorithm 2: v = h + sum_i w_i (u_i - h_i); None stands for a row of zeros."""
    v = f64(cache_sum) / num_clients
    size = np.abs(v)
    for update, weight, row in zip(updates, weights, rows, strict=True):
        old = np.zeros_like(v) if row is None else f64(row)
        if weight != 0:
            v = v + weight * (f64(update) - old)
            size = size + np.abs(weight) * (np.abs(f64(update)) + np.abs(old))
    return v, size
