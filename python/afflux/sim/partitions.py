"""How the training samples are divided among the clients: every sample to exactly one client."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Partition: TypeAlias = Callable[[np.ndarray, int, float, np.random.Generator], list[np.ndarray]]
"""(labels, number of clients, alpha, stream) -> indices of each client's samples, ascending."""


def dirichlet(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Each class is divided in proportions p ~ Dirichlet(alpha, ..., alpha) over the clients.

    There is no minimum size (CA2FL, FADAS): a client may get nothing. Such a client exists for
    nobody: it is never dispatched and not counted in a cache's N. Drawing again until all have
    data would change the law, most of all at the small alpha that one wants to study.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        ends = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
        # The sum of shares is 1 only up to rounding; the last client takes what is left.
        ends[-1] = len(members)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return [np.flatnonzero(owner == client) for client in range(num_clients)]


def iid(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle and divide evenly: sizes differ by one at most; `alpha` has no meaning here."""
    shuffled = rng.permutation(len(labels))
    return [np.sort(part) for part in np.array_split(shuffled, num_clients)]


PARTITIONS: dict[str, Partition] = {"dirichlet": dirichlet, "iid": iid}
