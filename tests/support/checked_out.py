"""Small servers, what clients push to them, and the tasks that clients check out."""

import numpy as np

from afflux import Server
from afflux.rules import fedavg
from conftest import push_all
from inside import aggregator_of

D = 5


def made(model=None, preset=None, **options):
    return Server(preset or fedavg(buffer_size=1), np.zeros(D, np.float32) if model is None else model, **options)


def vector(value=1.0):
    return np.full(D, value, np.float32)


def push(server, client=0, value=1.0):
    return server.push(client=client, **{server.rule.kind: vector(value)}, version=server.version)


def held(server, task):
    return aggregator_of(server).admission.base_of(task.id) is not None


def step(server, times=1):
    push_all(server, [0] * times, vector())
