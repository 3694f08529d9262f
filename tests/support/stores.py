"""Servers with and without a store, what they are pushed, and whether their states are the same."""

import io
import json
from dataclasses import replace

import numpy as np

from afflux import Server
from afflux.ops import codecs
from afflux.rules import RULES
from conftest import push_all, ready, same_state

CLIENTS, M = 9, 3


def made(name, size, store=None, *, codec=None, **options):
    rule = RULES[name](buffer_size=M) if name not in ("fedasync", "zenopp") else RULES[name]()
    if codec is not None:
        rule = replace(rule, calibrate=replace(rule.calibrate, codec=codecs.named(codec)))
    given = {"num_clients": CLIENTS, "max_staleness": 6, "log": True, **options}
    return ready(Server(rule, np.ones(size, np.float32), **given, **({} if store is None else {"store": store})))


def some_pushes(server, size, count):
    for _ in range(count):
        rng = np.random.default_rng(server.joins)
        client, age = int(rng.integers(CLIENTS)), int(rng.integers(8))
        push_all(server, [client], rng.standard_normal(size).astype(np.float32), version=max(0, server.version - age))


def through_a_file(state):
    """The state, as a program reads it that has written it into JSON and a file of NumPy."""
    file = io.BytesIO()
    np.savez(file, **state["arrays"])
    file.seek(0)
    arrays = dict(np.load(file, allow_pickle=False))
    return {"meta": json.loads(json.dumps(state["meta"], allow_nan=False)), "arrays": arrays}


def same(one, other):
    same_state(one.state_dict(), other.state_dict())
