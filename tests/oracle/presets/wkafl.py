"""WKAFL.

Bounds. With t = alpha * last estimate and e_i the coefficient of x_i = g_i + t in the estimate g, x_i is formed with
two roundings of what is no larger than |g_i| + |t|, and g with M + 2 more of sum_i e_i (|g_i| + |t|). So with

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
from oracle import DEPTH, EPS, omega
from papers import cosine, decided, exponential, f64, facts, inner, moved, norm, shrink, total


def wkafl(
    state, buffer, *, server_lr=0.005, alpha=0.1, sim_min=0.3, beta=10.0, gamma=0.1, clip=100.0, stage_two_clip=10.0,
    stage_two_loss=None, stage_two_version=None, selection=True, staleness=True, momentum=True, memory="estimate",
):  # fmt: skip
    """WKAFL, Algorithms 2 and 3, with vectors throughout."""
    tau, _, losses, gradients = facts(buffer)
    # 1. The stage.
    late = stage_two_version is not None and state["version"] >= stage_two_version
    low = stage_two_loss is not None and bool(losses.mean() <= stage_two_loss)
    stage = 2.0 if state["stage"] == 2 or late or low else 1.0
    # 2. The estimate of the round before, and the clip to CB.
    tilt = alpha * state["estimate"] if momentum else np.zeros_like(state["estimate"])
    tilted = [g + tilt for g in gradients]
    norms = f64([norm(g) for g in tilted])
    bound = clip if momentum and staleness else math.inf
    one = shrink(norms, bound)
    tilted = [c * g for c, g in zip(one, tilted, strict=True)]
    # 3. The estimate.
    a = exponential(tau - tau.min()) if staleness else np.ones(len(buffer))
    estimate, _ = total(a / a.sum(), tilted)
    # 4. Who agrees with it.
    length = norm(estimate)
    clipped = f64([norm(g) for g in tilted])
    cosines = np.clip([cosine(g, estimate) for g in tilted], -1.0, 1.0)
    accepted = cosines >= sim_min if selection else np.ones(len(buffer), bool)
    # 5. The clip of stage two.
    two = shrink(clipped, stage_two_clip * length if stage == 2 else math.inf)
    # 6. The step.
    if selection and accepted.any():
        p = np.where(accepted, np.exp(beta * (cosines - cosines.max())), 0.0)  # up to a factor: no overflow
        p = p / p.sum()
        factors = p * two * one
        direction, _ = total(p * two, tilted)
    else:
        factors, direction = a / a.sum() * one, estimate
    lr = server_lr / (1 + gamma * tau.min()) if staleness else server_lr
    _, terms = total(factors, [np.abs(g) + np.abs(tilt) for g in gradients])
    kept = estimate if memory == "estimate" else direction
    after = moved(state, state["params"] - lr * direction, estimate=kept, stage=stage)
    fired = {"clip": one < 1, "stage two clip": two < 1, "all rejected": not accepted.any(), "stage": stage == 2}
    margins = {
        "accepted": np.abs(cosines - sim_min) if selection else np.full(len(buffer), math.inf),
        "clip": np.abs(norms / bound - 1),
        "stage two clip": np.abs(clipped / (stage_two_clip * length) - 1) if length > 0 else np.zeros(len(buffer)),
        "stage": abs(losses.mean() / stage_two_loss - 1) if stage_two_loss else math.inf,
    }
    more = {"fired": fired, "margins": margins, "cosines": cosines, "first_clip": one, "second_clip": two,
            "estimate_weights": a / a.sum(), "memory_part": float(factors.sum()) * (alpha if momentum else 0.0),
            "estimate_length": length}  # fmt: skip
    return after, decided(factors, direction, terms, lr, accepted, **more)


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


def weights_error(before, buffer, decisions, options):
    return wkafl_errors(before, buffer, decisions, options)["factors"]


def bounds(before, buffer, after, decisions, dv, options):
    kept = dv if options.get("memory") == "aggregate" else estimate_bound(before, buffer, decisions, options)
    return {"estimate": kept}


def estimate_bound(before, buffer, decisions, options):
    *_, gradients = facts(buffer)
    alpha = options.get("alpha", 0.1) if options.get("momentum", True) else 0.0
    tilt = np.abs(alpha * before["estimate"])
    weights = decisions["estimate_weights"] * decisions["first_clip"]
    terms = sum(w * (np.abs(g) + tilt) for w, g in zip(weights, gradients, strict=True))
    relative = wkafl_errors(before, buffer, decisions, options)["estimate"]
    return oracle.sum_bound(terms, 2 * len(buffer) + 3) + relative * terms


def decision_errors(before, buffer, decisions, options):
    errors = wkafl_errors(before, buffer, decisions, options)
    own = {what: errors[what] for what in ("accepted", "clip", "stage two clip")}
    return own | {"stage": 2 * (len(buffer) + 2) * EPS}


ROUNDS, VECTORS, SCALARS = {"wkafl": wkafl}, {"wkafl": ("estimate",)}, {"wkafl": {"stage": 1.0}}
BOUNDS, WEIGHTS, DECISIONS = {"wkafl": bounds}, {"wkafl": weights_error}, {"wkafl": decision_errors}
#: Clips that bite and a stage that comes, for vectors of the size that tests draw.
BITING = {"clip": 30.0, "stage_two_clip": 1.2, "stage_two_loss": 0.5}
VARIANTS = {
    "wkafl-biting": ("wkafl", BITING),
    "wkafl-version": ("wkafl", BITING | {"stage_two_loss": None, "stage_two_version": 20}),
    "wkafl-strict": ("wkafl", BITING | {"sim_min": 0.75, "beta": 50.0}),
    "wkafl-no-selection": ("wkafl", BITING | {"selection": False}),
    "wkafl-no-staleness": ("wkafl", BITING | {"staleness": False}),
    "wkafl-no-momentum": ("wkafl", BITING | {"momentum": False}),
    "wkafl-aggregate": ("wkafl", BITING | {"memory": "aggregate", "alpha": 0.5}),
}
FIRES = {
    "wkafl": {"accepted"},
    "wkafl-biting": {"accepted", "clip", "stage two clip", "stage"},
    "wkafl-version": {"accepted", "clip", "stage two clip", "stage"},
    "wkafl-strict": {"accepted", "clip", "stage two clip", "stage", "all rejected"},
    "wkafl-no-selection": {"clip", "stage"},
    "wkafl-no-staleness": {"accepted", "stage two clip", "stage"},
    "wkafl-no-momentum": {"accepted", "stage two clip", "stage"},
    "wkafl-aggregate": {"accepted", "clip", "stage two clip", "stage"},
}
NOT_STREAMED = {"wkafl": "wkafl's come from the inner products of a full buffer"}
