"""CA2FL, MF-CA2FL and FedStale."""

import numpy as np

import rows
from papers import decided, f64, facts, moved, total


def ca2fl(state, buffer, *, server_lr=1.0):
    """CA2FL, Algorithm 1: v = h + (1/|S|) sum_i (u_i - h_i) with the old h = (1/N) sum_i h_i; then h_i = u_i."""
    *_, updates = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    v, terms = cached_difference(state, buffer, weights)
    rows = state["rows"] | {client: u for (client, *_), u in zip(buffer, updates, strict=True)}
    return moved(state, state["params"] + server_lr * v, rows=rows), decided(weights, v, terms, server_lr)


def fedstale(state, buffer, *, server_lr=1.0, beta=0.5):
    """v = beta v of CA2FL + (1 - beta) mean(u); then h_i = u_i."""
    *_, updates = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    calibrated, terms = cached_difference(state, buffer, weights)
    mean, mean_terms = total(weights, updates)
    v = beta * calibrated + (1 - beta) * mean
    rows = state["rows"] | {client: u for (client, *_), u in zip(buffer, updates, strict=True)}
    new = moved(state, state["params"] + server_lr * v, rows=rows)
    return new, decided(weights, v, terms + mean_terms, server_lr)


def mf_ca2fl(state, buffer, *, server_lr=1.0, bits=8, codec="affine", quantize_direction=False):
    """CA2FL, section 5: h_i = Q(u_i), drawn with seed 0, the round's version and the client; (G.2): v uses Q(u_i)."""
    *_, updates = facts(buffer)
    weights, version = np.full(len(buffer), 1 / len(buffer)), state["version"] + 1
    stored = {}
    for (client, *_), u in zip(buffer, updates, strict=True):
        name, size = f"{codec}-{bits}", len(u)
        row = rows.encode(name, u, rows.row_key(0, version, client), u.min(), u.max())
        stored[client] = f64(rows.decode(name, row, size))
    if quantize_direction:
        buffer = [(client, *what, stored[client]) for client, *what, _ in buffer]
    v, terms = cached_difference(state, buffer, weights)
    new = state["rows"] | stored
    return moved(state, state["params"] + server_lr * v, rows=new), decided(weights, v, terms, server_lr)


def cached_difference(state, buffer, weights):
    """h + sum_i w_i (u_i - h_i)."""
    *_, updates = facts(buffer)
    zero = np.zeros_like(state["params"])
    old = [state["rows"].get(client, zero) for client, *_ in buffer]
    n = state["num_clients"]
    h, h_terms = sum(state["rows"].values(), zero) / n, sum(map(np.abs, state["rows"].values()), zero) / n
    plus, plus_terms = total(weights, updates)
    minus, minus_terms = total(weights, old)
    return h + plus - minus, h_terms + plus_terms + minus_terms


ROUNDS = {"ca2fl": ca2fl, "fedstale": fedstale, "mf_ca2fl": mf_ca2fl}


VARIANTS = {
    "ca2fl-both": ("ca2fl", {"duplicates": "both"}),
    "fedstale-rarely": ("fedstale", {"beta": 0.3, "server_lr": 0.7}),
    "mf_ca2fl-4": ("mf_ca2fl", {"bits": 4, "quantize_direction": True}),
    "mf_ca2fl-vector": ("mf_ca2fl", {"bits": 4, "codec": "affine-vector", "server_lr": 0.7}),
    "mf_ca2fl-rotated": ("mf_ca2fl", {"bits": 2, "codec": "rotated"}),
}
NOT_STREAMED = {
    "ca2fl": "ca2fl replaces the rows that it caches",
    "fedstale": "fedstale replaces the rows that it caches",
    "mf_ca2fl": "mf_ca2fl replaces the rows that it caches",
}
