"""FedAvgM, and the outer step of DiLoCo, which may be delayed."""

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


def diloco(state, buffer, *, server_lr=0.7, beta=0.9, dampening=0.0, delayed=None):
    *_, updates = facts(buffer)
    if delayed is not None:
        return delayed_nesterov(state, updates, server_lr, beta, delayed)
    return momentum(state, np.full(len(buffer), 1 / len(buffer)), updates, server_lr, beta, dampening, True)


def delayed_nesterov(state, updates, lr, beta, period):
    """A = A + D; x + eta D / P; in each P-th step m = beta m + A / P, x + eta (beta m + D / P), then A = 0."""
    mean, terms = total(np.full(len(updates), 1 / len(updates)), updates)
    velocity, summed, steps = state["delayed_velocity"], state["delayed_sum"] + mean, state["steps"] + 1
    move, weight, terms, ends = mean / period, 1 / period, terms / period, steps == period
    if ends:
        terms = terms + beta * (np.abs(beta * velocity) + (np.abs(state["delayed_sum"]) + np.abs(mean)) / period)
        velocity = beta * velocity + summed / period
        move, weight, summed, steps = move + beta * velocity, weight * (1 + beta), np.zeros_like(mean), 0.0
    after = moved(state, state["params"] + lr * move, delayed_velocity=velocity, delayed_sum=summed, steps=steps)
    more = {"fired": {"period ends": ends}, "margins": {"period ends": 1.0}}
    return after, decided(np.full(len(updates), weight / len(updates)), move, terms, lr, **more)


def delayed_bounds(before, decisions, dv, period):
    """The sum of D, whose error is at most P times that of the direction; the velocity is that of beta m + A / P."""
    sums = period * dv + 16 * EPS * (np.abs(before["delayed_sum"]) + period * decisions["terms"])
    if not decisions["fired"]["period ends"]:
        return {"delayed_velocity": np.zeros_like(dv), "delayed_sum": sums}
    velocity = sums / period + 16 * EPS * np.abs(before["delayed_velocity"])
    return {"delayed_velocity": velocity, "delayed_sum": np.zeros_like(dv)}


def bounds_with(server_lr):
    def bounds(before, buffer, after, decisions, dv, options):
        """The error of the direction, and of the products and sums of the velocity and the move."""
        if "delayed" in options:
            return delayed_bounds(before, decisions, dv, options["delayed"])
        beta, lr = options.get("beta", 0.9), options.get("server_lr", server_lr)
        velocity = dv + 4 * EPS * (np.abs(beta * before["velocity"]) + np.abs(decisions["direction"]))
        move = dv + velocity + 4 * EPS * (np.abs(decisions["direction"]) + np.abs(after["velocity"]))
        return {"velocity": velocity, "params": lr * move + 4 * EPS * np.abs(after["params"])}

    return bounds


ROUNDS = {"fedavgm": fedavgm, "diloco": diloco}
BOUNDS = {"fedavgm": bounds_with(1.0), "diloco": bounds_with(0.7)}
VECTORS = dict.fromkeys(ROUNDS, ("velocity",)) | {"diloco-delayed": ("delayed_velocity", "delayed_sum")}
FIRES = {"diloco-delayed": {"period ends"}}
NOT_STREAMED = {
    "diloco-delayed": "diloco replaces its rule vectors (delayed_velocity, delayed_sum) by the vectors of a full buffer"
}
VARIANTS = {
    "diloco-delayed": ("diloco", {"delayed": 3, "beta": 0.8}),
    "fedavgm-nesterov": ("fedavgm", {"beta": 0.5, "server_lr": 0.1, "nesterov": True}),
    "diloco-look-ahead": ("diloco", {"beta": 0.5, "server_lr": 0.1, "dampening": 0.5}),
}
