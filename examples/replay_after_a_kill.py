"""A replay of a server that was killed: each vector is in a file before it is pushed.

A file's name is the client and its number of joins in the log; so the client's k-th join belongs to file k. The next
push overwrites the file of a push that has not joined. A client must not push twice at once.

    python examples/replay_after_a_kill.py
"""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from afflux import Join, Server, replay
from afflux.rules import ca2fl

CLIENTS, D = 16, 1000


def joins_of_clients(server):
    return Counter(entry.client_id for entry in server.log if isinstance(entry, Join))


def push(server, folder, joins, client, update):
    np.save(folder / f"{client}-{joins[client]}.npy", update)
    receipt = server.push(client=client, version=server.version, update=update)
    joins[client] += receipt.join is not None


def vectors_of_joins(folder):
    """Return the function of a join that `replay` calls for its vector."""
    seen = Counter()

    def vector(join):
        seen[join.client_id] += 1
        return np.load(folder / f"{join.client_id}-{seen[join.client_id] - 1}.npy")

    return vector


def main():
    folder, rule = Path(tempfile.mkdtemp()), ca2fl(buffer_size=3)
    vectors = np.random.default_rng(0).standard_normal((CLIENTS, D))
    server = Server(rule, np.zeros(D), num_clients=CLIENTS, store=folder / "store", log=True)
    for _ in range(2):  # the second time after a kill
        joins = joins_of_clients(server)
        for number in range(20):
            push(server, folder, joins, number // 2 % CLIENTS, vectors[number % CLIENTS] + number)
        server.close(checkpoint=False)  # like a kill: the updates since the last commit are lost
        server = Server.open(folder / "store")
    options = replace(server.options, durability=None, commit_every=1, memory_budget=None)
    again = replay(server.log, Server(rule, np.zeros(D), options), vectors_of_joins(folder))
    same = again.params.tobytes() == server.params.tobytes()
    print(f"{sum(joins_of_clients(server).values())} joins, the same params: {same}")


if __name__ == "__main__":
    main()
