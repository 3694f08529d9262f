"""How far the engine's round may be from the oracle's, element by element, if both start from the same state.

All bounds are to first order in eps = 2^-53, and count the roundings of both sides; none is measured or tuned.

weights     A law is a fixed number of roundings (under 20), and at most 2 tau more for a power; a sum of M of them, M
            more. So both sides' weights differ relatively by omega = 2 (2 tau_max + 2 M + 20) eps.
direction   A sum of n rounded products: 2 (n + 2) eps |terms| (see oracle.py), and omega |terms| through the weights.
            Rows: the engine keeps their sum, and each row that is written adds at most (N + 2) eps times the largest
            entry so far to its error.
step        What is read, d x = |lr| dv + ...; the moments, with d(D^2) = 2 |D| dv + dv^2; sqrt(V) by
            |sqrt a - sqrt b| <= min(|a - b| / sqrt a, sqrt |a - b|); a quotient by
            |m'/q' - m/q| <= (dm + |m/q| dq) / (q - dq). Yogi's sign may differ where |v - D^2| is below its error.
rounding    Every vector that is written is rounded once, to the type of params.
inner products  Both trees of sums are at most DEPTH deep, so that <x, y> is off by at most DEPTH eps |x| |y|.

streaming   accumulate=True sums raw_i u_i and multiplies once: M + 1 roundings of the terms, one of the product, 2
            more with params; "buffered" M + 1, or M + 2 with params. Its weights are raw_i times the factor, 3
            roundings apart from w_i; where an exponential law is divided by its sum, both sides count from another
            origin, and each has M + 7: a power of under 2 eps, an example count, M for the sum, 2 quotients. In all
            at most (M + 4) + (M + 2) + 2 (M + 7) = 4 (M + 5) eps |terms| between the two directions. Against the oracle
            the bounds above hold as they are: they count 2 M + 3 roundings of the terms, and the weights' own.

WKAFL. With t = alpha * last estimate and e_i the coefficient of x_i = g_i + t in the estimate g, x_i is formed with two
roundings of what is no larger than |g_i| + |t|, and g with M + 2 more of sum_i e_i (|g_i| + |t|). So with

    kappa   = sum_i e_i (|g_i| + |t|) / |g|,    kappa_i = (|g_i| + |t|) / |x_i|

and delta = (DEPTH + 2 M + 12) eps, which also counts the sums and the few operations on them, of both sides,
    n_i = |x_i|, and with it a clip to CB, is off by delta kappa_i, relatively;
    e_i by epsilon = omega + max_i delta kappa_i;  |g| by (delta + epsilon) kappa;
    cos_i by sigma_i = 3 delta (kappa + kappa_i) + 2 epsilon kappa, absolutely;
    p_i by 2 beta max_i sigma_i + (M + 10) eps, relatively;
    a clip to B |g| by delta (kappa + 2 kappa_i) + epsilon kappa.
"""

import math

import numpy as np

import oracle
from oracle import EPS, TINY32, U32
from papers import facts, inner, norm

DEPTH = 150  #: lanes 64 + 5, blocks 32, superblocks 24 for 2^40 elements; NumPy's pairwise sums fewer


def allowed(name, before, buffer, after, decisions, dtype, written=0, largest=0.0, dv=None, **options):
    """{vector: bound (d,)}; `written` rows so far, and their `largest` entry; `dv`: of the direction, if not ours."""
    dv = direction_bound(name, before, buffer, decisions, options) if dv is None else dv
    if "rows" in after and written:
        dv = dv + written * (before["num_clients"] + 2) * EPS * largest
    if not decisions["stepped"]:
        return {vector: np.zeros_like(before["params"]) for vector in ("params", *oracle.VECTORS.get(name, ()))}
    out = {}
    if "m" in after:
        out = adaptive_bounds(name, before, after, decisions, dv, options)
    else:
        move = np.abs(decisions["server_lr"] * decisions["direction"])
        out["params"] = decisions["server_lr"] * dv + 24 * EPS * (np.abs(before["params"]) + move)
    if name == "wkafl":
        kept = "direction" if options.get("memory") == "aggregate" else "estimate"
        out["estimate"] = dv if kept == "direction" else estimate_bound(before, buffer, decisions, options)
    elif name == "gsgm":
        total = dv + 16 * EPS * (np.abs(before["pass_sum"]) + decisions["terms"])
        ends = bool(decisions["fired"]["pass ends"])
        out["momentum"] = total / (before["rounds_in_pass"] + 1) if ends else np.zeros_like(dv)
        out["pass_sum"] = np.zeros_like(dv) if ends else total
    elif name == "zenopp":
        return {"params": rounded(out["params"], after["params"], dtype), "validation": np.zeros_like(dv)}
    return {vector: rounded(bound, after[vector], dtype) for vector, bound in out.items()}


def rounded(bound, result, dtype):
    """With one rounding to the type that is written."""
    if dtype == "float64":
        return bound + 2 * EPS * np.abs(result)
    return bound + U32 * (np.abs(result) + bound) * (1 + 1e-6) + TINY32


def omega(buffer):
    tau, *_ = facts(buffer)
    return 2 * (2 * tau.max() + 2 * len(buffer) + 20) * EPS


def weights_error(name, before, buffer, decisions, options):
    """Relative."""
    if name == "zenopp":
        return 2 * (DEPTH + 4) * EPS
    if name == "wkafl":
        return wkafl_errors(before, buffer, decisions, options)["factors"]
    return omega(buffer)


