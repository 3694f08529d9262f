"""The main function of a worker process, and the memory that it shares with the process of its run."""

import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from traceback import format_exception
from typing import Any, NamedTuple, cast

import numpy as np

from afflux.sim.clients.flat_model import reproducible_torch
from afflux.sim.errors import ConfigError, text_with_notes
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose, StreamSeries
from afflux.sim.workload.rule_files import expect_digests
from afflux.sim.workload.task import Task


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


def work(
    pipe: Any,
    shape: Shape,
    raw: Sequence[Any],
    config: SimConfig,
    seed: int,
    content: bytes,
    digests: Mapping[str, str],
) -> None:
    """Train and evaluate until the pipe is closed, which happens when the parent ends for any reason.

    Args:
        pipe: the worker receives jobs and the configurations of other runs, and sends facts of results, and errors.
        shape: the places in `raw`.
        raw: shared memory.
        config: of the first run.
        seed: of the first run.
        content: the pickled task.
        digests: of the files that the parent has executed.
    """
    expect_digests(digests)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent answers them
        signal.signal(number, signal.SIG_IGN)
    worker, told = _Worker(shape, raw, content), (config, seed)
    with reproducible_torch(), suppress(EOFError, OSError):  # of the pipe alone
        while True:
            answer = _tried(worker.answer, told)
            if answer is not None:
                pipe.send(answer)
            told = pipe.recv()


def _tried(action: Callable[[Any], Any], told: Any) -> Any:
    """Return the result of `action`, or its error, in types that can be sent."""
    try:
        return action(told)
    except ConfigError as error:
        return "error", True, text_with_notes(error)
    except BaseException as error:  # also of sys.exit() in the task's functions: signals raise nothing here
        return "error", False, "a worker failed:\n" + "".join(format_exception(error))


class _Worker:
    """The trainings and evaluations of one run, and then of another one."""

    def __init__(self, shape: Shape, raw: Sequence[Any], content: bytes) -> None:
        self._memory = SharedMemory(shape, raw)
        self._content = content

    @cached_property
    def _task(self) -> Task | None:
        return cast("Task | None", pickle.loads(self._content))

    def answer(self, told: Any) -> Any:
        """Run a job and return its result; or begin another run with a new configuration and seed, and return None."""
        if len(told) == 2:
            config, seed = told
            self._trainer = SimulationSetup.of(config, seed, self._task).trainer
            self._streams = StreamSeries(seed, StreamPurpose.BATCHES)
            return None
        job = WorkerJob(*told)
        return self._evaluate(job) if job.sequence < 0 else self._train(job)

    def _train(self, job: WorkerJob) -> tuple[int, int, float | None, int, str]:
        """Write the result of a job into its place; return the sequence, examples, loss, steps and fault."""
        memory = self._memory
        shift = memory.shifts[job.result] if job.shift and memory.shifts is not None else None
        pulled = memory.params[job.version], self._streams.stream(job.sequence), shift
        trained = self._trainer.train(job.client, *pulled, self._buffers(job))
        memory.updates[job.result] = trained.update
        if memory.trained is not None and trained.buffers is not None:
            memory.trained[job.result] = trained.buffers
        return job.sequence, trained.num_examples, trained.loss, trained.steps, trained.fault

    def _evaluate(self, job: WorkerJob) -> tuple[int, float, float]:
        """Return the sequence of a job, and the accuracy and loss of its params."""
        return job.sequence, *self._trainer.evaluate(self._memory.params[job.version], self._buffers(job))

    def _buffers(self, job: WorkerJob) -> np.ndarray | None:
        return None if self._memory.pulled is None else self._memory.pulled[job.version]
