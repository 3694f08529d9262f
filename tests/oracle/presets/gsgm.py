"""GSGM."""

import numpy as np

from oracle import EPS
from papers import decided, facts, moved, total


def gsgm(state, buffer, *, server_lr=0.005, alpha=0.1):
    """direction = alpha momentum + mean(g); a pass over all clients ends with momentum = mean of its directions."""
    *_, gradients = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    mean, terms = total(weights, gradients)
    direction = alpha * state["momentum"] + mean
    terms = terms + np.abs(alpha * state["momentum"])
    pass_sum, rounds = state["pass_sum"] + direction, state["rounds_in_pass"] + 1
    entered, momentum = state["entered"] + len(buffer), state["momentum"]
    ends = entered == state["num_clients"]
    if ends:
        momentum, pass_sum, rounds, entered = pass_sum / rounds, np.zeros_like(mean), 0.0, 0
    new = {"momentum": momentum, "pass_sum": pass_sum, "rounds_in_pass": rounds, "entered": entered}
    after = moved(state, state["params"] - server_lr * direction, **new)
    return after, decided(weights, direction, terms, server_lr, fired={"pass ends": ends}, margins={"pass ends": 1.0})


def bounds(before, buffer, after, decisions, dv, options):
    sums = dv + 16 * EPS * (np.abs(before["pass_sum"]) + decisions["terms"])
    if decisions["fired"]["pass ends"]:
        return {"momentum": sums / (before["rounds_in_pass"] + 1), "pass_sum": np.zeros_like(dv)}
    return {"momentum": np.zeros_like(dv), "pass_sum": sums}


ROUNDS, BOUNDS, VECTORS = {"gsgm": gsgm}, {"gsgm": bounds}, {"gsgm": ("momentum", "pass_sum")}
SCALARS, FIRES = {"gsgm": {"rounds_in_pass": 0.0}}, {"gsgm": {"pass ends"}}
NOT_STREAMED = {"gsgm": "gsgm replaces its rule vectors (momentum, pass_sum) by the vectors of a full buffer"}
