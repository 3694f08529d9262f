"""Partitions of the training samples among the clients.

dirichlet, iid   every sample belongs to exactly one client
classes          a sample belongs to at most one client; a few are left out, so that all clients have equally many
wkafl            a sample may belong to any number of clients
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from afflux.ops.errors import ConfigError

#: (labels, number of clients, heterogeneity, stream) -> indices of each client's samples, ascending.
#:
#: The heterogeneity is Dirichlet's alpha, or for `BY_CLASSES` the number of classes of a client.
Partition: TypeAlias = Callable[[np.ndarray, int, float, np.random.Generator], list[np.ndarray]]

WKAFL_SIZES = (10, 49)


def dirichlet(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide each class over the clients in proportions p ~ Dirichlet(alpha, ..., alpha).

    There is no minimum size (CA2FL, FADAS): a client may get no samples. Such a client is never dispatched, and N of
    a cache does not count it. Drawing again until all clients have data would change the law, most of all at small
    alpha.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        ends = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
        # The sum of shares is 1 only up to rounding; the last client gets the remaining examples.
        ends[-1] = len(members)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return [np.flatnonzero(owner == client) for client in range(num_clients)]


def iid(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle and divide evenly: sizes differ by one at most; `alpha` is not used."""
    shuffled = rng.permutation(len(labels))
    return [np.sort(part) for part in np.array_split(shuffled, num_clients)]


def classes(labels: np.ndarray, num_clients: int, count: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Give each client `count` classes with equally many samples, drawn without replacement (Anarchic FL).

    A client takes the classes that the fewest clients before it have, ties at random: with free choices some classes
    would have no client, and the paper's 89 % at one class per worker would be impossible.
    """
    kinds = np.unique(labels)
    per_client = _whole(count, len(kinds))
    taken = np.zeros(len(kinds), dtype=np.int64)
    chosen = []
    for _ in range(num_clients):
        mine = np.lexsort((rng.random(len(kinds)), taken))[:per_client]
        taken[mine] += 1
        chosen.append(mine)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in kinds]
    size = min(len(pool) // slots for pool, slots in zip(pools, taken, strict=True) if slots)
    if size == 0:
        wanted = f"{num_clients} clients with {per_client} classes each"
        raise ConfigError(f"partition 'classes': too few samples for {wanted}")
    starts = np.zeros(len(kinds), dtype=np.int64)
    shards = []
    for mine in chosen:
        shards.append(np.sort(np.concatenate([pools[k][starts[k] : starts[k] + size] for k in mine])))
        starts[mine] += size
    return shards


def wkafl(labels: np.ndarray, num_clients: int, count: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide by WKAFL's Algorithm 4: `count` classes, U{10..49} samples in proportions of weights U(0, 1).

    Clients may overlap.

    The sizes per class are rounded so that they sum to the client's size; no client has a sample twice.
    """
    kinds = np.unique(labels)
    per_client = _whole(count, len(kinds))
    pools = [np.flatnonzero(labels == label) for label in kinds]
    shards = []
    for _ in range(num_clients):
        mine = rng.choice(len(kinds), per_client, replace=False)
        size = rng.integers(*WKAFL_SIZES, endpoint=True)
        weights = np.cumsum(rng.uniform(size=per_client))
        ends = np.rint(weights / weights[-1] * size).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        drawn = [rng.choice(pools[k], min(n, len(pools[k])), replace=False) for k, n in zip(mine, counts, strict=True)]
        shards.append(np.sort(np.concatenate(drawn)))
    return shards


def _whole(count: float, num_classes: int) -> int:
    if count != int(count) or not 1 <= count <= num_classes:
        raise ConfigError(f"classes is {count:g}, must be a whole number from 1 to {num_classes}")
    return int(count)


PARTITIONS: dict[str, Partition] = {"dirichlet": dirichlet, "iid": iid, "classes": classes, "wkafl": wkafl}
BY_CLASSES = ("classes", "wkafl")
