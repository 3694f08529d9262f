"""TWAFL."""

from papers import added, exponential, facts


def twafl(state, buffer, *, server_lr=0.005, normalise=None):
    """x - eta sum_i (n_i / n) (e/2)^-tau_i g_i, n = sum_i n_i."""
    tau, examples, _, gradients = facts(buffer)
    w = examples / examples.sum() * exponential(tau)
    return added(state, w / w.sum() if normalise == "weights" else w, gradients, -server_lr)


ROUNDS = {"twafl": twafl}


VARIANTS = {"twafl-weights": ("twafl", {"normalise": "weights"})}
