"""Processes that train for a run, beside the process of its server, with the same bits.

A training depends on the pulled params, the client and the number of its dispatch alone, all of which are known when it
is dispatched. Those whose results are needed first are trained first. A worker makes the task and the clients' data
once. Params go to it, and updates come back, through shared memory; through pipes go only numbers.
"""

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from multiprocessing import connection
from multiprocessing.util import Finalize
from traceback import format_exception
from typing import Any, NamedTuple

import numpy as np

from afflux.aggregation.reports import Pulled
from afflux.ops.errors import AffluxError
from afflux.sim.clients.flat_model import reproducible_torch
from afflux.sim.clients.model_broadcast import SentModel
from afflux.sim.clients.training import TrainingResult
from afflux.sim.errors import ConfigError
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.vmap_groups import Vmap, VmapGroups
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose
from afflux.sim.workload.stream_series import StreamSeries
from afflux.sim.workload.task import Task

#: Trainings that a worker has been given: while the server makes a step or evaluates, it goes on with the next ones.
QUEUE = 3
#: Results that wait beside those of `QUEUE`: as many as train at once, if they fit into so many bytes, but at least so
#: many of each worker.
WAITING_BYTES, WAITING_LEAST = 256 << 20, 2
#: Seconds between two looks whether a worker has ended.
POLL_SECONDS = 1.0


class WorkerError(AffluxError):
    """A worker process has ended, or the code of the task has failed in it."""


class _Shape(NamedTuple):
    """The places in shared memory, and their size."""

    d: int
    buffers: int
    versions: int
    results: int
    shifts: bool


class _Memory:
    """Shared vectors: pulled params by version, updates and SCAFFOLD's shifts by place, and the model's buffers."""

    def __init__(self, shape: _Shape, raw: Sequence[Any]) -> None:
        params, pulled, updates, trained, shifts = raw
        self.params = np.frombuffer(params, np.float32).reshape(shape.versions, -1)
        self.updates = np.frombuffer(updates, np.float32).reshape(shape.results, -1)
        self.shifts = np.frombuffer(shifts, np.float32).reshape(shape.results, -1) if shape.shifts else None
        self.pulled = np.frombuffer(pulled, np.float64).reshape(shape.versions, -1) if shape.buffers else None
        self.trained = np.frombuffer(trained, np.float64).reshape(shape.results, -1) if shape.buffers else None

    @staticmethod
    def allocate(context: Any, shape: _Shape) -> list[Any]:
        """Return the raw memory, whose pages exist when they are first written."""
        params, updates = shape.versions * shape.d * 4, shape.results * shape.d * 4
        pulled, trained = (count * shape.buffers * 8 for count in (shape.versions, shape.results))
        sizes = (params, pulled, updates, trained, updates * shape.shifts)
        return [context.RawArray("b", max(size, 1)) for size in sizes]


class _Job(NamedTuple):
    """The arguments of one training, as they are sent to a worker."""

    sequence: int
    client: int
    version: int  #: place of the pulled params
    result: int  #: place of the update
    shift: bool


