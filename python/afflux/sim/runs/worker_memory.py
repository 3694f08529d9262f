"""Data that a run and its workers share: places for params and updates in memory, and the arguments of one job."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Shape(NamedTuple):
    """The places in shared memory, and their size."""

    d: int
    buffers: int
    versions: int
    results: int
    shifts: bool


class SharedMemory:
    """Shared vectors: pulled params by version, updates and SCAFFOLD's shifts by place, and the model's buffers."""

    def __init__(self, shape: Shape, raw: Sequence[Any]) -> None:
        params, pulled, updates, trained, shifts = raw
        self.params = np.frombuffer(params, np.float32).reshape(shape.versions, -1)
        self.updates = np.frombuffer(updates, np.float32).reshape(shape.results, -1)
        self.shifts = np.frombuffer(shifts, np.float32).reshape(shape.results, -1) if shape.shifts else None
        self.pulled = np.frombuffer(pulled, np.float64).reshape(shape.versions, -1) if shape.buffers else None
        self.trained = np.frombuffer(trained, np.float64).reshape(shape.results, -1) if shape.buffers else None

    @staticmethod
    def allocate(context: Any, shape: Shape) -> list[Any]:
        """Return the raw memory, whose pages exist when they are first written."""
        params, updates = shape.versions * shape.d * 4, shape.results * shape.d * 4
        pulled, trained = (count * shape.buffers * 8 for count in (shape.versions, shape.results))
        sizes = (params, pulled, updates, trained, updates * shape.shifts)
        return [context.RawArray("b", max(size, 1)) for size in sizes]


class WorkerJob(NamedTuple):
    """The arguments of one training or evaluation, as they are sent to a worker."""

    sequence: int  #: less than 0: an evaluation, which has only a version
    client: int
    version: int  #: place of the pulled params
    result: int  #: place of the update
    shift: bool
