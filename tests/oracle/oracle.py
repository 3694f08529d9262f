"""The papers' formulas in plain float64 NumPy, written without a look at the engine; imports nothing of afflux.
The rules of the papers are in presets/, their bounds in bounds.py; here are the stages that the engine is made of.

Bounds. eps = 2^-53 is the unit roundoff of float64, u32 = 2^-24 that of float32. A float64 sum of n terms, in any order
and with rounded products, differs from the exact one by at most (n + 2) eps sum |terms| (Higham, Accuracy and
Stability, section 4.2, to first order; the +2 leaves room for the second). One rounding to float32 adds u32 |result|,
or half the smallest subnormal. The oracle makes errors of the same size, so that a bound between engine and oracle is
twice that.
"""

import numpy as np

from papers import f64, facts, hinge, polynomial

__all__ = [
    "DEPTH", "EPS", "TINY32", "U32", "bfloat16", "cached_difference", "combine", "direction", "f64", "hinge",
    "next_memories", "omega", "ordered_sum", "polynomial", "rounded_bound", "statistics", "step", "sum_bound",
]  # fmt: skip

EPS = 2.0**-53
U32 = 2.0**-24
TINY32 = 2.0**-150
DEPTH = 150  #: lanes 64 + 5, blocks 32, superblocks 24 for 2^40 elements; NumPy's pairwise sums fewer


def sum_bound(terms_abs_sum, n):
    """Two float64 sums of the same n products in different orders differ by at most this."""
    return 2 * (n + 2) * EPS * terms_abs_sum


def rounded_bound(result, terms_abs_sum, n, dtype=np.float32):
    """As sum_bound, when the engine's result is then rounded to `dtype`: to float32, or not again to float64."""
    if dtype == np.float64:
        return sum_bound(terms_abs_sum, n)
    return sum_bound(terms_abs_sum, n) + U32 * np.abs(result) * (1 + 1e-6) + TINY32


def omega(buffer):
    """The relative error of weights that a law of staleness makes: see bounds.py."""
    tau, *_ = facts(buffer)
    return 2 * (2 * tau.max() + 2 * len(buffer) + 20) * EPS


def bfloat16(array):
    """Float32 values rounded to 8 significant bits, half to even, in bfloat16's range; as float32."""
    exact = f64(np.asarray(array, np.float32))
    exponent = np.maximum(np.frexp(exact)[1], -125)  # below it, subnormals all have the unit 2^-133
    unit = np.ldexp(1.0, exponent - 8)
    rounded = np.rint(exact / unit) * unit
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded).astype(np.float32)


def ordered_sum(numbers):
    """One after the other: the built-in sum of floats compensates its rounding from Python 3.12 on."""
    result = 0.0
    for number in numbers:
        result = result + number
    return result


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


# Engine stages: float64, in the documented order, each written vector rounded once; equal bit for bit.


def weighted(coefficients, vectors, start=0.0):
    """start + c_0 a_0 + c_1 a_1 + ..., one after the other; what has coefficient 0 is left out."""
    for c, a in zip(coefficients, vectors, strict=True):
        start = start + c * f64(a) if c != 0 else start
    return start


def kept_masses(weights, trim):
    """What is kept of sorted values, in whole units of the sum of these positive weights / 2^28: a function of the
    masses (M, d) in the order of the values.
    """
    units = [int(np.floor(w / ordered_sum(weights) * 2**28 + 0.5)) for w in weights]
    total, count = sum(units), len(units)
    low = int(np.floor(trim * total + 0.5))
    nearest = low + count - 1  # a rest below M units counts as cut
    if total - 2 * low < 2 * count:  # the two medians: a boundary within M / 2 of the middle is in the middle
        low, nearest = 0, (total - count) // 2

    def kept(masses):
        ends = np.cumsum(masses, axis=0)
        ends = np.where(ends >= total - nearest, total - low, np.where(ends <= nearest, low, ends))
        return np.diff(ends, axis=0, prepend=low)

    return units, kept


def trimmed(updates, weights, trim):
    """W times the weighted trimmed mean of each element, W the sum of the weights."""
    pairs = [(f64(u), w) for u, w in zip(updates, weights, strict=True) if w != 0]
    if not pairs:
        return 0.0
    vectors, positive = np.array([u for u, _ in pairs]), [w for _, w in pairs]
    units, kept = kept_masses(positive, trim)
    masses = np.array(units)[:, None]
    order = np.lexsort((np.copysign(masses, vectors), vectors), axis=0)
    masses = kept(np.take_along_axis(np.broadcast_to(masses, vectors.shape), order, axis=0))
    total = weighted_rows(masses, np.take_along_axis(vectors, order, axis=0))
    return ordered_sum(weights) * (total / masses.sum(axis=0))


