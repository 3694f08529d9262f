"""Runs of several rules and seeds, in this process or in several; the results are the same."""

import pickle
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from afflux.ops import default_threads
from afflux.sim import interrupts
from afflux.sim.errors import DivergedError, require
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.results.run_history import JobProgress, OnEvaluation, RunProgress, TrackedRun
from afflux.sim.results.run_result import RunResult
from afflux.sim.runs.processes import CONTEXT, POLL_SECONDS, ProcessPool, killed_processes_as, pickled
from afflux.sim.runs.simulation import simulate
from afflux.sim.runs.workers import WorkerPool
from afflux.sim.workload.config import IMAGES, SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.sim.workload.task import Task

#: A `RunProgress` in shared memory.
FACTS = np.dtype([(name, "U40" if name in ("metric", "unit") else "f8") for name in RunProgress._fields])


class Job(NamedTuple):
    """One run: a rule and a seed."""

    spec: RuleSpec
    seed: int
    followers: tuple[RuleSpec, ...] = ()
    """Other rules that get the same updates; the clients train from the params of `spec`."""
    config: SimConfig | None = None
    """Settings of this job; None: those of all jobs."""
    may_diverge: bool = False
    """Whether a diverging client ends this job alone, which then has no results."""

    @property
    def label(self) -> str:
        """Name of the job in tables."""
        return self.spec.label + "".join(f" + {follower.label}" for follower in self.followers)

    @property
    def title(self) -> str:
        """Name of the job, different from those of other jobs with the same rule."""
        return f"{self.label}, seed {self.seed}"


def make_jobs(specs: Sequence[RuleSpec], seeds: Sequence[int], *, paired: bool = False) -> list[Job]:
    """Return all jobs, seed by seed. With `paired`, each seed has one job, in which the first rule is the leader."""
    if paired:
        return [Job(specs[0], seed, tuple(specs[1:])) for seed in seeds]
    return [Job(spec, seed) for seed in seeds for spec in specs]


def default_processes(workers: int) -> int:
    """Return the number of simultaneous runs; all workers of these runs have a CPU."""
    return max(1, default_threads() // workers)


def compare(
    jobs: Sequence[Job],
    config: SimConfig,
    *,
    processes: int = 1,
    watch: JobProgress | None = None,
    output: AuditOutput | None = None,
    finished: dict[int, list[RunResult]] | None = None,
    task: Task | None = None,
    workers: int = 1,
    enough: Callable[[], bool] = lambda: False,
    on_evaluation: OnEvaluation | None = None,
) -> list[RunResult]:
    """Run all jobs and return their results in the order of `jobs`, the leader's before its followers'.

    Ctrl-C stops all jobs after the current arrival and raises KeyboardInterrupt (see `interrupts.deferred`). If a job
    fails, the others are stopped.

    Args:
        jobs: the jobs.
        config: settings of the jobs that have no settings.
        processes: with more than 1, this number of new interpreters is started (spawned: without the parent's torch
            threads).
        watch: called with (index of the job, its progress).
        output: the destination of the audit logs; default none.
        finished: filled with the results of each finished job, by its index; read it after an error.
        task: the task of the clients; default the task in the settings. More than one process need a task that can be
            pickled.
        workers: processes of each run that train; see `WorkerPool`.
        enough: called after each job; if true, no other job starts, and those that have started come to their end.
        on_evaluation: called in this process after each evaluation of each run.

    Returns:
        The results in the order of `jobs`, without those that did not start; within a job, in the order of its rules.
    """
    require("torch", *(["sklearn"] if task is None and config.task == IMAGES and config.data == "digits" else []))
    finished = {} if finished is None else finished
    for job in jobs:
        for spec in (job.spec, *job.followers):
            spec.build()
    with interrupts.deferred():
        if processes == 1 or len(jobs) <= 1:
            with closing(WorkerPool(workers)) as workers_pool:
                for index, job in enumerate(jobs):
                    progress = None if watch is None else partial(watch, index)
                    finished[index] = _run_job(job, config, progress, output, task, workers_pool, None, on_evaluation)
                    if enough():
                        break
        else:
            shared = CONTEXT.RawArray("b", len(jobs) * FACTS.itemsize)  # each job writes its own row: no lock is needed
            rows = np.frombuffer(shared, FACTS)
            evaluations = None if on_evaluation is None else CONTEXT.SimpleQueue()
            pool = ProcessPool(min(processes, len(jobs)), _begin, shared, pickled(task), workers, evaluations)
            with killed_processes_as("a process of the runs was killed, or could not be started"), pool:
                futures = {pool.job(_run_job_in_worker, i, job, config, output): i for i, job in enumerate(jobs)}
                pending = set(futures)
                while pending:
                    interrupts.raise_if_pending()
                    done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                    if watch is not None:
                        for index in range(len(jobs)):
                            arrivals, version, *facts = rows[index].item()
                            watch(index, RunProgress(int(arrivals), int(version), *facts))
                    while on_evaluation is not None and evaluations is not None and not evaluations.empty():
                        on_evaluation(*evaluations.get())
                    done = {future for future in done if not future.cancelled()}
                    for future in sorted(done, key=lambda future: future.exception() is not None):
                        finished[futures[future]] = future.result()
                    if done and enough():
                        for future in pending:
                            future.cancel()
    return [result for index in range(len(jobs)) if index in finished for result in finished[index]]


def _run_job(job: Job, config: SimConfig, *options: Any) -> list[RunResult]:
    """Make the run with `options`, the further arguments of `simulate`."""
    config = job.config or config
    config = replace(config, faults="raise") if job.may_diverge else config
    try:
        return simulate((job.spec, *job.followers), job.seed, config, *options)
    except DivergedError:  # a setting with which clients diverge has no results
        if job.may_diverge:
            return []
        raise


_shared: Any = None
_task: Task | None = None
_pool = WorkerPool(1)
_evaluations: Any = None


def _begin(shared: Any, task: bytes, workers: int, evaluations: Any) -> None:
    global _shared, _task, _pool, _evaluations
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _shared, _task, _pool, _evaluations = shared, pickle.loads(task), WorkerPool(workers), evaluations


def _run_job_in_worker(index: int, job: Job, config: SimConfig, output: AuditOutput | None) -> list[RunResult]:
    rows = np.frombuffer(_shared, FACTS)

    def progress(run: RunProgress) -> None:
        rows[index] = tuple(run)

    def on_evaluation(run: TrackedRun, metrics: dict[str, float]) -> None:
        _evaluations.put((run, metrics))

    track = None if _evaluations is None else on_evaluation
    return _run_job(job, config, progress, output, _task, _pool, None, track)
