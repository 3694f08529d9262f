"""Processes that train and evaluate for a run, in parallel with the process of its server, with the same bits.

A training depends only on the pulled params, the client and the number of its dispatch, which are all known at the
dispatch. The trainings whose results are needed first are made first. A worker makes the task and the clients' data
once. Shared memory carries params to the worker, and updates back; pipes carry only small messages.
"""

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache, lru_cache
from heapq import heappop, heappush
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from afflux.aggregation.reports import Pulled
from afflux.lab.runs.processes import CONTEXT, ProcessPool, pickled
from afflux.lab.runs.setup import RunSetup
from afflux.ops.errors import AffluxError, ConfigError
from afflux.sim.clients.training import SentModel, SerialTraining, Trainer, Training, TrainingResult
from afflux.sim.errors import TrainingError, text_with_notes
from afflux.sim.workload.config import SimConfig, concurrency_steps
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.task import Task

if TYPE_CHECKING:
    from afflux.lab.runs.ray_workers import RayPool

#: The number of trainings of each worker that are sent ahead: when it has finished one, the next one is already there.
QUEUE = 2
#: The number of evaluations of each worker that are sent ahead.
EVALUATIONS = 2
#: Results that wait beside those of `QUEUE`: as many as train at once if they fit into so many bytes, but at least
#: so many for each worker.
WAITING_BYTES, WAITING_LEAST = 256 << 20, 2


#: The processes of a run that train, or "ray": tasks, one for each CPU of a cluster of Ray.
Workers = int | Literal["ray"]


class WorkerError(AffluxError):
    """The code of the task has failed in a worker process."""


#: Of arrays in shared memory: dtype, number of places, and elements of a place.
Shapes = dict[str, tuple[str, int, int]]


