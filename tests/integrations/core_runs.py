"""For tests of what all adapters share, without a framework: runs of a small model, their clients and replies."""

import numpy as np

from afflux.integrations._core import Trained, TrainingRun
from afflux.integrations._loop import Loop, Transport
from afflux.integrations._settings import RunSettings
from afflux.rules import fedbuff

MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def trained(value=1.0, **facts):
    return Trained({name: array + np.float32(value) for name, array in MODEL.items()}, **facts)


def run_of(rule=None, num_clients=4, key=None, clock=None, **settings):
    made = RunSettings(**settings)
    run = TrainingRun(rule or fedbuff(buffer_size=2), MODEL, made, num_clients=num_clients, key=key)
    run.clock = clock or run.clock
    return run


def replied(run, address, read=trained):
    """The receipt of the reply to a task that the client gets now."""
    run.sent("reply", run.assign(address), address)
    return run.receive("reply", read)


def one_round(run, addresses, **facts):
    for address in addresses:
        run.sent(str(address), run.assign(address), address)
    return [run.receive(str(address), lambda a=address: trained(client=facts.get(str(a)))) for address in addresses]


class OutOfMemory:
    """Arrays whose reading raises what Python's parser does for a made-up header."""

    def __init__(self, error):
        self.error = error

    def __call__(self):
        raise self.error


class Echo(Transport):
    """Clients that reply at once, in this process."""

    def __init__(self, clients=(1, 2, 3), fails=(), gone=()):
        self.there, self.fails, self.gone = list(clients), set(fails), set(gone)
        self.waiting, self.number = {}, 0
        self.steps, self.evaluated, self.told = [], [], None

    def clients(self):
        return self.there

    def send(self, address, task):
        if address in self.gone:
            return None
        self.number += 1
        self.waiting[str(self.number)] = address
        return str(self.number)

    def replies(self, keys):
        found = {key: self.waiting.pop(key) for key in keys if key in self.waiting}
        return [(key, "out of memory" if who in self.fails else lambda: self.read()) for key, who in found.items()]

    def read(self):
        return trained(metrics={"accuracy": 0.5})

    def step_done(self, step, metrics):
        self.steps.append((step, len(metrics)))

    def evaluate(self, newest):
        self.evaluated.append(newest.version)

    def notes(self):
        return {"steps": self.steps}

    def restore(self, notes):
        self.told = notes


def looped(transport, steps, rule=None, **settings):
    run = run_of(rule, num_clients=len(transport.there), poll_interval=0.001, **settings)
    with Loop(run, transport) as loop:
        loop.run(steps)
    return run
