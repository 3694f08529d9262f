"""Small servers of whose versions clients check tasks out."""

import numpy as np

from afflux import Server
from afflux.rules import fedavg
from inside import aggregator_of

D = 5


def made(model=None, preset=None, **options):
    return Server(preset or fedavg(buffer_size=1), np.zeros(D, np.float32) if model is None else model, **options)


def ones(value=1.0):
    return np.full(D, value, np.float32)


def held(server, task):
    return aggregator_of(server).admission.base_of(task.id) is not None


def step(server, times=1):
    for _ in range(times):
        server.push(client=0, version=server.version, update=ones())
