"""A server on a store that takes `PUSHES` pushes, in a process that may be killed at any moment.

python -m afflux.selftest.pushes FOLDER     makes or opens the store, and prints the number of joins after each push
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from afflux import Receipt, Server
from afflux.rules import mf_ca2fl
from afflux.selftest.digest import vectors

PUSHES, CLIENTS, SIZE = 200, 40, 5000
#: The vectors of params and of all pushes.
POOL = vectors(9, 16, SIZE)


def make(path: Path | None = None) -> Server:
    """Return a new server, on a store if there is a path."""
    store: dict[str, Any] = {} if path is None else {"store": path, "commit_every": 1, "durability": "process"}
    return Server(mf_ca2fl(buffer_size=3, bits=4), POOL[15], num_clients=CLIENTS, num_threads=1, **store)


def open_or_make(path: Path) -> Server:
    """Return the server on the store at `path`."""
    return Server.open(path, num_threads=1) if path.exists() else make(path)


def push(server: Server) -> Receipt:
    """Make the next push: the same after the same number of joins."""
    joins = server.joins
    return server.push(client=joins * 7 % CLIENTS, update=POOL[joins % 15], version=max(0, server.version - joins % 4))


def state_digest(server: Server) -> str:
    """Return a digest of everything that the server keeps, apart from the number of refused calls."""
    state = server.state_dict()
    del state["meta"]["counts"]["refused"]
    digest = hashlib.sha256(json.dumps(state["meta"], sort_keys=True).encode())
    for name in sorted(state["arrays"]):
        digest.update(name.encode() + np.ascontiguousarray(state["arrays"][name]).tobytes())
    return digest.hexdigest()


def main(path: Path) -> None:
    """Push until PUSHES have joined."""
    with open_or_make(path) as server:
        while server.joins < PUSHES:
            push(server)
            print(server.joins, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
