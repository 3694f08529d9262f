"""FedAsync."""

import numpy as np

from papers import LAWS, decided, facts, moved


def fedasync(state, buffer, *, alpha=0.6, staleness=("polynomial", 0.5)):
    """(1 - alpha_t) x + alpha_t y, alpha_t = alpha s(tau)."""
    tau, _, _, (model,) = facts(buffer)
    (mix,) = alpha * LAWS[staleness[0]](tau, *staleness[1:])
    x = state["params"]
    decisions = decided([mix], mix * (model - x), mix * (np.abs(model) + np.abs(x)), 1.0)
    return moved(state, (1 - mix) * x + mix * model), decisions


ROUNDS = {"fedasync": fedasync}


VARIANTS = {"fedasync-hinge": ("fedasync", {"staleness": ("hinge", 10.0, 2.0), "alpha": 0.9})}
