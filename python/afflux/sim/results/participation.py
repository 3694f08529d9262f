"""The participation of clients in a run: the number of arrivals of each."""

import math
from typing import NamedTuple

import numpy as np


class Participation(NamedTuple):
    """Statistics of the number of arrivals per client; clients that hold data and never arrived count as 0."""

    clients: int  #: clients that arrived at least once
    least: int
    median: float
    most: int
    gini: float  #: 0: all clients arrived equally often; near 1: one client sent nearly all updates
    busiest_tenth: float  #: share of the arrivals that the busiest tenth of the clients sent, rounded up to whole ones


def arrivals_per_client(clients: np.ndarray, num_clients: int) -> np.ndarray:
    """Return how often each client arrived, in ascending order, int64.

    Args:
        clients: of each arrival, integers.
        num_clients: clients that hold data; those never seen count as 0.
    """
    _, counts = np.unique(clients, return_counts=True)
    unseen = max(num_clients - len(counts), 0)
    return np.sort(np.concatenate([np.zeros(unseen, np.int64), counts]))


def participation(clients: np.ndarray, num_clients: int) -> Participation:
    """Return the participation of a run's clients; arguments as in `arrivals_per_client`.

    Papers on client selection print the minimum, median and maximum, beside the number of clients that took part. Their
    usual single number for unequal participation is the Gini coefficient G = sum_i (2 i - n - 1) c_i / (n sum_i c_i),
    with the counts c_1 <= ... <= c_n.
    """
    counts = arrivals_per_client(clients, num_clients)
    total, n = int(counts.sum()), len(counts)
    if total == 0:
        return Participation(0, 0, 0.0, 0, math.nan, math.nan)
    ranks = 2 * np.arange(1, n + 1) - n - 1
    return Participation(
        clients=int(np.count_nonzero(counts)),
        least=int(counts[0]),
        median=float(np.median(counts)),
        most=int(counts[-1]),
        gini=int(ranks @ counts) / (n * total),
        busiest_tenth=int(counts[-math.ceil(n / 10) :].sum()) / total,
    )
