"""How far the engine's round may be from the oracle's, element by element, if both start from the same state.

All bounds are to first order in eps = 2^-53, and count the roundings of both sides; none is measured or tuned.

weights     A law is a fixed number of roundings (under 20), and at most 2 tau more for a power; a sum of M of them, M
            more. So both sides' weights differ relatively by omega = 2 (2 tau_max + 2 M + 20) eps.
direction   A sum of n rounded products: 2 (n + 2) eps |terms| (see oracle.py), and omega |terms| through the weights.
            Rows: the engine keeps their sum, and each row that is written adds at most (N + 2) eps times the largest
            entry so far to its error.
step        What is read, d x = |lr| dv + ...; of servers with a second moment: see adaptive.py.
rounding    Every vector that is written is rounded once, to the type of params.
inner products  Both trees of sums are at most DEPTH deep, so that <x, y> is off by at most DEPTH eps |x| |y|.

streaming   accumulate=True sums raw_i u_i and multiplies once: M + 1 roundings of the terms, one of the product, 2
            more with params; "buffered" M + 1, or M + 2 with params. Its weights are raw_i times the factor, 3
            roundings apart from w_i; where an exponential law is divided by its sum, both sides count from another
            origin, and each has M + 7: a power of under 2 eps, an example count, M for the sum, 2 quotients. In all
            at most (M + 4) + (M + 2) + 2 (M + 7) = 4 (M + 5) eps |terms| between the two directions. Against the oracle
            the bounds above hold as they are: they count 2 M + 3 roundings of the terms, and the weights' own.
"""

import numpy as np

import oracle
from oracle import EPS, TINY32, U32, omega
from presets import BOUNDS, DECISIONS, VECTORS, WEIGHTS


def allowed(name, before, buffer, after, decisions, dtype, written=0, largest=0.0, dv=None, **options):
    """{vector: bound (d,)}; `written` rows so far, and their `largest` entry; `dv`: of the direction, if not ours."""
    dv = direction_bound(name, before, buffer, decisions, options) if dv is None else dv
    if "rows" in after and written:
        dv = dv + written * (before["num_clients"] + 2) * EPS * largest
    kept = [vector for vector in VECTORS.get(name, ()) if vector in before]  # a variant may keep others
    same = dict.fromkeys(("params", *kept), np.zeros_like(before["params"]))
    if not decisions["stepped"]:
        return same
    move = np.abs(decisions["server_lr"] * decisions["direction"])
    out = {"params": decisions["server_lr"] * dv + 24 * EPS * (np.abs(before["params"]) + move)}
    if name in BOUNDS:
        out |= BOUNDS[name](before, buffer, after, decisions, dv, options)
    return same | {vector: rounded(bound, after[vector], dtype) for vector, bound in out.items()}


def rounded(bound, result, dtype):
    """With one rounding to the type that is written."""
    if dtype == "float64":
        return bound + 2 * EPS * np.abs(result)
    return bound + U32 * (np.abs(result) + bound) * (1 + 1e-6) + TINY32


def weights_error(name, before, buffer, decisions, options):
    """Relative."""
    return WEIGHTS[name](before, buffer, decisions, options) if name in WEIGHTS else omega(buffer)


def direction_bound(name, before, buffer, decisions, options):
    terms = decisions["terms"]
    relative = weights_error(name, before, buffer, decisions, options)
    return oracle.sum_bound(terms, 2 * len(buffer) + 3 + len(before["rows"])) + relative * terms


def streamed(buffer, decisions):
    """How far the directions of both memory modes may be apart."""
    return 4 * (len(buffer) + 5) * EPS * decisions["terms"]


def decision_errors(name, before, buffer, decisions, options):
    """{what is decided: error of the quantity that decides}, in the units of decisions["margins"]."""
    return DECISIONS[name](before, buffer, decisions, options) if name in DECISIONS else {}
