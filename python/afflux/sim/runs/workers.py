"""Processes that train and evaluate for a run, in parallel with the process of its server, with the same bits.

A training depends only on the pulled params, the client and the number of its dispatch, which are all known at the
dispatch. The trainings whose results are needed first are made first. A worker makes the task and the clients' data
once. Shared memory carries params to the worker, and updates back; pipes carry only small messages.
"""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from traceback import format_exception
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from afflux.aggregation.reports import Pulled
from afflux.ops.errors import AffluxError
from afflux.sim.clients.model_broadcast import SentModel
from afflux.sim.clients.training import Trainer, TrainingResult
from afflux.sim.errors import ConfigError, text_with_notes
from afflux.sim.runs.processes import CONTEXT, ProcessPool, pickled
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.task import Task

#: The number of trainings of each worker that are sent ahead: when it has finished one, the next one is already there.
QUEUE = 2
#: The number of evaluations of each worker that are sent ahead.
EVALUATIONS = 2
#: Results that wait beside those of `QUEUE`: as many as train at once if they fit into so many bytes, but at least
#: so many for each worker.
WAITING_BYTES, WAITING_LEAST = 256 << 20, 2


class WorkerError(AffluxError):
    """The code of the task has failed in a worker process."""


class Shape(NamedTuple):
    """The places in shared memory, and their size."""

    d: int
    buffers: int
    versions: int
    results: int
    shifts: bool

    @classmethod
    def of(cls, setup: SimulationSetup, count: int) -> "Shape":
        """Return the shape for a run with `count` workers."""
        d, buffers = len(setup.initial_params), setup.model.initial_buffers
        waiting = max(WAITING_LEAST * count, min(setup.most_at_once, WAITING_BYTES // (4 * max(d, 1))))
        versions, results = count * (QUEUE + EVALUATIONS), count * QUEUE + waiting
        scaffold = setup.config.client_optimizer == "scaffold"
        return cls(d, 0 if buffers is None else len(buffers), versions, results, scaffold)


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
    def allocate(shape: Shape) -> list[Any]:
        """Return the raw memory, whose pages exist when they are first written."""
        params, updates = shape.versions * shape.d * 4, shape.results * shape.d * 4
        pulled, trained = (count * shape.buffers * 8 for count in (shape.versions, shape.results))
        sizes = (params, pulled, updates, trained, updates * shape.shifts)
        return [CONTEXT.RawArray("b", max(size, 1)) for size in sizes]


class Workers:
    """A pool of workers for one run: `submit` at a dispatch, `take` at its arrival, `release` when it was handled.

    `evaluate` may be called at any time.
    """

    def __init__(self, count: int, setup: SimulationSetup, task: Task | None) -> None:
        """Start the processes.

        Args:
            count: number of processes.
            setup: of the run.
            task: the argument of `SimulationSetup.of`.

        Raises:
            ConfigError: the task cannot be sent to another process.
        """
        self._shape, self._count, self._task = Shape.of(setup, count), count, task
        raw, content = SharedMemory.allocate(self._shape), pickled(task)
        self._memory = SharedMemory(self._shape, raw)
        self._pool = ProcessPool(count, _begin, self._shape, raw, content)
        self._reset(setup)

    def _reset(self, setup: SimulationSetup) -> None:
        self._run = setup.config, setup.seed
        self._free_versions, self._free_results = list(range(self._shape.versions)), list(range(self._shape.results))
        self._held: dict[int, list[int]] = {}  # [place, jobs that need it], by version
        self._waiting: dict[int, SentModel] = {}  # not given to a worker, by the sequence of the training
        self._order: list[tuple[float, int]] = []  # a heap of finish and sequence of these trainings
        self._jobs: dict[Future[Any], tuple[int, int]] = {}  # of workers: the version, the sequence or -1
        self._places: dict[int, int] = {}  # of results, until `release`
        self._done: dict[int, Future[Any]] = {}

    def begin(self, setup: SimulationSetup, task: Task | None) -> bool:
        """Begin another run; return False if these workers cannot serve it, and must be closed.

        The call waits for the trainings of the last run that workers have been given.
        """
        if task is not self._task or self._shape != Shape.of(setup, self._count):
            return False
        if any(isinstance(job.exception(), BrokenProcessPool) for job in (*self._jobs, *self._done.values())):
            return False
        self._reset(setup)
        return True

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Add a training whose result is needed at virtual time `finish`."""
        self._waiting[sequence] = sent
        heappush(self._order, (finish, sequence))
        self._collect(0)

    def take(self, sequence: int) -> TrainingResult | None:
        """Wait for the result of a training, and return it.

        Return None if no place for the result is free: then the caller must train. The result's arrays are valid until
        `release`.

        Raises:
            WorkerError: a worker has failed.
            ConfigError: as `Trainer.train`.
        """
        while sequence not in self._done:
            if sequence in self._waiting and not self._free_results:
                del self._waiting[sequence]
                return None
            self._collect(None)
        examples, loss, steps, fault = self._done.pop(sequence).result()
        place, memory = self._places[sequence], self._memory
        buffers = None if memory.trained is None else memory.trained[place]
        return TrainingResult(memory.updates[place], examples, loss, steps, buffers, fault)

    def release(self, sequence: int) -> None:
        """Free the arrays of a result, which are no longer needed."""
        if (place := self._places.pop(sequence, None)) is not None:
            self._free_results.append(place)
            self._collect(0)

    def evaluate(self, model: Pulled) -> "Future[tuple[float, float]]":
        """Return an object that will hold the accuracy and loss of a model.

        The call waits if `EVALUATIONS` models for each worker have not been evaluated yet. The object's `result` raises
        ConfigError as `Trainer.evaluate`, and WorkerError if a worker has failed.
        """
        while sum(sequence < 0 for _, sequence in self._jobs.values()) >= EVALUATIONS * self._count:
            self._collect(None)
        return self._give(-1, model, _evaluate, self._hold(model))

    def _collect(self, timeout: float | None) -> None:
        """Note the jobs that have ended, at most after some seconds; give waiting trainings to the workers."""
        for job in wait(self._jobs, timeout, FIRST_COMPLETED).done if self._jobs else ():
            version, sequence = self._jobs.pop(job)
            held = self._held[version]
            held[1] -= 1
            if not held[1]:
                self._free_versions.append(held[0])
                del self._held[version]
            if sequence >= 0:
                self._done[sequence] = job
        trainings = sum(sequence >= 0 for _, sequence in self._jobs.values())
        for _ in range(QUEUE * self._count - trainings):
            while self._order and self._order[0][1] not in self._waiting:  # it was trained elsewhere
                heappop(self._order)
            if not self._order or not self._free_results:
                return
            _, sequence = heappop(self._order)
            sent = self._waiting.pop(sequence)
            place = self._places[sequence] = self._free_results.pop()
            if self._memory.shifts is not None and sent.shift is not None:
                self._memory.shifts[place] = sent.shift
            facts = (sequence, sent.client, self._hold(sent.model), place, sent.shift is not None)
            self._give(sequence, sent.model, _train, *facts)

    def _give(self, sequence: int, model: Pulled, function: Callable[..., Any], *facts: int) -> "Future[Any]":
        job = self._pool.job(_reported, function, *self._run, *facts)
        self._jobs[job] = model.version, sequence
        return job

    def _hold(self, model: Pulled) -> int:
        """Return the place of the model in shared memory; it is copied there for the first of several jobs."""
        held = self._held.get(model.version)
        if held is None:
            held = self._held[model.version] = [self._free_versions.pop(), 0]
            self._memory.params[held[0]] = model.params
            if self._memory.pulled is not None and model.buffers is not None:
                self._memory.pulled[held[0]] = model.buffers
        held[1] += 1
        return held[0]

    def close(self) -> None:
        """End the processes; only their trainings in progress are lost."""
        self._pool.stop()


class WorkerPool:
    """Workers for consecutive runs in one process. The next run reuses them if they accept it (`Workers.begin`)."""

    def __init__(self, count: int) -> None:
        """Make a pool for `count` workers, which the first run starts; 1: the run's own process trains.

        Raises:
            ConfigError: the number is less than 1.
        """
        if count < 1:
            raise ConfigError(f"workers is {count}, must be at least 1")
        self._count = count
        self._workers: Workers | None = None

    def for_run(self, setup: SimulationSetup, task: Task | None) -> Workers | None:
        """Return workers for this run, and for no other at the same time; None if the run has no workers.

        Raises:
            ConfigError: the task cannot be sent to another process.
        """
        if self._count == 1:
            return None
        if self._workers is None or not self._workers.begin(setup, task):
            self.close()
            self._workers = Workers(self._count, setup, task)
        return self._workers

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class _Worker:
    """What a worker process holds: the shared memory and the task."""

    def __init__(self, shape: Shape, raw: Sequence[Any], content: bytes) -> None:
        self.memory, self._content = SharedMemory(shape, raw), content

    @cached_property
    def task(self) -> Task | None:
        return cast("Task | None", pickle.loads(self._content))

    def buffers(self, version: int) -> np.ndarray | None:
        return None if self.memory.pulled is None else self.memory.pulled[version]


_worker: _Worker


def _begin(shape: Shape, raw: Sequence[Any], content: bytes) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = _Worker(shape, raw, content)


@lru_cache(maxsize=1)
def _trainer(config: SimConfig, seed: int) -> Trainer:
    return SimulationSetup.of(config, seed, _worker.task).trainer


def _reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, or raise its error as one that can be sent."""
    try:
        return function(*arguments)
    except ConfigError as error:
        raise ConfigError(text_with_notes(error)) from None
    except BaseException as error:  # also of sys.exit() in the task's functions: signals raise nothing here
        raise WorkerError("a worker failed:\n" + "".join(format_exception(error))) from None


def _train(
    config: SimConfig, seed: int, sequence: int, client: int, version: int, place: int, shifted: bool
) -> tuple[int, float | None, int, str]:
    """Write the result of a training into its place; return the examples, loss, steps and fault."""
    memory, batches = _worker.memory, random_stream(seed, StreamPurpose.BATCHES, sequence)
    shift = memory.shifts[place] if shifted and memory.shifts is not None else None
    trainer, buffers = _trainer(config, seed), _worker.buffers(version)
    trained = trainer.train(client, memory.params[version], batches, shift, buffers)
    memory.updates[place] = trained.update
    if memory.trained is not None and trained.buffers is not None:
        memory.trained[place] = trained.buffers
    return trained.num_examples, trained.loss, trained.steps, trained.fault


def _evaluate(config: SimConfig, seed: int, version: int) -> tuple[float, float]:
    return _trainer(config, seed).evaluate(_worker.memory.params[version], _worker.buffers(version))
