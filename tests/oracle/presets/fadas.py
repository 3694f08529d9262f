"""FADAS."""

import math

import numpy as np

from adaptive import AMSGRAD, adapted, adaptive_bounds
from papers import decided, facts, total


def fadas(
    state, buffer, *, server_lr=0.001, beta1=0.9, beta2=0.99, epsilon=1e-8, bias_correction=False, delay_adaptive=None,
    threshold=1,
):  # fmt: skip
    """FADAS, Algorithm 1; delay_adaptive "inverse" is its equation 77, "minimum" its equation 4."""
    tau, _, _, updates = facts(buffer)
    weights = np.full(len(buffer), 1 / len(buffer))
    delta, terms = total(weights, updates)
    slow = bool(delay_adaptive) and tau.max() > threshold
    lr = server_lr
    if slow:
        lr = server_lr / tau.max() if delay_adaptive == "inverse" else min(server_lr, 1 / tau.max())
    corrected, root_scale = lr, 1.0
    if bias_correction:
        t = state["version"] + 1
        corrected, root_scale = lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)
    after = adapted(state, delta, "amsgrad", corrected, beta1, beta2, epsilon, root_scale)
    margin = abs(tau.max() - threshold)
    return after, decided(weights, delta, terms, corrected, fired={"delay": slow}, margins={"delay": margin})


def bounds(before, buffer, after, decisions, dv, options):
    numbers = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8} | options
    return adaptive_bounds("amsgrad", before, after, decisions, dv, numbers)


ROUNDS, BOUNDS, VECTORS = {"fadas": fadas}, {"fadas": bounds}, {"fadas": AMSGRAD}
VARIANTS = {
    "fadas-initial": ("fadas", {"initial_v": 100.0, "delay_adaptive": "inverse", "threshold": 4}),
    "fadas-bias": ("fadas", {"bias_correction": True}),
    "fadas-inverse": ("fadas", {"delay_adaptive": "inverse", "threshold": 4}),
    "fadas-minimum": ("fadas", {"delay_adaptive": "minimum", "threshold": 3, "server_lr": 0.3}),
    "fadas-all": ("fadas", {"bias_correction": True, "delay_adaptive": "minimum", "threshold": 4, "server_lr": 0.3}),
}
FIRES = {variant: {"delay"} for variant in VARIANTS if variant != "fadas-bias"}
