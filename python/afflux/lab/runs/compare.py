"""Runs of several rules and seeds, in this process or in several; the results are the same."""

import logging
import math
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from afflux.lab import interrupts
from afflux.lab.results.finished_runs import ERRORS, INTERRUPTED, FailedRun, Job, Runs, split_runs
from afflux.lab.results.run_history import JobProgress, OnEvaluation, RunProgress, TrackedRun
from afflux.lab.results.run_result import RunResult
from afflux.lab.runs.processes import CONTEXT, POLL_SECONDS, ProcessPool, killed_processes_as, pickled
from afflux.lab.runs.run_checkpoint import StoredRun
from afflux.lab.runs.setup import RunSetup
from afflux.lab.runs.simulation import simulate
from afflux.lab.runs.workers import WorkerPool, Workers
from afflux.lab.tasks.ignored_settings import OF_FUNCTION
from afflux.ops import default_threads
from afflux.ops.errors import ConfigError
from afflux.ops.validation import printable
from afflux.rules.specs import RuleSpec
from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.errors import require, text_with_notes
from afflux.sim.workload.config import IMAGES, SimConfig
from afflux.sim.workload.selection import check_participation
from afflux.sim.workload.task import Task

_LOGGER = logging.getLogger("afflux")
#: The progress of a run that was finished before, or has no result.
ENDED = RunProgress(0, 0, 0.0, math.nan, math.nan, 1.0)
#: The settings on which the data, their division and the model depend.
_OF_INPUTS = ("task", "data", "model", "part", "delays", "availability", *OF_FUNCTION)
#: A `RunProgress` in shared memory.
FACTS = np.dtype([(name, "U40" if name in ("metric", "unit") else "f8") for name in RunProgress._fields])


def make_jobs(specs: Sequence[RuleSpec], seeds: Sequence[int], *, paired: bool = False) -> list[Job]:
    """Return all jobs, seed by seed. With `paired`, each seed has one job, in which the first rule is the leader."""
    if paired:
        return [Job(specs[0], seed, tuple(specs[1:])) for seed in seeds]
    return [Job(spec, seed) for seed in seeds for spec in specs]


def inputs_of_jobs(jobs: Sequence[Job], config: SimConfig, task: Task | None = None) -> list[Mapping[str, str]]:
    """Return the digests of the inputs of each job; jobs that differ in other settings than `_OF_INPUTS` share them.

    Args:
        jobs: the jobs.
        config: settings of the jobs that have no settings.
        task: the task of the clients; default the task in the settings.

    Raises:
        ConfigError: see `RunSetup`.
    """
    digests: dict[tuple[Any, ...], Mapping[str, str]] = {}
    inputs = []
    with reproducible_libraries():
        for job in jobs:
            settings = replace(job.config or config, compile=False)
            key = job.seed, *(getattr(settings, name) for name in _OF_INPUTS)
            if key not in digests:
                digests[key] = RunSetup(settings, job.seed, task, digests=True).inputs
            inputs.append(digests[key])
    return inputs


