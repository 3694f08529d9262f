"""Krum and Multi-Krum, by the distances themselves."""

import numpy as np

from oracle import DEPTH, EPS
from papers import added, decided, f64, facts, norm, total


def chosen(buffer, byzantine, keep):
    """The scores, the arrivals with the smallest, and how far each is from the other side of the cut."""
    *_, updates = facts(buffer)
    count = len(updates)
    near = max(count - byzantine - 2, 1)
    scores = []
    for i, mine in enumerate(updates):
        distances = sorted(norm(mine - other) ** 2 for j, other in enumerate(updates) if j != i)
        scores.append(sum(distances[:near]))
    order = sorted(range(count), key=lambda i: (scores[i], i))
    kept, others = order[:keep], order[keep:]
    last, first = scores[kept[-1]], min((scores[i] for i in others), default=np.inf)
    scale = sum(norm(update) ** 2 for update in updates) * near
    margins = [((first if i in kept else scores[i]) - (scores[i] if i in kept else last)) / scale for i in range(count)]
    return kept, f64(margins), updates


def rounds(server_lr, keep_all):
    def one_round(state, buffer, *, server_lr=server_lr, byzantine=None, keep=None):
        hostile = max((len(buffer) - 3) // 2, 0) if byzantine is None else byzantine
        most = max(len(buffer) - hostile - 2, 1)
        kept, margins, updates = chosen(buffer, hostile, (keep or most) if keep_all else 1)
        weights = f64([1 / len(kept) if i in kept else 0.0 for i in range(len(buffer))])
        direction, terms = total(weights, updates)
        decisions = decided(weights, direction, terms, server_lr, weights > 0, margins={"accepted": margins})
        after, _ = added(state, weights, updates, server_lr)
        return after, decisions

    return one_round


def decision_errors(before, buffer, decisions, options):
    """Distances by inner products: an error of each product, relative to the squared norms."""
    return {"accepted": 16 * (DEPTH + 4) * EPS}


ROUNDS = {"krum": rounds(1.0, False), "multi_krum": rounds(1.0, True)}
WEIGHTS = dict.fromkeys(ROUNDS, lambda *_: EPS)
DECISIONS = dict.fromkeys(ROUNDS, decision_errors)
VARIANTS = {
    "krum-none": ("krum", {"byzantine": 0, "server_lr": 0.1}),
    "multi_krum-two": ("multi_krum", {"byzantine": 1, "keep": 2, "server_lr": 0.1}),
}
FIRES = {key: {"accepted"} for key in [*ROUNDS, *VARIANTS]}
NOT_STREAMED = {name: f"{name}'s come from the inner products of a full buffer" for name in ROUNDS}
