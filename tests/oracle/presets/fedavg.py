"""FedAvg."""

from papers import added, facts


def fedavg(state, buffer, *, server_lr=1.0):
    _, examples, _, updates = facts(buffer)
    return added(state, examples / examples.sum(), updates, server_lr)


ROUNDS = {"fedavg": fedavg}