def default_processes(workers: Workers) -> int:
    """Return the number of simultaneous runs; all workers of these runs have a CPU."""
    return 1 if workers == "ray" else max(1, default_threads() // workers)


def compare(
    jobs: Sequence[Job],
    config: SimConfig,
    *,
    processes: int = 1,
    watch: JobProgress | None = None,
    output: Path | None = None,
    finished: dict[int, Runs] | None = None,
    task: Task | None = None,
    workers: Workers = 1,
    most: int | None = None,
    enough: Callable[[], bool] = lambda: False,
    on_evaluation: OnEvaluation | None = None,
    store: StoredRun | None = None,
) -> list[RunResult]:
    """Make the runs that are not finished, and return all results in the order of `jobs`, a leader's before the others.

    A run that diverges, whose process is killed or, with the setting faults="raise", in which a client fails ends
    alone: `finished` has its `FailedRun`. Ctrl-C and SIGTERM stop all runs after the current arrival and raise
    KeyboardInterrupt (see `interrupts.deferred`). Any other error stops all runs, too.

    Args:
        jobs: the jobs.
        config: settings of the jobs that have no settings.
        processes: with more than 1, this number of new interpreters is started (spawned: without the parent's torch
            threads).
        watch: called with (index of the job, its progress); also at the end of a run without a result, and at first for
            each finished run.
        output: the destination of the audit logs; default none.
        finished: the finished jobs by index, to which the others are added; read it after an error.
        task: the task of the clients; default the task in the settings. More than one process need a task that can be
            pickled.
        workers: processes of each run that train; see `WorkerPool`.
        most: number of jobs that start at most.
        enough: called after each job; if true, no other job starts, and those that have started come to their end.
        on_evaluation: called in this process after each evaluation of each run.
        store: of the server of a single job.

    Returns:
        The results in the order of `jobs`, without those that did not start; within a job, in the order of its rules.
    """
    require("torch", *(["sklearn"] if task is None and config.task == IMAGES and config.data == "digits" else []))
    if workers == "ray" and processes > 1:
        raise ConfigError("workers='ray' trains the clients of one run at a time on all CPUs: give no other processes")
    finished = {} if finished is None else finished
    waiting, running = [index for index in range(len(jobs)) if index not in finished][:most], set[int]()
    for index, job in enumerate(jobs):
        for rule in [spec.build() for spec in (job.spec, *job.followers)]:
            if index in waiting:
                check_participation(rule, (own := job.config or config).selection, own.rounds)

    def end(index: int, make: Callable[[], list[RunResult]]) -> bool:
        """Add a finished run; return whether its process was killed."""
        finished[index] = runs = _result_of(jobs[index], make)
        running.discard(index)
        if not isinstance(runs, FailedRun):
            return False
        if runs.status != "diverged" or not jobs[index].may_diverge:
            reason = runs.reason if runs.reason.startswith(jobs[index].title) else f"{runs}: {runs.reason}"
            _LOGGER.warning("%s", printable(reason + "; the other runs go on" * (len(jobs) > 1)))
        if watch is not None:
            watch(index, ENDED)
        return runs.status == "killed"

    if watch is not None:
        for index in finished:
            watch(index, ENDED)
    with interrupts.deferred(), interrupts.sigterm_as_interrupt():
        try:
            if processes == 1 or len(waiting) <= 1:
                with closing(WorkerPool(workers)) as training:
                    for index in waiting:
                        running.add(index)
                        options: dict[str, Any] = {"output": output, "task": task, "pool": training, "store": store}
                        options |= {"progress": watch and partial(watch, index), "on_evaluation": on_evaluation}
                        end(index, partial(_run_job, jobs[index], config, **options))
                        if enough():
                            break
            else:
                shared = CONTEXT.RawArray("b", len(jobs) * FACTS.itemsize)  # each job writes its own row: no lock
                begin = shared, pickled(task), workers
                with ExitStack() as pools:
                    free = [_Process(begin, on_evaluation, pools) for _ in range(min(processes, len(waiting)))]
                    futures: dict[Future[list[RunResult]], tuple[int, _Process]] = {}
                    while futures or (free and waiting):
                        while free and waiting:
                            index, process = waiting.pop(0), free.pop()
                            running.add(index)
                            future = process.pool.job(_run_job_in_worker, index, jobs[index], config, output)
                            futures[future] = index, process
                        interrupts.raise_if_pending()
                        done, _ = wait(futures, POLL_SECONDS, FIRST_COMPLETED)
                        if watch is not None:
                            for index in sorted(running):
                                arrivals, version, *facts = np.frombuffer(shared, FACTS)[index].item()
                                watch(index, RunProgress(int(arrivals), int(version), *facts))
                        for _, process in futures.values():
                            process.pass_evaluations()
                        for future in sorted(done, key=lambda future: future.exception() is not None):
                            index, process = futures.pop(future)
                            killed = end(index, future.result)
                            free.append(_Process(begin, on_evaluation, pools) if killed else process)
                        if done and enough():
                            waiting.clear()
        except KeyboardInterrupt:
            for index in sorted(running):
                finished[index] = FailedRun(jobs[index].label, jobs[index].seed, INTERRUPTED, "")
            raise
    return split_runs(finished)[0]


class _Process:
    """A process that makes one run after another, and what it sends of their evaluations."""

    def __init__(self, begin: tuple[Any, ...], on_evaluation: OnEvaluation | None, pools: ExitStack) -> None:
        self._on_evaluation = on_evaluation
        self._sent = None if on_evaluation is None else CONTEXT.SimpleQueue()  # a process that is killed keeps its lock
        self.pool = pools.enter_context(ProcessPool(1, _begin, *begin, self._sent))

    def pass_evaluations(self) -> None:
        """Call `on_evaluation` for the evaluations since the last call."""
        while self._on_evaluation is not None and self._sent is not None and not self._sent.empty():
            self._on_evaluation(*self._sent.get())


def _result_of(job: Job, make: Callable[[], list[RunResult]]) -> Runs:
    """Return the results that `make` returns, or why there are none."""
    try:
        with killed_processes_as("its process was killed, or could not be started"):
            return make()
    except tuple(ERRORS.values()) as error:
        status = next(status for status, kind in ERRORS.items() if isinstance(error, kind))
        return FailedRun(job.label, job.seed, status, text_with_notes(error), error)


def _run_job(job: Job, config: SimConfig, **options: Any) -> list[RunResult]:
    """Make the run, with the options of `simulate`."""
    config = job.config or config
    config = replace(config, faults="raise") if job.may_diverge else config
    if job.make is not None:
        return job.make(job, config, **options)
    return simulate((job.spec, *job.followers), job.seed, config, **options)


_shared: Any = None
_task: Task | None = None
_pool = WorkerPool(1)
_evaluations: Any = None


def _begin(shared: Any, task: bytes, workers: Workers, evaluations: Any) -> None:
    global _shared, _task, _pool, _evaluations
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _shared, _task, _pool, _evaluations = shared, pickle.loads(task), WorkerPool(workers), evaluations


def _run_job_in_worker(index: int, job: Job, config: SimConfig, output: Path | None) -> list[RunResult]:
    rows = np.frombuffer(_shared, FACTS)

    def progress(run: RunProgress) -> None:
        rows[index] = tuple(run)

    def on_evaluation(run: TrackedRun, metrics: dict[str, float]) -> None:
        _evaluations.put((run, metrics))

    options: dict[str, Any] = {"progress": progress, "output": output, "task": _task, "pool": _pool}
    return _run_job(job, config, on_evaluation=None if _evaluations is None else on_evaluation, **options)
