"""Processes that train and evaluate for a run, in parallel with the process of its server, with the same bits.

A training depends only on the pulled params, the client and the number of its dispatch, which are all known at the
dispatch. The trainings whose results are needed first are made first. A worker makes the task and the clients' data
once. Shared memory carries params to the worker, and updates back; pipes carry only small messages. Evaluations go
before trainings, and a worker gets no training after an evaluation in its queue.
"""

import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from multiprocessing import connection
from multiprocessing.util import Finalize
from typing import Any

from afflux.aggregation.reports import Pulled
from afflux.ops.errors import AffluxError
from afflux.sim.clients.model_broadcast import SentModel
from afflux.sim.clients.training import TrainingResult
from afflux.sim.errors import ConfigError, ProcessKilledError
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.worker_process import Shape, SharedMemory, WorkerJob, work
from afflux.sim.workload.rule_files import loaded_digests
from afflux.sim.workload.task import Task

#: The number of trainings in a worker's queue: when the worker has finished one, the next one is already there.
QUEUE = 2
#: Results that wait beside those of `QUEUE`: as many as train at once if they fit into so many bytes, but at least
#: so many for each worker.
WAITING_BYTES, WAITING_LEAST = 256 << 20, 2
#: Seconds between two checks for Ctrl-C while the process waits for a result.
POLL_SECONDS = 1.0


def pickled(task: Task | None) -> bytes:
    """Return the task for other processes of this program; raise ConfigError if the task cannot be sent there."""
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise ConfigError(
            f"the task cannot be sent to another process ({error}): define its functions at the top of a module"
        ) from error


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes are started.

    Ctrl-C signals all processes. The new ones inherit the mask, so only the parent handles the signal.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerError(AffluxError):
    """The code of the task has failed in a worker process."""


