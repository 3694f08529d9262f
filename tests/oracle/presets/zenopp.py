"""Zeno++."""

import math

import numpy as np

from oracle import DEPTH, EPS
from papers import decided, f64, facts, inner, moved, norm


def zenopp(state, buffer, *, server_lr=0.005, gamma=0.1, rho=0.02, epsilon=0.1, scaled=True):
    """Accepted iff gamma <v, g^> - rho |g^|^2 >= -gamma epsilon, g^ = g |v| / |g|; unscaled: |g|^2 in the middle."""
    *_, (gradient,) = facts(buffer)
    validation, length = state["validation"], norm(gradient)
    scale = norm(validation) / length if length > 0 else 0.0
    hat = scale * gradient
    agreement, size = gamma * inner(validation, hat), rho * (norm(hat) ** 2 if scaled else length**2)
    accepted = length > 0 and agreement - size >= -gamma * epsilon
    margin = abs(agreement - size + gamma * epsilon) / (abs(agreement) + size + gamma * epsilon) if length > 0 else 1.0
    more = {"margins": {"accepted": f64([margin])}, "stepped": accepted}
    decisions = decided([scale if accepted else 0.0], hat, np.abs(hat), server_lr, np.array([accepted]), **more)
    return (moved(state, state["params"] - server_lr * hat) if accepted else state), decisions


def weights_error(before, buffer, decisions, options):
    return 2 * (DEPTH + 4) * EPS


def decision_errors(before, buffer, decisions, options):
    # |<v, g^>| may cancel: against |v| |g^| = |v|^2.
    (gradient,) = facts(buffer)[3]
    goal, square = norm(before["validation"]) ** 2, norm(gradient) ** 2
    gamma, rho, epsilon = (options.get(k, d) for k, d in (("gamma", 0.1), ("rho", 0.02), ("epsilon", 0.1)))
    size = rho * (goal if options.get("scaled", True) else square)
    hat = gradient * math.sqrt(goal / square) if square > 0 else gradient
    scale = abs(gamma * inner(before["validation"], hat)) + size + gamma * epsilon
    return {"accepted": 2 * (DEPTH + 8) * EPS * (gamma * goal + size + gamma * epsilon) / scale}


ROUNDS, VECTORS = {"zenopp": zenopp}, {"zenopp": ("validation",)}  # what is handed in does not change
WEIGHTS, DECISIONS = {"zenopp": weights_error}, {"zenopp": decision_errors}
VARIANTS = {"zenopp-unscaled": ("zenopp", {"scaled": False})}
FIRES = {"zenopp": {"accepted", "stepped"}, "zenopp-unscaled": {"accepted", "stepped"}}
NOT_STREAMED = {"zenopp": "zenopp's come from the inner products of a full buffer"}
