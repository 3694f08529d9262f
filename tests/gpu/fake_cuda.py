"""Streams of the emulated device (emulated.py): what is copied on one is done when somebody waits for it, as late as it
may be on a GPU.
"""

from contextlib import contextmanager
from random import Random
from threading import RLock

RANDOM = Random(1)


class Event:
    """After everything that its stream had to do when it was recorded."""

    def __init__(self, stream):
        self._stream, self._until = stream, stream.given

    def synchronize(self):
        self._stream.run(self._until)

    def query(self):
        return self._stream.ran >= self._until

    @property
    def done(self):
        return self.query()


class Stream:
    """Work in order. Now and then the device does some of it by itself."""

    current = None

    def __init__(self, *_, **__):
        self._waiting = []
        self._lock = RLock()
        self.given = self.ran = 0

    def give(self, work):
        with self._lock:
            self._waiting.append(work)
            self.given += 1
            if RANDOM.random() < 0.3:
                self.run(self.given - 1)

    def run(self, until):
        with self._lock:
            while self.ran < until:
                self._waiting.pop(0)()
                self.ran += 1

    def record(self):
        return Event(self)

    record_event = record

    def __enter__(self):
        self._before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self._before


@contextmanager
def stream(one):
    """torch.cuda.stream."""
    with one:
        yield