def weighted_rows(masses, vectors):
    total = np.zeros(vectors.shape[1])
    for mass, vector in zip(masses, vectors, strict=True):
        total = total + mass * vector
    return total


def direction(params, updates, weights, params_weight=0.0, memory=((), ()), cache=None, trim=0.0):
    """v and, with a cache, its new sum; memory: (vectors, weights), cache: (kind, sum, N, rows, replaced, factor)."""
    v = weighted([params_weight, *memory[1]], [params, *memory[0]], np.zeros(len(params)))
    if trim:
        return v + trimmed(updates, weights, trim), None
    if cache is None:
        return weighted(weights, updates, v), None
    kind, old_sum, num_clients, rows, replaced, factor = cache
    inverse = 1.0 / num_clients
    new_sum = old_sum
    for update, row, is_new in zip(updates, rows, replaced, strict=True):
        if is_new:
            new_sum = new_sum + (f64(update) - f64(0.0 if row is None else row))
    if kind == "mean":
        return v + new_sum * inverse, new_sum
    v = v + old_sum * (factor * inverse)
    for update, weight, row in zip(updates, weights, rows, strict=True):
        if weight != 0:
            v = v + weight * (f64(update) - factor * f64(0.0 if row is None else row))
    return v, new_sum


def next_memories(vectors, updates, coefficients):
    """A vector whose row is 1 at itself and 0 elsewhere stays as it is, the signs of its zeros too."""
    every, zeros = [*vectors, *updates], np.zeros(len(vectors[0]))
    return [
        own if np.array_equal(row, unit) else weighted(row, every, zeros).astype(own.dtype)
        for own, row, unit in zip(vectors, coefficients, np.eye(*np.shape(coefficients)), strict=True)
    ]


def sign(x):
    """-1, 0 or 1, where 0 keeps its own sign."""
    return np.where(x == 0, x, np.sign(x))


def step(kind, params, d, states, lr, beta1=0.0, beta2=0.0, epsilon=0.0, root_scale=1.0):
    """Params and states after one step, rounded to the type of params."""
    x, (m, v, v_hat) = f64(params), [*map(f64, states), *[0.0] * 3][:3]
    if kind == "assign":
        return [(lr * d).astype(params.dtype)]
    if kind == "sgd":
        new, move = [], d
    elif kind == "momentum":
        move = beta1 * m + d
        new = [move]
    elif kind == "nesterov":
        new = [beta1 * m + (1 - beta2) * d]
        move = d + beta1 * new[0]
    elif kind not in ("adam", "amsgrad", "yogi", "adagrad"):
        raise KeyError(f"oracle.step has no equation of the kind {kind!r}")
    else:
        m = beta1 * m + (1 - beta1) * d
        if kind == "adagrad":
            v = v + d * d
        elif kind == "yogi":
            v = v - (1 - beta2) * d * d * sign(v - d * d)
        else:
            v = beta2 * v + (1 - beta2) * d * d
        new, big = [m, v], v
        if kind == "amsgrad":
            big = np.where(v_hat < v, v, v_hat)  # of two zeros the first; np.maximum takes either
            new.append(big)
        return [a.astype(params.dtype) for a in (x + lr * m / (np.sqrt(big) * root_scale + epsilon), *new)]
    return [a.astype(params.dtype) for a in (x + lr * move, *new)]


def statistics(kind, server, clients, weights, lr=1.0):
    """The statistics after a round: those of the accepted arrivals, by their final weights, with shares that are never
    negative; an element in which all agree stays. `clients` and `weights` are those of the accepted.
    """
    server, clients, weights = f64(server), [f64(client) for client in clients], f64(weights)
    if not clients:
        return server
    total = ordered_sum(weights)
    shares, own = weights, 0.0
    if total <= 0 or weights.min() < 0:
        shares = np.full(len(clients), 1 / len(clients))
    elif kind == "model":
        own = max(0.0, 1 - lr * total)
        shares = lr * weights if own > 0 else weights / total
    else:
        shares = weights / total
    mean = own * server + ordered_sum(share * client for share, client in zip(shares, clients, strict=True))
    agree = np.all([client == server for client in clients], axis=0)
    return np.where(agree, server, mean)
