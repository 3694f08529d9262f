"""Runs of several rules and seeds, in this process or in several; the results are the same."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

from afflux.sim import interrupts
from afflux.sim.errors import DivergedError, ProcessKilledError, require
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.results.run_history import JobProgress, Progress, RunProgress
from afflux.sim.results.run_result import RunResult
from afflux.sim.runs.simulation import simulate
from afflux.sim.runs.workers import WorkerPool, pickled, sigint_blocked
from afflux.sim.workload.config import IMAGES, SimConfig
from afflux.sim.workload.rule_files import expect_digests, loaded_digests
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.sim.workload.task import Task

POLL_SECONDS = 0.1
FACTS = len(RunProgress._fields)


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


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_processes(workers: int) -> int:
    """Return the number of simultaneous runs; all workers of these runs have a CPU."""
    return max(1, available_cpus() // workers)


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
            with closing(WorkerPool(workers)) as pool:
                for index, job in enumerate(jobs):
                    progress = None if watch is None else partial(watch, index)
                    finished[index] = _run_job(job, config, output, progress, task, pool)
                    if enough():
                        break
        else:
            options = (min(processes, len(jobs)), watch, finished, pickled(task), workers, enough)
            _run_in_processes(jobs, config, output, *options)
    return [result for index in range(len(jobs)) if index in finished for result in finished[index]]


def _run_job(
    job: Job,
    config: SimConfig,
    output: AuditOutput | None,
    progress: Progress | None,
    task: Task | None,
    pool: WorkerPool,
) -> list[RunResult]:
    specs, config = (job.spec, *job.followers), job.config or config
    if not job.may_diverge:
        return simulate(specs, job.seed, config, progress, output, task, pool)
    try:
        return simulate(specs, job.seed, replace(config, faults="raise"), progress, output, task, pool)
    except DivergedError:  # a setting with which clients diverge has no results
        return []


def _run_in_processes(
    jobs: Sequence[Job],
    config: SimConfig,
    output: AuditOutput | None,
    processes: int,
    watch: JobProgress | None,
    finished: dict[int, list[RunResult]],
    task: bytes,
    workers: int,
    enough: Callable[[], bool],
) -> None:
    context = multiprocessing.get_context("spawn")
    # Each job writes its own entries, so that no lock is needed; a 1 in the last entry stops all workers.
    shared = context.RawArray("d", len(jobs) * FACTS + 1)
    with ProcessPoolExecutor(processes, context, _start_worker, (shared, task, workers, loaded_digests())) as pool:
        try:
            with sigint_blocked():
                futures = {pool.submit(_run_job_in_worker, i, job, config, output): i for i, job in enumerate(jobs)}
            pending = set(futures)
            while pending:
                interrupts.raise_if_pending()
                done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                if watch is not None:
                    for index in range(len(jobs)):
                        watch(index, _progress(shared, index))
                done = {future for future in done if not future.cancelled()}
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    finished[futures[future]] = future.result()
                if done and enough():
                    for future in pending:
                        future.cancel()
        except BaseException as error:
            shared[-1] = 1
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise ProcessKilledError("a process of the runs was killed, or could not be started") from None
            raise


def _progress(shared: Any, index: int) -> RunProgress:
    arrivals, version, *facts = shared[index * FACTS : (index + 1) * FACTS]
    return RunProgress(int(arrivals), int(version), *facts)


_shared: Any = None
_task: Task | None = None
_pool = WorkerPool(1)
_outside_jobs = threading.Lock()


def _start_worker(shared: Any, task: bytes, workers: int, digests: Mapping[str, str]) -> None:
    # The parent stops workers through `shared`; this line is for systems without signal masks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _shared, _task, _pool
    expect_digests(digests)
    _shared, _task, _pool = shared, pickle.loads(task), WorkerPool(workers)
    _outside_jobs.acquire()
    threading.Thread(target=_exit_when_stopped, daemon=True).start()


def _exit_when_stopped() -> None:
    # Exit at once, even in the middle of an import or of a long arrival: the files of a run are valid after every line.
    # A worker does not exit while it sends a result: the parent would wait for the rest of the result. A worker whose
    # parent was killed exits in any case.
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not _shared[-1]:
        if connection.wait([parent.sentinel], POLL_SECONDS):
            os._exit(1)
    with _outside_jobs:
        os._exit(1)


def _run_job_in_worker(index: int, job: Job, config: SimConfig, output: AuditOutput | None) -> list[RunResult]:
    def progress(run: RunProgress) -> None:
        _shared[index * FACTS : (index + 1) * FACTS] = run

    _outside_jobs.release()
    try:
        return _run_job(job, config, output, progress, _task, _pool)
    finally:
        _outside_jobs.acquire()