class Workers:
    """A pool of workers for one run: `submit` at a dispatch, `take` at its arrival, `release` when it was handled.

    `evaluate` may be called at any time. A thread receives results and sends the next trainings, so that workers train
    while the server makes a step or writes its store.
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
        self._shape = shape = _shape_of(setup, count)
        context = multiprocessing.get_context("spawn")
        raw = SharedMemory.allocate(context, shape)
        self._memory = SharedMemory(shape, raw)
        self._changed = threading.Condition()  # guards all that follows
        self._error: Exception | None = None
        self._reset()
        self._processes: list[Any] = []
        self._queues: list[deque[int]] = []
        self._pipes: list[Any] = []
        self._thread = threading.Thread(target=self._feed, name="afflux-workers", daemon=True)
        self._task, content = task, pickled(task)
        # Runs before multiprocessing waits for its children, because workers end only when they receive a stop message.
        self._at_exit = Finalize(self, _end, (self._processes, self._pipes, self._thread), exitpriority=100)
        try:
            with sigint_blocked():
                for _ in range(count):
                    ours, theirs = context.Pipe()
                    arguments = (theirs, shape, raw, setup.config, setup.seed, content, loaded_digests())
                    process = context.Process(target=work, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._pipes.append(ours)
                    self._queues.append(deque())
                self._thread.start()
        except BaseException:
            self.close()
            raise

    def _reset(self) -> None:
        shape = self._shape
        self._free_versions, self._free_results = list(range(shape.versions)), list(range(shape.results))
        self._held: dict[int, list[int]] = {}  # [place, jobs that need it], by version
        # Jobs have the sequence of their training; evaluations have -1, -2, ...
        self._waiting: dict[int, SentModel] = {}  # not given to a worker
        self._order: list[tuple[float, int, int]] = []  # a heap of finish, number and sequence of these jobs
        self._given: dict[int, int] = {}  # to a worker: the version by sequence
        self._places: dict[int, int] = {}  # of results, until `release`
        self._done: dict[int, TrainingResult] = {}
        self._evaluations = 0
        self._figures: dict[int, Future[tuple[float, float]]] = {}  # evaluations that have not ended

    def begin(self, setup: SimulationSetup, task: Task | None) -> bool:
        """Begin another run; return False if these workers cannot serve it, and must be closed.

        The call waits for the trainings of the last run that workers have been given.
        """
        if self._shape != _shape_of(setup, len(self._processes)) or task is not self._task:
            return False
        with self._changed:
            try:
                self._order = []
                while self._given:
                    self._wait()
                for pipe in self._pipes:
                    pipe.send((setup.config, setup.seed))
            except (AffluxError, OSError):
                return False
            self._reset()
        return True

    def submit(self, sequence: int, finish: float, sent: SentModel) -> None:
        """Add a training whose result is needed at virtual time `finish`."""
        with self._changed:
            self._waiting[sequence] = sent
            heappush(self._order, (finish, sequence, sequence))
            self._assign()

    def take(self, sequence: int) -> TrainingResult | None:
        """Wait for the result of a training, and return it.

        Return None if no place for the result is free: then the caller must train. The result's arrays are valid until
        `release`.

        Raises:
            WorkerError: a worker has failed.
            ConfigError: as `Trainer.train`.
        """
        with self._changed:
            while sequence not in self._done:
                if sequence in self._waiting and not self._free_results:
                    del self._waiting[sequence]
                    return None
                self._wait()
            return self._done.pop(sequence)

    def release(self, sequence: int) -> None:
        """Free the arrays of a result, which are no longer needed."""
        with self._changed:
            place = self._places.pop(sequence, None)
            if place is not None:
                self._free_results.append(place)
                self._assign()

    def evaluate(self, model: Pulled) -> "Future[tuple[float, float]]":
        """Return an object that will hold the accuracy and loss of a model.

        The call waits if two models for each worker have not been evaluated yet.

        Raises:
            WorkerError: a worker has failed.
            ConfigError: as `Trainer.evaluate`.
        """
        with self._changed:
            while len(self._figures) >= 2 * len(self._processes):
                self._wait()
            self._evaluations += 1
            number, sequence = self._evaluations, -self._evaluations
            figures = self._figures[sequence] = Future()
            self._waiting[sequence] = SentModel(-1, model, None, 0)
            heappush(self._order, (-inf, number, sequence))
            self._assign()
            if self._error is not None:
                raise self._error
        return figures

    def _wait(self) -> None:
        """Wait for a result; raise the exception that has ended the receiving thread."""
        if self._error is not None:
            raise self._error
        self._changed.wait(POLL_SECONDS)

    def _feed(self) -> None:
        """Receive results and send trainings until a worker fails or the processes are ended."""
        try:
            while True:
                ready: list[Any] = connection.wait(self._pipes)
                with self._changed:
                    for pipe in ready:
                        self._receive(pipe)
                    self._assign()
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error
                for figures in self._figures.values():
                    figures.set_exception(error)
                self._changed.notify_all()

    def _assign(self) -> None:
        """Give evaluations, and the trainings that are needed first, to workers that have room for them."""
        while self._order and (worker := self._with_room()) is not None:
            sequence = self._order[0][-1]
            if sequence >= 0 and not self._free_results:
                return
            heappop(self._order)
            sent = self._waiting.pop(sequence, None)
            if sent is not None:  # else it was trained elsewhere
                self._give(worker, sequence, sent)

    def _with_room(self) -> int | None:
        """Return the worker with the fewest jobs, if it has room for one.

        A worker whose last job is an evaluation gets no other job, because that job would wait.
        """
        free = [worker for worker, queue in enumerate(self._queues) if not queue or queue[-1] >= 0]
        worker = min(free, key=lambda worker: len(self._queues[worker]), default=None)
        return None if worker is None or len(self._queues[worker]) >= QUEUE else worker

    def _give(self, worker: int, sequence: int, sent: SentModel) -> None:
        result, memory = -1, self._memory
        if sequence >= 0:
            result = self._places[sequence] = self._free_results.pop()
            if memory.shifts is not None and sent.shift is not None:
                memory.shifts[result] = sent.shift
        job = WorkerJob(sequence, sent.client, self._hold(sent.model), result, sent.shift is not None)
        self._given[sequence] = sent.model.version
        self._queues[worker].append(sequence)
        try:
            self._pipes[worker].send(tuple(job))
        except OSError:
            raise self._ended(worker) from None

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

    def _receive(self, pipe: Any) -> None:
        """Receive a message of a worker."""
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
        sequence, *facts = answer
        self._queues[worker].remove(sequence)
        version = self._given.pop(sequence)
        held = self._held[version]
        held[1] -= 1
        if not held[1]:
            self._free_versions.append(held[0])
            del self._held[version]
        if sequence < 0:
            accuracy, loss = facts
            self._figures.pop(sequence).set_result((accuracy, loss))
            return
        (examples, loss, steps, fault), place, memory = facts, self._places[sequence], self._memory
        buffers = None if memory.trained is None else memory.trained[place]
        self._done[sequence] = TrainingResult(memory.updates[place], examples, loss, steps, buffers, fault)

    def _ended(self, worker: int) -> ProcessKilledError:
        process = self._processes[worker]
        process.join(POLL_SECONDS)
        code = process.exitcode
        return ProcessKilledError(f"a worker process has ended with exit code {code}; the run can be resumed")

    def close(self) -> None:
        """End the processes; only their trainings in progress are lost."""
        self._at_exit()


def _end(processes: list[Any], pipes: list[Any], thread: threading.Thread) -> None:
    for process in processes:
        process.kill()
    if thread.ident is not None:  # the thread ends when the first pipe has ended
        thread.join()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.close()
        process.join()
        process.close()
    processes.clear()
    pipes.clear()


def _shape_of(setup: SimulationSetup, count: int) -> Shape:
    d, buffers = len(setup.initial_params), setup.model.initial_buffers
    waiting = max(WAITING_LEAST * count, min(setup.most_at_once, WAITING_BYTES // (4 * max(d, 1))))
    scaffold = setup.config.client_optimizer == "scaffold"
    return Shape(d, 0 if buffers is None else len(buffers), count * (QUEUE + 1) + 1, count * QUEUE + waiting, scaffold)


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