def shapes_of(setup: RunSetup, count: int) -> Shapes:
    """Return the arrays of a run with `count` workers.

    A place holds the model for a training or evaluation, and then the update and the buffers of a training.
    """
    d, buffers = len(setup.model.initial_params), setup.model.initial_buffers
    most = max(count for _, count in concurrency_steps(setup.config.concurrency))
    at_once = min(most, len(setup.population.clients))  # a rule that waits for a cohort may have more
    waiting = max(WAITING_LEAST * count, min(at_once, WAITING_BYTES // (4 * max(d, 1))))
    places, b = count * (EVALUATIONS + QUEUE) + waiting, 0 if buffers is None else len(buffers)
    shift = d if setup.config.client_optimizer == "scaffold" else 0
    return {"params": ("f4", places, d), "buffers": ("f8", places, b), "shifts": ("f4", places, shift)}


def _arrays(shapes: Shapes, raw: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.ndarray((rows, size), dtype, raw[name]) for name, (dtype, rows, size) in shapes.items()}


class WorkerPool(Training):
    """Workers for consecutive runs; `evaluate` may be called at any time."""

    def __init__(self, count: Workers) -> None:
        """Make a pool for `count` workers, which the first run starts; 1: the run's own process trains.

        Raises:
            ConfigError: the number is less than 1.
            UnavailableError: "ray", and Ray is not installed.
        """
        self._on_ray = count == "ray"
        if count == "ray":
            from afflux.lab.runs.ray_workers import cpus

            count = cpus()
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"workers is {count}, must be at least 1, or 'ray'")
        self._count = count
        self._pool: ProcessPool | RayPool | None = None
        self._task: Task | None = None
        self._shapes: Shapes = {}
        self._jobs: dict[Future[Any], tuple[int, int]] = {}  # of workers: the place, the sequence or -1
        self._done: dict[int, Future[Any]] = {}

    def for_run(self, setup: RunSetup, task: Task | None) -> "WorkerPool | None":
        """Begin a run; return None if it has no workers.

        The next run has the same processes if it has the same task and needs the same memory. The call waits for the
        trainings of the last run that workers have been given.

        Args:
            setup: of the run.
            task: the argument of `RunSetup`.

        Raises:
            ConfigError: the task cannot be sent to another process.
        """
        if self._count == 1 and not self._on_ray:
            return None
        shapes = shapes_of(setup, self._count)
        last = (*self._jobs, *self._done.values())
        ended = (isinstance(job.exception(), BrokenProcessPool) for job in last)
        if self._pool is None or (task, shapes) != (self._task, self._shapes) or any(ended):
            self.close()
            content = pickled(task)
            sizes = {name: rows * size * np.dtype(dtype).itemsize for name, (dtype, rows, size) in shapes.items()}
            raw = {name: CONTEXT.RawArray("b", max(size, 1)) for name, size in sizes.items()}
            self._task, self._shapes, self._memory = task, shapes, _arrays(shapes, raw)
            if self._on_ray:
                from afflux.lab.runs.ray_workers import RayPool

                self._pool = RayPool(self._memory, _use, content)
            else:
                self._pool = ProcessPool(self._count, _begin, shapes, raw, content)
        self._run, self._serial = (setup.config, setup.seed), SerialTraining(setup.trainer, setup.seed)
        free, evaluations = list(range(shapes["params"][1])), EVALUATIONS * self._count
        self._free, self._free_for_evaluations = free[evaluations:], free[:evaluations]
        self._waiting: dict[int, SentModel] = {}  # not given to a worker, by the sequence of the training
        self._order: list[tuple[float, int]] = []  # a heap of finish and sequence of these trainings
        self._places: dict[int, int] = {}  # of trainings, until `release`
        self._jobs, self._done = {}, {}
        return self

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Add a training whose result is needed at virtual time `finish`."""
        self._waiting[sequence] = sent
        heappush(self._order, (finish, sequence))
        self._collect(0)

    def take(self, sequence: int, sent: SentModel) -> TrainingResult:
        """Wait for the result of a training, and return it; train in this process if no place for the result is free.

        Raises:
            WorkerError: a worker has failed.
            ConfigError: as `Trainer.train`.
        """
        while sequence not in self._done:
            if sequence in self._waiting and not self._free:
                del self._waiting[sequence]
                return self._serial.take(sequence, sent)
            self._collect(None)
        trained: TrainingResult = self._done.pop(sequence).result()
        update, buffers = _model(self._memory, self._places[sequence])
        return trained._replace(update=update, buffers=buffers)

    def release(self, sequence: int) -> None:
        """Free the arrays of a result, which are no longer needed."""
        if (place := self._places.pop(sequence, None)) is not None:
            self._free.append(place)
            self._collect(0)

    def evaluate(self, model: Pulled) -> "Future[tuple[float, ...]]":
        """Return an object that will hold the values of the task's metrics of a model.

        The call waits if `EVALUATIONS` models for each worker have not been evaluated yet. The object's `result` raises
        ConfigError as `Trainer.evaluate`, and WorkerError if a worker has failed.
        """
        while not self._free_for_evaluations:
            self._collect(None)
        return self._give(_evaluate, self._free_for_evaluations.pop(), model)

    def _collect(self, timeout: float | None) -> None:
        """Note the jobs that have ended, at most after some seconds; give waiting trainings to the workers."""
        for job in wait(self._jobs, timeout, FIRST_COMPLETED).done if self._jobs else ():
            place, sequence = self._jobs.pop(job)
            if sequence >= 0:
                self._done[sequence] = job
            else:
                self._free_for_evaluations.append(place)
        trainings = sum(sequence >= 0 for _, sequence in self._jobs.values())
        for _ in range(QUEUE * self._count - trainings):
            while self._order and self._order[0][1] not in self._waiting:  # it was trained elsewhere
                heappop(self._order)
            if not self._order or not self._free:
                return
            _, sequence = heappop(self._order)
            sent = self._waiting.pop(sequence)
            place = self._places[sequence] = self._free.pop()
            if sent.shift is not None:
                self._memory["shifts"][place] = sent.shift
            self._give(_train, place, sent.model, sequence, sent.client)

    def _give(
        self, function: Callable[..., Any], place: int, model: Pulled, sequence: int = -1, *client: int
    ) -> "Future[Any]":
        assert self._pool is not None
        self._memory["params"][place] = model.params
        if model.buffers is not None:
            self._memory["buffers"][place] = model.buffers
        job = self._pool.job(_reported, function, *self._run, place, sequence, *client)
        self._jobs[job] = place, sequence
        return job

    def close(self) -> None:
        """End the processes; only their trainings in progress are lost."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None


_memory: dict[str, np.ndarray]
_content: bytes


def _begin(shapes: Shapes, raw: Mapping[str, Any], content: bytes) -> None:
    _use(_arrays(shapes, raw), content)


def _use(memory: dict[str, np.ndarray], content: bytes | None) -> None:
    """Read and write these arrays from now on; and make trainings of another task, if one is given."""
    global _memory, _content
    _memory = memory
    if content is not None:
        _content = content
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
        _task.cache_clear()
        _trainer.cache_clear()


def _model(memory: Mapping[str, np.ndarray], place: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the params, or the update, and the buffers of a place."""
    return memory["params"][place], memory["buffers"][place] if memory["buffers"].size else None


@cache
def _task() -> Task | None:
    return cast("Task | None", pickle.loads(_content))


@lru_cache(maxsize=1)
def _trainer(config: SimConfig, seed: int) -> Trainer:
    return RunSetup(config, seed, _task()).trainer


def _reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, or raise its error as one that can be sent."""
    try:
        return function(*arguments)
    except (ConfigError, TrainingError) as error:
        raise type(error)(text_with_notes(error)) from None
    except BaseException as error:  # also of sys.exit() in the task's functions: signals raise nothing here
        raise WorkerError("a worker failed:\n" + "".join(format_exception(error))) from None


def _train(config: SimConfig, seed: int, place: int, sequence: int, client: int) -> TrainingResult:
    """Write the update and the buffers of a training into its place; return the other facts."""
    (params, buffers), batches = _model(_memory, place), random_stream(seed, StreamPurpose.BATCHES, sequence)
    shift = _memory["shifts"][place] if _memory["shifts"].size else None
    trained = _trainer(config, seed).train(client, params, batches, shift, buffers)
    params[:] = trained.update
    if buffers is not None and trained.buffers is not None:
        buffers[:] = trained.buffers
    return trained._replace(update=params[:0], buffers=None)


def _evaluate(config: SimConfig, seed: int, place: int, sequence: int) -> tuple[float, ...]:
    return _trainer(config, seed).evaluate(*_model(_memory, place))
