"""Clipped updates, divided by M; the noise is tested apart (tests/rules/test_dp_fedbuff.py)."""

from oracle import DEPTH, EPS
from papers import decided, facts, moved, norm, shrink, total


def dp_fedbuff(state, buffer, *, server_lr=1.0, clip=1.0):
    """x + eta / M sum_i min(1, C / |u_i|) u_i."""
    *_, updates = facts(buffer)
    weights = shrink([norm(update) for update in updates], clip) / len(updates)
    direction, terms = total(weights, updates)
    return moved(state, state["params"] + server_lr * direction), decided(weights, direction, terms, server_lr)


ROUNDS = {"dp_fedbuff": dp_fedbuff}
WEIGHTS = {"dp_fedbuff": lambda *_: 4 * (DEPTH + 8) * EPS}
VARIANTS = {"dp_fedbuff-wide": ("dp_fedbuff", {"clip": 20.0, "server_lr": 0.5})}