class Workers:
    """A pool of workers for one run: `submit` at a dispatch, `take` at its arrival, `release` when it was handled."""

    def __init__(self, count: int, setup: SimulationSetup, task: Task | None) -> None:
        """Start the processes.

        Args:
            count: number of processes.
            setup: of the run.
            task: what was handed to `SimulationSetup.of`.

        Raises:
            ConfigError: the task cannot be sent to another process.
        """
        self._shape = shape = _shape_of(setup, count)
        context = multiprocessing.get_context("spawn")
        raw = _Memory.allocate(context, shape)
        self._memory = _Memory(shape, raw)
        self._reset()
        self._processes: list[Any] = []
        self._queues: list[deque[int]] = []
        self._pipes: list[Any] = []
        self._content = content = pickled(task)
        # Runs before multiprocessing waits for its children, because workers end only when they receive a stop message.
        self._at_exit = Finalize(self, _end, (self._processes, self._pipes), exitpriority=100)
        try:
            with sigint_blocked():
                for _ in range(count):
                    ours, theirs = context.Pipe()
                    arguments = (theirs, shape, raw, setup.config, setup.seed, content)
                    process = context.Process(target=_work, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._pipes.append(ours)
                    self._queues.append(deque())
        except BaseException:
            self.close()
            raise

    def _reset(self) -> None:
        shape = self._shape
        self._free_versions, self._free_results = list(range(shape.versions)), list(range(shape.results))
        self._versions: dict[int, list[int]] = {}  # by version: its place, trainings that need it
        self._known: dict[int, SentModel] = {}  # not given to a worker
        self._first: list[tuple[float, int]] = []  # of these: a heap of finish and sequence
        self._given: dict[int, tuple[_Job, int]] = {}  # to a worker: by sequence, with the version
        self._done: dict[int, tuple[int, TrainingResult]] = {}
        self._taken: dict[int, int] = {}

    def begin(self, setup: SimulationSetup, task: Task | None) -> bool:
        """Begin another run; False if these workers cannot serve it, and must be closed.

        Waits for the trainings of the last run that workers have been given.
        """
        if self._shape != _shape_of(setup, len(self._processes)) or self._content != pickled(task):
            return False
        try:
            self._first = []
            while self._given:
                self._receive(POLL_SECONDS)
            for pipe in self._pipes:
                pipe.send((setup.config, setup.seed))
        except (AffluxError, OSError):
            return False
        self._reset()
        return True

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Make a training known whose result is needed at virtual time `finish`."""
        self._known[sequence] = sent
        heappush(self._first, (finish, sequence))
        self._receive(0)
        self._assign()

    def take(self, sequence: int) -> TrainingResult | None:
        """Wait for the result of a training; None if no worker has room for it: train it here.

        Its arrays are valid until `release`.

        Raises:
            WorkerError: a worker has failed.
            ConfigError: as `Trainer.train`.
        """
        while sequence not in self._done:
            if sequence in self._known and not self._free_results:
                del self._known[sequence]
                return None
            self._receive(POLL_SECONDS)
            self._assign()
        place, result = self._done.pop(sequence)
        self._taken[sequence] = place
        return result

    def release(self, sequence: int) -> None:
        """Say that the arrays of a result are no longer needed."""
        place = self._taken.pop(sequence, None)
        if place is not None:
            self._free_results.append(place)
            self._assign()

    def _assign(self) -> None:
        """Give the trainings that are needed first to workers that have room for them."""
        while self._first and self._free_results:
            worker = min(range(len(self._queues)), key=lambda index: len(self._queues[index]))
            if len(self._queues[worker]) >= QUEUE:
                return
            _, sequence = heappop(self._first)
            sent = self._known.pop(sequence, None)
            if sent is None:  # it was trained elsewhere
                continue
            result = self._free_results.pop()
            if self._memory.shifts is not None and sent.shift is not None:
                self._memory.shifts[result] = sent.shift
            job = _Job(sequence, sent.client, self._hold(sent.model), result, sent.shift is not None)
            self._given[sequence] = (job, sent.model.version)
            self._queues[worker].append(sequence)
            try:
                self._pipes[worker].send(tuple(job))
            except OSError:
                raise self._ended(worker) from None

    def _hold(self, model: Pulled) -> int:
        """Return the place of the model in shared memory; it is copied there for the first of several trainings."""
        held = self._versions.get(model.version)
        if held is None:
            held = self._versions[model.version] = [self._free_versions.pop(), 0]
            self._memory.params[held[0]] = model.params
            if self._memory.pulled is not None and model.buffers is not None:
                self._memory.pulled[held[0]] = model.buffers
        held[1] += 1
        return held[0]

    def _receive(self, seconds: float) -> None:
        """Take what workers have sent, after at most `seconds`."""
        ready: list[Any] = connection.wait(self._pipes, seconds)
        for pipe in ready:
            worker = self._pipes.index(pipe)
            try:
                while pipe.poll():
                    self._handle(worker, pipe.recv())
            except (EOFError, OSError):
                raise self._ended(worker) from None

    def _handle(self, worker: int, answer: Any) -> None:
        if answer[0] == "error":
            _, known, text = answer
            raise ConfigError(text) if known else WorkerError(text)
        sequence, examples, loss, steps = answer
        self._queues[worker].remove(sequence)
        job, version = self._given.pop(sequence)
        held = self._versions[version]
        held[1] -= 1
        if not held[1]:
            self._free_versions.append(held[0])
            del self._versions[version]
        buffers = None if self._memory.trained is None else self._memory.trained[job.result]
        self._done[sequence] = (
            job.result,
            TrainingResult(self._memory.updates[job.result], examples, loss, steps, buffers),
        )

    def _ended(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(POLL_SECONDS)
        return WorkerError(f"a worker process has ended with exit code {process.exitcode}; the run can be resumed")

    def close(self) -> None:
        """End the processes; what they train is lost, and nothing else."""
        self._at_exit()


def _end(processes: list[Any], pipes: list[Any]) -> None:
    for process, pipe in zip(processes, pipes, strict=True):
        pipe.close()
        process.kill()
    for process in processes:
        process.join()
        process.close()
    processes.clear()
    pipes.clear()


def _shape_of(setup: SimulationSetup, count: int) -> _Shape:
    d, buffers = len(setup.initial_params), setup.model.initial_buffers
    waiting = max(WAITING_LEAST * count, min(setup.most_at_once, WAITING_BYTES // (4 * max(d, 1))))
    scaffold = setup.config.client_optimizer == "scaffold"
    return _Shape(d, 0 if buffers is None else len(buffers), count * QUEUE + 1, count * QUEUE + waiting, scaffold)


class WorkerPool:
    """The workers of runs that follow each other in one process: they are started once, if the runs are alike."""

    def __init__(self, count: int | Vmap) -> None:
        """Make a pool for `count` workers, which the first run starts; 1: the run's own process trains.

        Raises:
            ConfigError: the number is less than 1.
        """
        if isinstance(count, int) and count < 1:
            raise ConfigError(f"workers is {count}, must be at least 1")
        self._count = count
        self._workers: Workers | None = None

    def for_run(self, setup: SimulationSetup, task: Task | None) -> Workers | VmapGroups | None:
        """Return workers for this run, and for no other at the same time; None: there are none.

        Raises:
            ConfigError: the task cannot be sent to another process, or not trained by vmap.
        """
        if isinstance(self._count, Vmap):
            return VmapGroups(self._count, setup)
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


def start_workers(
    workers: int | Vmap | WorkerPool, setup: SimulationSetup, task: Task | None, files: ExitStack
) -> Workers | VmapGroups | None:
    """Return the workers of a run: those of a pool, or so many that `files` ends."""
    if isinstance(workers, WorkerPool):
        return workers.for_run(setup, task)
    pool = WorkerPool(workers)
    files.callback(pool.close)
    return pool.for_run(setup, task)


def _work(pipe: Any, shape: _Shape, raw: Sequence[Any], config: SimConfig, seed: int, content: bytes) -> None:
    """Train until the pipe is closed, which happens when the parent ends, however it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent answers them
        signal.signal(number, signal.SIG_IGN)
    with reproducible_torch(), suppress(EOFError, OSError):
        try:
            task, memory = pickle.loads(content), _Memory(shape, raw)
            setup, streams = SimulationSetup.of(config, seed, task), StreamSeries(seed, StreamPurpose.BATCHES)
            while True:
                told = pipe.recv()
                if len(told) == 2:  # another run
                    config, seed = told
                    setup, streams = SimulationSetup.of(config, seed, task), StreamSeries(seed, StreamPurpose.BATCHES)
                    continue
                job = _Job(*told)
                shift = memory.shifts[job.result] if job.shift and memory.shifts is not None else None
                pulled = memory.params[job.version], streams.stream(job.sequence), shift
                buffers = None if memory.pulled is None else memory.pulled[job.version]
                trained = setup.trainer.train(job.client, *pulled, buffers)
                memory.updates[job.result] = trained.update
                if memory.trained is not None and trained.buffers is not None:
                    memory.trained[job.result] = trained.buffers
                pipe.send((job.sequence, trained.num_examples, trained.loss, trained.steps))
        except (EOFError, OSError):
            raise
        except ConfigError as error:
            pipe.send(("error", True, str(error)))
        except Exception as error:
            pipe.send(("error", False, "a worker failed:\n" + "".join(format_exception(error))))


def pickled(task: Task | None) -> bytes:
    """Return the task for other processes of this program; raises ConfigError if it cannot be sent there."""
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise ConfigError(
            f"the task cannot be sent to another process ({error}): define its functions at the top of a module"
        ) from error


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes are started: it signals all, and only the parent, without their mask, handles it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
