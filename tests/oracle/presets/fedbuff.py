"""FedBuff."""

from papers import LAWS, added, facts


def fedbuff(state, buffer, *, server_lr=1.0, staleness=("polynomial", 0.5), normalise="count"):
    """x + (eta / M) sum_i s(tau_i) u_i; or divided by sum_i s(tau_i)."""
    tau, _, _, updates = facts(buffer)
    s = LAWS[staleness[0]](tau, *staleness[1:])
    return added(state, s / (len(buffer) if normalise == "count" else s.sum()), updates, server_lr)


ROUNDS = {"fedbuff": fedbuff}


VARIANTS = {
    "fedbuff-weights": ("fedbuff", {"normalise": "weights"}),
    "fedbuff-constant": ("fedbuff", {"staleness": ("constant",), "server_lr": 0.5}),
    "fedbuff-hinge": ("fedbuff", {"staleness": ("hinge", 2.0, 3.0)}),
    "fedbuff-polynomial": ("fedbuff", {"staleness": ("polynomial", 0.3)}),
    "fedbuff-exponential": ("fedbuff", {"staleness": ("exponential",), "normalise": "weights"}),
}
