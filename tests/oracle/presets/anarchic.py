"""AFL."""

import numpy as np

from papers import added, decided, facts, moved


def afa_cd(state, buffer, *, server_lr=0.1):
    """AFL, Algorithm 2."""
    *_, gradients = facts(buffer)
    return added(state, np.full(len(buffer), 1 / len(buffer)), gradients, -server_lr)


def afa_cs(state, buffer, *, server_lr=0.1, divide_by="all"):
    """AFL, Algorithm 3: the memory takes the new gradients, then x - eta times the mean of the memory."""
    *_, gradients = facts(buffer)
    rows = state["rows"] | {client: g for (client, *_), g in zip(buffer, gradients, strict=True)}
    n = state["num_clients"] if divide_by == "all" else len(rows)
    zero = np.zeros_like(state["params"])
    v, terms = sum(rows.values(), zero) / n, sum(map(np.abs, rows.values()), zero) / n
    return moved(state, state["params"] - server_lr * v, rows=rows), decided([1 / n] * len(buffer), v, terms, server_lr)


ROUNDS = {"afa_cd": afa_cd, "afa_cs": afa_cs}


VARIANTS = {"afa_cs-seen": ("afa_cs", {"divide_by": "seen"}), "afa_cs-both": ("afa_cs", {"duplicates": "both"})}
NOT_STREAMED = {"afa_cs": "afa_cs replaces the rows that it caches"}
