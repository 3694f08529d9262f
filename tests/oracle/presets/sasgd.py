"""SASGD."""

import numpy as np

from papers import added, facts


def sasgd(state, buffer, *, server_lr=0.005):
    """x - (1/M) sum_i (eta / tau_i) g_i, where a fresh gradient counts as one of staleness 1."""
    tau, _, _, gradients = facts(buffer)
    return added(state, 1 / (len(buffer) * np.maximum(tau, 1)), gradients, -server_lr)


ROUNDS = {"sasgd": sasgd}
