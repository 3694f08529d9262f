"""A store with nine clients' rows, an arrival that waits, and a version that is kept; and what goes wrong with it."""

import numpy as np

from afflux import Server
from afflux.rules import ca2fl
from commands import invoke
from conftest import push_all
from damage import damage, place
from forged import index

SIZE, CLIENTS, M = 70_001, 30, 3
RULE = ca2fl(buffer_size=M)
#: Clients 8 to 0 push one after the other; within a round the order is canonical.
ORDER = [6, 7, 8, 3, 4, 5, 0, 1, 2]


def vector(client):
    return np.random.default_rng(client).standard_normal(SIZE).astype(np.float32)


def pushes(server, clients):
    push_all(server, clients, vector)


def make(path):
    with Server(RULE, np.zeros(SIZE), num_clients=CLIENTS, store=path) as server:
        first = server.pull()
        pushes(server, range(8, -1, -1))
        pushes(server, [20])
        server.checkpoint({"epoch": 3}, keep=[first])
    return path


def run(*arguments, **more):
    return invoke("store", *arguments, **more)


def damage_row(path, client, where=1000):
    file, offset = place(path, client)
    damage(file, offset + where, 4)


def change(path, statement):
    with index(path) as connection:
        connection.execute(statement)


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and not file.name.endswith("-shm")}
