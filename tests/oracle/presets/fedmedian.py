"""Coordinate-wise median and trimmed mean."""

import numpy as np

from oracle import EPS
from papers import decided, f64, facts, moved


def one_round(mean):
    def one_round(state, buffer, *, server_lr=1.0, trim=0.2):
        *_, updates = facts(buffer)
        count = len(updates)
        direction, terms = mean(np.sort(f64(updates), axis=0), trim)
        after = moved(state, state["params"] + server_lr * direction)
        return after, decided(np.full(count, 1 / count), direction, terms, server_lr)

    return one_round


def median(values, _):
    return np.median(values, axis=0), np.abs(values).max(axis=0)


def trimmed_mean(values, trim):
    """A value of which a part is cut has the other part of its weight."""
    count = len(values)
    ends = np.clip(np.arange(count + 1), trim * count, count - trim * count)
    shares = np.diff(ends)[:, None] / (count - 2 * trim * count)
    return np.sum(shares * values, axis=0), np.sum(shares * np.abs(values), axis=0)


def share_error(before, buffer, decisions, options):
    """Relative, of the shares of values: whole units of 2^-28 if trim M is no integer."""
    cut = options.get("trim", 0.2) * len(buffer)
    return 8 * len(buffer) * (EPS if abs(cut - round(cut)) < 1e-9 else 2.0**-28)


ROUNDS = {"fedmedian": one_round(median), "fedtrimmedavg": one_round(trimmed_mean)}
WEIGHTS = {"fedmedian": lambda *_: 8 * EPS, "fedtrimmedavg": share_error}
VARIANTS = {
    "fedtrimmedavg-part": ("fedtrimmedavg", {"trim": 0.25, "server_lr": 0.1}),
    "fedtrimmedavg-all": ("fedtrimmedavg", {"trim": 0.0}),
}
NOT_STREAMED = {name: f"{name} sorts the vectors of a full buffer" for name in ROUNDS}