def direction_bound(name, before, buffer, decisions, options):
    terms = decisions["terms"]
    relative = weights_error(name, before, buffer, decisions, options)
    return oracle.sum_bound(terms, 2 * len(buffer) + 3 + len(before["rows"])) + relative * terms


def streamed(buffer, decisions):
    """How far the directions of both memory modes may be apart."""
    return 4 * (len(buffer) + 5) * EPS * decisions["terms"]


def adaptive_bounds(name, before, after, decisions, dv, options):
    defaults = {"beta1": 0.0 if name == "fedadagrad" else 0.9, "beta2": 0.99}
    beta1, beta2 = (options.get(key, default) for key, default in defaults.items())
    epsilon = options.get("epsilon", 1e-8 if name in ("fedams", "fadas") else 1e-3)
    delta, t = decisions["direction"], before["version"] + 1
    corrected = options.get("bias_correction", False)
    root_scale = 1 / math.sqrt(1 - beta2**t) if corrected else 1.0
    first, second = ((2 * t + 20) * EPS / (1 - beta**t if corrected else 1) for beta in (beta1, beta2))

    dm = (1 - beta1) * dv + 8 * EPS * (np.abs(beta1 * before["m"]) + np.abs((1 - beta1) * delta))
    d_square = 2 * np.abs(delta) * dv + dv**2 + 4 * EPS * delta**2
    share = 1.0 if name == "fedadagrad" else 1 - beta2
    d_v = share * d_square + 8 * EPS * (np.abs(before["v"]) + share * delta**2)
    if name == "fedyogi":
        unsure = np.abs(before["v"] - delta**2) <= d_square
        d_v = d_v + np.where(unsure, 2 * share * (delta**2 + d_square), 0)

    root = np.sqrt(after.get("v_hat", after["v"]))
    d_root = np.minimum(d_v / np.maximum(root, 1e-300), np.sqrt(d_v))
    q = root_scale * root + epsilon
    dq = root_scale * d_root + (second + 8 * EPS) * q
    assert np.all(dq < q / 2)
    lr, quotient = decisions["server_lr"], np.abs(after["m"] / q)
    params = lr * (dm + quotient * dq) / (q - dq) + (first + 8 * EPS) * lr * quotient
    params = params + 8 * EPS * np.abs(before["params"])
    return {"params": params, "m": dm, "v": d_v} | ({"v_hat": d_v} if "v_hat" in after else {})


def wkafl_errors(before, buffer, decisions, options):
    """Of clips, cosines, coefficients of the estimate and of the step: see the module. Relative; cosines absolute."""
    *_, gradients = facts(buffer)
    alpha = options.get("alpha", 0.1) if options.get("momentum", True) else 0.0
    tilt = alpha * before["estimate"]
    sizes = np.array([norm(g) for g in gradients]) + norm(tilt)
    norms = np.array([norm(g + tilt) for g in gradients])
    weights = decisions["estimate_weights"] * decisions["first_clip"]
    length, delta = decisions["estimate_length"], (DEPTH + 2 * len(buffer) + 12) * EPS
    kappa = inner(weights, sizes) / length if length > 0 else math.inf
    own = np.where(norms > 0, sizes / np.where(norms > 0, norms, 1), 0)
    epsilon = omega(buffer) + delta * np.max(own)
    sigma = 3 * delta * (kappa + own) + 2 * epsilon * kappa
    two = delta * (kappa + 2 * own) + epsilon * kappa
    exponent = 2 * options.get("beta", 10.0) * sigma.max() + (len(buffer) + 10) * EPS
    by_estimate = not options.get("selection", True) or bool(decisions["fired"]["all rejected"])
    factors = epsilon if by_estimate else exponent + np.max(two) + epsilon
    return {"clip": delta * own, "estimate": epsilon, "accepted": sigma, "stage two clip": two, "factors": factors}


def estimate_bound(before, buffer, decisions, options):
    *_, gradients = facts(buffer)
    alpha = options.get("alpha", 0.1) if options.get("momentum", True) else 0.0
    tilt = np.abs(alpha * before["estimate"])
    weights = decisions["estimate_weights"] * decisions["first_clip"]
    terms = sum(w * (np.abs(g) + tilt) for w, g in zip(weights, gradients, strict=True))
    relative = wkafl_errors(before, buffer, decisions, options)["estimate"]
    return oracle.sum_bound(terms, 2 * len(buffer) + 3) + relative * terms


def decision_errors(name, before, buffer, decisions, options):
    """{what is decided: error of the quantity that decides}, in the units of decisions["margins"]."""
    if name == "wkafl":
        errors = wkafl_errors(before, buffer, decisions, options)
        return {what: errors[what] for what in ("accepted", "clip", "stage two clip")} | {
            "stage": 2 * (len(buffer) + 2) * EPS
        }
    if name == "zenopp":
        # |<v, g^>| may cancel: against |v| |g^| = |v|^2.
        (gradient,) = facts(buffer)[3]
        goal, square = norm(before["validation"]) ** 2, norm(gradient) ** 2
        gamma, rho, epsilon = (options.get(k, d) for k, d in (("gamma", 0.1), ("rho", 0.02), ("epsilon", 0.1)))
        size = rho * (goal if options.get("scaled", True) else square)
        hat = gradient * math.sqrt(goal / square) if square > 0 else gradient
        scale = abs(gamma * inner(before["validation"], hat)) + size + gamma * epsilon
        return {"accepted": 2 * (DEPTH + 8) * EPS * (gamma * goal + size + gamma * epsilon) / scale}
    return {}
