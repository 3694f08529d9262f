"""FedAvgM, and the outer step of DiLoCo."""

import numpy as np

from oracle import EPS
from papers import decided, facts, moved, total


def momentum(state, weights, updates, lr, beta, dampening, nesterov):
    """velocity = beta velocity + (1 - dampening) D; x + eta velocity, or x + eta (D + beta velocity)."""
    mean, terms = total(weights, updates)
    velocity = beta * state["velocity"] + (1 - dampening) * mean
    move = mean + beta * velocity if nesterov else velocity
    return moved(state, state["params"] + lr * move, velocity=velocity), decided(weights, mean, terms, lr)


def fedavgm(state, buffer, *, server_lr=1.0, beta=0.9, nesterov=False):
    _, n, _, updates = facts(buffer)
    return momentum(state, n / n.sum(), updates, server_lr, beta, 0.0, nesterov)


def diloco(state, buffer, *, server_lr=0.7, beta=0.9, dampening=0.0):
    *_, updates = facts(buffer)
    return momentum(state, np.full(len(buffer), 1 / len(buffer)), updates, server_lr, beta, dampening, True)


def bounds_with(server_lr):
    def bounds(before, buffer, after, decisions, dv, options):
        """The error of the direction, and of the products and sums of the velocity and the move."""
        beta, lr = options.get("beta", 0.9), options.get("server_lr", server_lr)
        velocity = dv + 4 * EPS * (np.abs(beta * before["velocity"]) + np.abs(decisions["direction"]))
        move = dv + velocity + 4 * EPS * (np.abs(decisions["direction"]) + np.abs(after["velocity"]))
        return {"velocity": velocity, "params": lr * move + 4 * EPS * np.abs(after["params"])}

    return bounds


ROUNDS = {"fedavgm": fedavgm, "diloco": diloco}
BOUNDS = {"fedavgm": bounds_with(1.0), "diloco": bounds_with(0.7)}
VECTORS = dict.fromkeys(ROUNDS, ("velocity",))
VARIANTS = {
    "fedavgm-nesterov": ("fedavgm", {"beta": 0.5, "server_lr": 0.1, "nesterov": True}),
    "diloco-look-ahead": ("diloco", {"beta": 0.5, "server_lr": 0.1, "dampening": 0.5}),
}
