"""Pools of processes that can be stopped in the middle of a job, and that end with their parent."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.util import Finalize
from typing import Any

from afflux.ops.errors import ConfigError
from afflux.rules.files import loaded_digests, parents_digests
from afflux.sim.errors import ProcessKilledError
from afflux.sim.workload.task import Task

POLL_SECONDS = 0.1
#: Seconds after which a process without a job ends, if its pool was stopped and does not end it.
PATIENCE_SECONDS = 10.0

#: Pools start new interpreters, without the parent's torch threads.
CONTEXT = multiprocessing.get_context("spawn")


class ProcessPool(ProcessPoolExecutor):
    """A pool of processes; `stop` ends their jobs."""

    def __init__(self, count: int, begin: Callable[..., object], *arguments: Any) -> None:
        """Make a pool of `count` processes, each of which first calls `begin` with the arguments."""
        self._stopped = CONTEXT.RawValue("b", 0)
        super().__init__(count, CONTEXT, _start, (self._stopped, loaded_digests(), begin, arguments))
        # Runs before multiprocessing and the executor wait for their processes.
        Finalize(self, _set, (self._stopped,), exitpriority=100)

    def job(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Call a function in one of the processes, which the first jobs start."""
        with _sigint_blocked():
            future = self.submit(_run, function, *arguments)
        future.add_done_callback(self._stop_if_broken)
        return future

    def _stop_if_broken(self, future: "Future[Any]") -> None:
        if not future.cancelled() and isinstance(future.exception(), BrokenProcessPool):
            _set(self._stopped)  # the executor sends SIGTERM to the other processes after this call

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """End the processes, when their jobs have ended; after an error at once."""
        if kind is not None:
            self.stop()
        self.shutdown()

    def stop(self) -> None:
        """End the jobs and the processes."""
        _set(self._stopped)
        self.shutdown(cancel_futures=True)


def _set(stopped: Any) -> None:
    stopped.value = 1


@contextmanager
def killed_processes_as(message: str) -> Iterator[None]:
    """Raise ProcessKilledError if a process of a pool has ended."""
    try:
        yield
    except BrokenProcessPool:
        raise ProcessKilledError(message) from None


@contextmanager
def _sigint_blocked() -> Iterator[None]:
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


def pickled(task: Task | None) -> bytes:
    """Return the task for other processes of this program; raise ConfigError if the task cannot be sent there."""
    try:
        return pickle.dumps(task)
    except Exception as error:
        advice = "define its functions at the top of a module"
        raise ConfigError(f"the task cannot be sent to another process ({error}): {advice}") from error


_outside_jobs = threading.Lock()


def _start(
    stopped: Any, digests: Mapping[str, str], begin: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    # A run's own process answers both signals. An executor sends SIGTERM to the other processes if one was killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1) if stopped.value else None)
    parents_digests.update(digests)
    begin(*arguments)
    _outside_jobs.acquire()
    threading.Thread(target=_exit_when_stopped, args=(stopped,), daemon=True).start()


def _exit_when_stopped(stopped: Any) -> None:
    # Exit at once, even in the middle of an import or of a long arrival: the files of a run are valid after every line.
    # A process does not exit while it sends a result: the parent would wait for the rest of the result. A process whose
    # parent was killed exits in any case.
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not stopped.value:
        if connection.wait([parent.sentinel], POLL_SECONDS):
            os._exit(1)
    _outside_jobs.acquire(timeout=PATIENCE_SECONDS)
    os._exit(1)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    _outside_jobs.release()
    try:
        return function(*arguments)
    finally:
        _outside_jobs.acquire()
