"""The files of each released version, which every later one with the same major version reads to the same bits.

python tests/store/frozen_files.py 0.1.0     writes tests/store/frozen/0.1.0.tar.gz; once, for a release
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from afflux import Server
from afflux.rules import mf_ca2fl
from afflux.selftest.digest import vectors
from afflux.selftest.pushes import state_digest

FOLDER = Path(__file__).parent / "frozen"
SIZE, CLIENTS = 300, 9
POOL = vectors(11, 16, SIZE)
RULE = mf_ca2fl(buffer_size=3, bits=4)


def make(**options):
    return Server(RULE, POOL[15], num_clients=CLIENTS, num_threads=1, log=True, **options)


def push(server, count):
    """The next pushes: the same after the same number of joins."""
    for joins in range(server.joins, server.joins + count):
        version = max(0, server.version - joins % 4)
        server.push(client=joins * 7 % CLIENTS, update=POOL[joins % 15], version=version, num_examples=joins + 1)
    return digest_of(server)


def digest_of(server):
    """`state_digest`, with the count of 0.1.0 that is gone."""
    state = server.state_dict()
    state["meta"]["counts"]["deferred"] = 0
    return state_digest(SimpleNamespace(state_dict=lambda: state))


def write(version):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = make(store=folder / "store", commit_every=1, durability="process")
        digests = {"saved": push(server, 25)}
        state = server.state_dict()
        server.close()
        (folder / "meta.json").write_text(json.dumps(state["meta"]))
        np.savez(folder / "arrays.npz", **state["arrays"])
        digests["continued"] = push(loaded(state), 11)
        (folder / "digests.json").write_text(json.dumps(digests, indent=1))
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(FOLDER / f"{version}.tar.gz", "w:gz") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)


def loaded(state):
    server = make()
    server.load_state_dict(state)
    return server


if __name__ == "__main__":
    write(sys.argv[1])
