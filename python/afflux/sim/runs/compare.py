"""Several rules and seeds, in this process or several; the results do not depend on which."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

from afflux.sim import interrupts
from afflux.sim.errors import require
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.updates_file import Keep
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

POLL_SECONDS = 0.1


class Job(NamedTuple):
    """One run to do."""

    spec: RuleSpec
    seed: int
    followers: tuple[RuleSpec, ...] = ()
    """Rules that get the same updates: clients train from the params of `spec`."""
    config: SimConfig | None = None
    """Its own setting, where it is not the one of all jobs."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        return self.spec.label + "".join(f" + {follower.label}" for follower in self.followers)


Watch = Callable[[int, int], None]
"""Called with (index of the job, its arrivals so far)."""


def jobs_of(specs: Sequence[RuleSpec], seeds: Sequence[int], *, paired: bool = False) -> list[Job]:
    """Return all runs, seed by seed, so that an early look sees every rule; paired: one run a seed, the first leads."""
    if paired:
        return [Job(specs[0], seed, tuple(specs[1:])) for seed in seeds]
    return [Job(spec, seed) for seed in seeds for spec in specs]


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(
    jobs: Sequence[Job],
    config: SimConfig,
    *,
    processes: int = 1,
    watch: Watch | None = None,
    keep: Keep | None = None,
    finished: dict[int, list[RunResult]] | None = None,
) -> list[RunResult]:
    """Run all jobs and return their results in the order of `jobs`, the leader's before its followers'.

    `processes` > 1 starts that many fresh interpreters (spawned: no inherited torch threads).
    Ctrl-C stops them and raises KeyboardInterrupt, after the arrival at hand (see `interrupts.held`). A failing run
    stops the others. What was done by then is in `finished`, by the index of the job. `keep` says what the runs write
    while they go on.
    """
    require("torch", *(["sklearn"] if config.data == "digits" else []))
    watch = watch or (lambda index, arrivals: None)
    finished = {} if finished is None else finished
    for job in jobs:
        for spec in (job.spec, *job.followers):
            spec.build()
    with interrupts.held():
        if processes == 1 or len(jobs) <= 1:
            for index, job in enumerate(jobs):
                finished[index] = _here(index, job, config, keep, watch)
        else:
            _spread_out(jobs, config, keep, min(processes, len(jobs)), watch, finished)
    return [result for index in range(len(jobs)) for result in finished[index]]


def _here(index: int, job: Job, config: SimConfig, keep: Keep | None, watch: Watch) -> list[RunResult]:
    from afflux.sim.runs.simulation import run_paired

    specs = (job.spec, *job.followers)
    return run_paired(specs, job.seed, job.config or config, lambda arrivals: watch(index, arrivals), keep)


def _spread_out(
    jobs: Sequence[Job],
    config: SimConfig,
    keep: Keep | None,
    processes: int,
    watch: Watch,
    finished: dict[int, list[RunResult]],
) -> None:
    context = multiprocessing.get_context("spawn")
    # Each run writes its own entry, so plain shared memory is enough; the last one says "stop".
    shared = context.RawArray("q", len(jobs) + 1)
    with ProcessPoolExecutor(processes, context, _start_worker, (shared,)) as pool:
        try:
            with _masked():
                futures = {pool.submit(_there, i, job, config, keep): i for i, job in enumerate(jobs)}
            pending = set(futures)
            while pending:
                interrupts.check()
                done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                for index in range(len(jobs)):
                    watch(index, shared[index])
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    finished[futures[future]] = future.result()
        except BaseException:
            shared[len(jobs)] = 1
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _masked() -> Iterator[None]:
    # Processes inherit the mask, so Ctrl-C, which goes to all of them, is the parent's alone.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_shared: Any = None
_outside_jobs = threading.Lock()


def _start_worker(shared: Any) -> None:
    # The parent decides, and tells through `shared`; this line is for systems without masks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _shared
    _shared = shared
    _outside_jobs.acquire()
    threading.Thread(target=_end_when_told, daemon=True).start()


def _end_when_told() -> None:
    # At once, in the middle of an import or of a long arrival: what a run keeps is whole after every line. But not
    # amid the sending of a result: the parent would wait for the rest of it.
    while not _shared[-1]:
        time.sleep(POLL_SECONDS)
    with _outside_jobs:
        os._exit(1)


def _there(index: int, job: Job, config: SimConfig, keep: Keep | None) -> list[RunResult]:
    def watch(index: int, arrivals: int) -> None:
        _shared[index] = arrivals

    _outside_jobs.release()
    try:
        return _here(index, job, config, keep, watch)
    finally:
        _outside_jobs.acquire()
