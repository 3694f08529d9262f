"""Several rules and seeds, in this process or several; the results do not depend on which."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

from afflux.sim.config import RuleSpec, SimConfig
from afflux.sim.errors import require
from afflux.sim.result import RunResult

POLL_SECONDS = 0.1


class Job(NamedTuple):
    """One run to do."""

    spec: RuleSpec
    seed: int
    config: SimConfig | None = None
    """Its own setting, where it is not the one of all jobs."""


Watch = Callable[[int, int], None]
"""Called with (index of the job, its arrivals so far)."""


class StoppedError(Exception):
    """The run was asked to stop."""


def jobs_of(specs: Sequence[RuleSpec], seeds: Sequence[int]) -> list[Job]:
    """Return all runs, seed by seed, so that an early look sees every rule."""
    return [Job(spec, seed) for seed in seeds for spec in specs]


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(
    jobs: Sequence[Job], config: SimConfig, *, processes: int = 1, watch: Watch | None = None
) -> list[RunResult]:
    """Run all jobs and return their results in the order of `jobs`.

    `processes` > 1 starts that many fresh interpreters (spawned: no inherited torch threads).
    KeyboardInterrupt stops them and is raised again. A failing run stops the others.
    """
    require("torch", *(["sklearn"] if config.data == "digits" else []))
    watch = watch or (lambda index, arrivals: None)
    for job in jobs:
        job.spec.build()
    if processes == 1 or len(jobs) <= 1:
        return [_here(index, job, config, watch) for index, job in enumerate(jobs)]
    return _spread_out(jobs, config, min(processes, len(jobs)), watch)


def _here(index: int, job: Job, config: SimConfig, watch: Watch) -> RunResult:
    from afflux.sim.run import run

    return run(job.spec, job.seed, job.config or config, lambda arrivals: watch(index, arrivals))


def _spread_out(jobs: Sequence[Job], config: SimConfig, processes: int, watch: Watch) -> list[RunResult]:
    context = multiprocessing.get_context("spawn")
    # Each run writes its own entry, so plain shared memory is enough; the last one says "stop".
    shared = context.RawArray("q", len(jobs) + 1)
    with ProcessPoolExecutor(processes, context, _start_worker, (shared,)) as pool:
        futures: list[Future[RunResult]] = []
        try:
            with _ctrl_c_later():
                futures += [pool.submit(_there, i, job, config) for i, job in enumerate(jobs)]
            pending = set(futures)
            while pending:
                done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                for index in range(len(jobs)):
                    watch(index, shared[index])
                for future in done:
                    future.result()
        except BaseException:
            shared[len(jobs)] = 1
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    # Processes inherit the mask, so Ctrl-C, which goes to all of them, wakes the parent alone.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_shared: Any = None


def _start_worker(shared: Any) -> None:
    # The parent decides, and tells through `shared`; this line is for systems without masks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _shared
    _shared = shared


def _there(index: int, job: Job, config: SimConfig) -> RunResult:
    def watch(index: int, arrivals: int) -> None:
        if _shared[-1]:
            raise StoppedError
        _shared[index] = arrivals

    watch(index, 0)
    return _here(index, job, config, watch)
