"""One mutex for an object that many threads share, jobs that run without it, and threads that wait.

Knows nothing of what the object is. Its owner gives four functions, which a `Monitor` calls:

    publish()     with the mutex, first: makes the result of finished jobs visible
    next_job()    with the mutex: a job that no thread drives; None if there is none
    run(job)      without the mutex: does the job, or what an interrupted thread left of it
    at_rest()     in a forked child: no thread was at work when the process forked

The mutex is held for decisions and copies of the state, never during a job. A KeyboardInterrupt may be raised at any
call: it leaves the mutex free, and the job without a driver, so that another thread, or the next call, goes on with it.
For that, `with` takes the plain lock itself, and the first statement of each `finally` makes no call: CPython raises
interrupts only at calls and at backward jumps.
"""

import os
from _thread import LockType
from collections.abc import Callable
from threading import Lock, get_ident
from time import monotonic
from typing import Generic, Protocol, TypeVar

from afflux.ops.errors import UnavailableError

_Found = TypeVar("_Found")

#: Seconds after which a waiter looks again, in case no thread notifies it: a resource may come free with the end of a
#: traceback, or between a look and its bell.
_RECHECK = 0.05


class Job(Protocol):
    """Work that one thread at a time does without the mutex."""

    driver: int | None  #: the thread that does it; None: no thread does


_Job = TypeVar("_Job", bound=Job)


class Monitor(Generic[_Job]):
    """See the module."""

    def __init__(
        self,
        publish: Callable[[], None],
        next_job: Callable[[], _Job | None],
        run: Callable[[_Job], None],
        at_rest: Callable[[], bool],
    ) -> None:
        self._publish = publish
        self._next_job = next_job
        self._run = run
        self._at_rest = at_rest
        self._mutex = Lock()
        self._owner: int | None = None  # the thread that holds the mutex
        self._bells: list[LockType] = []  # each is released to wake one waiter
        self._pid = os.getpid()
        self._adopting = Lock()
        self.alone: str | None = None  #: what a forked child cannot use; None: it has a copy of its own

    @property
    def held_here(self) -> bool:
        """Whether this thread holds the mutex."""
        return self._owner == get_ident()

    def wait_for(self, attempt: Callable[[], _Found | None], timeout: float | None = None) -> _Found | None:
        """Calls `attempt` with the mutex until it returns something; between two calls, does jobs or sleeps.

        Args:
            attempt: returns None to wait, and must change nothing then.
            timeout: seconds after which to give up; None: never.

        Returns:
            What `attempt` returned; None after `timeout` seconds.
        """
        me, bell, ran = get_ident(), None, False
        job: _Job | None = None
        deadline = None if timeout is None else monotonic() + timeout
        try:
            while True:
                with self._mutex:
                    self._owner = me
                    try:
                        self._publish()
                        if ran:
                            self._wake()
                        found = attempt()
                        if found is not None:
                            return found
                        job, ran = self._next_job(), False
                        if job is not None:
                            job.driver = me
                        else:
                            bell = self._new_bell()
                    finally:
                        self._owner = None
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

    def locked(self, action: Callable[[], _Found]) -> _Found:
        """Calls `action` once, with the mutex."""
        with self._mutex:
            self._owner = get_ident()
            try:
                return action()
            finally:
                self._owner = None

    def notify(self) -> None:
        """Publishes finished jobs, and wakes all waiters."""
        with self._mutex:
            self._owner = get_ident()
            try:
                self._publish()
                self._wake()
            finally:
                self._owner = None

    def notify_waiters(self) -> None:
        """`notify` if a thread waits; else returns at once."""
        if self._bells:
            self.notify()

    def _wake(self) -> None:
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def _new_bell(self) -> LockType:
        bell = Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def check_process(self, op: str) -> None:
        """Rejects calls in a child that was forked while a thread was at work, or that cannot use its parent's parts.

        Raises:
            UnavailableError: see above.
        """
        if os.getpid() != self._pid:
            self._adopt(op)

    def _adopt(self, op: str) -> None:
        """Makes a forked copy the child's own, if no thread was at work when the process forked."""
        if self.alone is not None:
            raise UnavailableError(f"[{op}] this process was forked, and {self.alone} is its parent's")
        if self._adopting.acquire(timeout=5):
            try:
                if os.getpid() == self._pid:
                    return  # another thread was first
                if self._at_rest() and self._mutex.acquire(blocking=False):
                    self._mutex.release()
                    self._pid = os.getpid()
                    return
            finally:
                self._adopting.release()
        raise UnavailableError(
            f"[{op}] this process was forked while another thread used the server, so that its copy is torn: use the "
            "server in the process that made it, or fork while no other thread uses it"
        )
