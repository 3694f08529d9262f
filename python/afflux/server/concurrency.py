"""A monitor for an object that many threads share: one mutex, jobs that run without the mutex, and waiting threads.

It knows nothing of the jobs: a class that derives from `Monitor` makes them.

The mutex is held for decisions and copies of the state, never during a job. A KeyboardInterrupt may be raised at any
call. It leaves the mutex free and the job without a driver, so that another thread, or the next call, continues the
job. CPython raises interrupts, and runs signal handlers, only at calls and at backward jumps. Therefore `with` takes
the mutex itself, which notes its owner, and the first statement of each `finally` makes no call.
"""

from _thread import LockType
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Generic, Protocol, TypeVar

from afflux._engine import Mutex, forks
from afflux.ops.errors import UnavailableError

_Found = TypeVar("_Found")

#: Seconds after which a waiting thread checks again, in case a notification is missed: a resource may be released when
#: a traceback is deleted, or between the thread's check and the registration of its lock in `_bells`.
_RECHECK = 0.05


class MonitorJob(Protocol):
    """A job, which one thread at a time runs without the mutex."""

    driver: int | None  #: the thread that runs it; None: no thread runs it


_Job = TypeVar("_Job", bound=MonitorJob)


class Monitor(ABC, Generic[_Job]):
    """One mutex, the jobs that run without it, and the threads that wait; see the module."""

    def __init__(self, mutex: Mutex) -> None:
        self.mutex = mutex
        self._bells: list[LockType] = []  # each is released to wake one waiter
        self._adopting = Lock()
        self.alone: str | None = None  #: what a forked child cannot use; None: the child has its own copy

    @abstractmethod
    def _publish(self) -> bool:
        """Make the results of finished jobs visible; return whether jobs are left. Called with the mutex, first."""

    @abstractmethod
    def _next_job(self) -> _Job | None:
        """Return a job that no thread drives; None if there is none. Called with the mutex."""

    @abstractmethod
    def _run(self, job: _Job) -> None:
        """Do the job, or what an interrupted thread left of it. Called without the mutex."""

    @abstractmethod
    def _at_rest(self) -> bool:
        """Return, in a forked child, whether no thread was at work when the process forked."""

    def wait_for(
        self, attempt: Callable[[], _Found | None], timeout: float | None = None, *, work: bool = True
    ) -> _Found | None:
        """Call `attempt` with the mutex until its result is not None. Between two calls, run jobs or sleep.

        A job that `attempt` has created, or that has no driver, is claimed before the mutex is released.

        Args:
            attempt: returns None to wait; it may create a job.
            timeout: seconds after which to stop waiting; None: never.
            work: False: sleeps, and leaves jobs to other threads.

        Returns:
            The result of `attempt`; None after `timeout` seconds.
        """
        mutex, bell, ran = self.mutex, None, False
        job: _Job | None = None
        deadline = None if timeout is None else monotonic() + timeout
        try:
            while True:
                with mutex:
                    if mutex.handed_out:
                        mutex.handed_out = self._publish()
                    if ran and self._bells:
                        self._wake()
                    outcome = attempt()
                    if outcome is not None:
                        return outcome
                    job, ran = self._next_job() if work else None, False
                    if job is not None:  # no call: an interrupt would give up a job that another thread may claim
                        mutex.handed_out, mutex.driver, job.driver = True, mutex.owner, mutex.owner
                    else:
                        bell = self._new_bell()
                if job is not None:
                    self._run(job)
                    job.driver = None
                    job, ran = None, True
                elif bell is not None:
                    left = _RECHECK if deadline is None else min(_RECHECK, deadline - monotonic())
                    if left <= 0:
                        return None
                    bell.acquire(timeout=left)
        finally:
            if job is not None:
                job.driver = None
                self.notify()

    def _is_free(self) -> bool:
        """Take the mutex and release it; return False if another thread holds it."""
        acquired: list[bool] = []
        try:
            acquired.extend(map(self.mutex.acquire, (False,)))  # one call: an interrupt finds the mutex in the list
            return acquired[0]
        finally:
            if acquired == [True]:
                self.mutex.release()

    def locked(self, action: Callable[[], _Found]) -> _Found:
        """Call `action` once, with the mutex."""
        with self.mutex:
            return action()

    def notify(self) -> None:
        """Publish finished jobs, and wake all waiters."""
        with self.mutex:
            if self.mutex.handed_out:
                self.mutex.handed_out = self._publish()
            self._wake()

    def notify_waiters(self) -> None:
        """Call `notify` if a thread waits; else return at once."""
        if self._bells:
            self.notify()

    def _wake(self) -> None:
        bells, self._bells = self._bells, []
        self.mutex.awaited = False
        for bell in bells:
            bell.release()

    def _new_bell(self) -> LockType:
        bell = Lock()
        bell.acquire()
        self._bells.append(bell)
        self.mutex.awaited = True
        return bell

    def check_process(self, op: str) -> None:
        """Make the copy of a forked child usable in the child, if no other thread was at work when the process forked.

        Raises:
            UnavailableError: a thread was at work, or the child cannot use its parent's resources.
        """
        if forks[0] == self.mutex.fork:
            return
        if self.alone is not None:
            raise UnavailableError(f"[{op}] this process was forked, and {self.alone} is its parent's")
        if self._adopting.acquire(timeout=5):
            try:
                if forks[0] == self.mutex.fork:
                    return  # another thread was first
                # `locked` is False if a thread had the mutex, but not yet the GIL, when the process forked.
                if self._at_rest() and self._is_free():
                    self.mutex.fork = forks[0]
                    return
            finally:
                self._adopting.release()
        raise UnavailableError(
            f"[{op}] this process was forked while another thread used the server, so that its copy is inconsistent: "
            "use the server in the process that made it, or fork while no other thread uses it"
        )
