"""FLTrust and AFLGuard, which compare gradients with one of the server's own data."""

import numpy as np

from oracle import DEPTH, EPS
from papers import cosine, decided, f64, facts, moved, norm, total


def fltrust(state, buffer, *, server_lr=0.1):
    """t_i = max(0, cos(g_i, v)); x - eta sum t_i |v| / |g_i| g_i / sum t."""
    *_, gradients = facts(buffer)
    validation = state["validation"]
    cosines = f64([cosine(gradient, validation) for gradient in gradients])
    trust = np.maximum(cosines, 0.0)
    scale = f64([norm(validation) / norm(gradient) if norm(gradient) > 0 else 0.0 for gradient in gradients])
    weights = trust * scale / (trust.sum() or 1.0)
    direction, terms = total(weights, gradients)
    more = {"margins": {"accepted": np.abs(cosines)}, "stepped": bool(trust.sum() > 0)}
    decisions = decided(weights, direction, terms, server_lr, trust > 0, **more)
    return (moved(state, state["params"] - server_lr * direction) if trust.sum() > 0 else state), decisions


def aflguard(state, buffer, *, server_lr=0.1, most=1.5):
    """Accepted iff |g - v| <= lambda |v|; x - eta times the mean of the accepted."""
    *_, gradients = facts(buffer)
    validation = state["validation"]
    distances = f64([norm(gradient - validation) for gradient in gradients])
    limit = most * norm(validation)
    accepted = distances <= limit
    weights = accepted / max(accepted.sum(), 1)
    direction, terms = total(weights, gradients)
    sizes = f64([(norm(gradient) + norm(validation)) ** 2 + limit**2 for gradient in gradients])
    margins = {"accepted": np.abs(distances**2 - limit**2) / sizes}
    decisions = decided(weights, direction, terms, server_lr, accepted, margins=margins, stepped=bool(accepted.any()))
    return (moved(state, state["params"] - server_lr * direction) if accepted.any() else state), decisions


def trust_error(before, buffer, decisions, options):
    """A cosine near 0 has an absolute error, and with it its own share; the sum has that of all."""
    *_, gradients = facts(buffer)
    cosines = [abs(cosine(gradient, before["validation"])) for gradient in gradients]
    return 4 * (DEPTH + 8) * EPS * (1 + 1 / min(c for c in cosines if c > 0))


ROUNDS = {"fltrust": fltrust, "aflguard": aflguard}
VECTORS = dict.fromkeys(ROUNDS, ("validation",))  # what is handed in does not change
WEIGHTS = {"fltrust": trust_error, "aflguard": lambda *_: EPS}
DECISIONS = dict.fromkeys(ROUNDS, lambda *_: {"accepted": 16 * (DEPTH + 8) * EPS})
VARIANTS = {"aflguard-wide": ("aflguard", {"most": 3.0, "server_lr": 0.01})}
FIRES = {"fltrust": {"accepted"}, "aflguard": {"accepted"}, "aflguard-wide": {"accepted"}}
NOT_STREAMED = {name: f"{name}'s come from the inner products of a full buffer" for name in ROUNDS}
