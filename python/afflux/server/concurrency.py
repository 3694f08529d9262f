"""One mutex for an object that many threads share, jobs that run without it, and threads that wait.

Knows nothing of what the object is. Its owner gives four functions, which a `Monitor` calls:

    publish()     with the mutex, first: makes the results of finished jobs visible; returns whether jobs are left
    next_job()    with the mutex: a job that no thread drives; None if there is none
    run(job)      without the mutex: does the job, or what an interrupted thread left of it
    at_rest()     in a forked child: no thread was at work when the process forked

The mutex is held for decisions and copies of the state, never during a job. A KeyboardInterrupt may be raised at any
call: it leaves the mutex free, and the job without a driver, so that another thread, or the next call, goes on with it.
For that, `with` takes the plain lock itself, no call is made before its owner is noted, and the first statement of each
`finally` makes no call: CPython raises interrupts, and runs signal handlers, only at calls and at backward jumps.
"""

from _thread import LockType
from collections.abc import Callable
from threading import Lock, get_ident
from time import monotonic
from typing import Generic, Protocol, TypeVar

from afflux._engine import forks
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
        publish: Callable[[], bool],
        next_job: Callable[[], _Job | None],
        run: Callable[[_Job], None],
        at_rest: Callable[[], bool],
    ) -> None:
        self._publish = publish
        self._next_job = next_job
        self._run = run
        self._at_rest = at_rest
        self._mutex = Lock()
        self._handed_out = False  # jobs, of which not all are known to be published
        self._bells: list[LockType] = []  # each is released to wake one waiter
        self._adopting = Lock()
        self.owner: int | None = None  #: the thread that holds the mutex
        self.forks = forks[0]  #: of the process that may use it
        self.alone: str | None = None  #: what a forked child cannot use; None: it has a copy of its own

    def wait_for(
        self, attempt: Callable[[], _Found | None], timeout: float | None = None, *, work: bool = True
    ) -> _Found | None:
        """Calls `attempt` with the mutex until it returns something; between two calls, does jobs or sleeps.

        A job that `attempt` has made, or found without a driver, is claimed before the mutex is released.

        Args:
            attempt: returns None to wait; it may have made a job.
            timeout: seconds after which to give up; None: never.
            work: False: sleeps, and leaves jobs to other threads.

        Returns:
            What `attempt` returned; None after `timeout` seconds.
        """
        me, bell, ran = get_ident(), None, False
        job: _Job | None = None
        deadline = None if timeout is None else monotonic() + timeout
        try:
            while True:
                with self._mutex:
                    self.owner = me
                    try:
                        if self._handed_out:
                            self._handed_out = self._publish()
                        if ran:
                            self._wake()
                        found = attempt()
                        if found is not None:
                            return found
                        job, ran = self._next_job() if work else None, False
                        if job is not None:
                            self._handed_out = True
                            job.driver = me
                        else:
                            bell = self._new_bell()
                    finally:
                        self.owner = None
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
        me = get_ident()
        with self._mutex:
            self.owner = me
            try:
                return action()
            finally:
                self.owner = None

    def notify(self) -> None:
        """Publishes finished jobs, and wakes all waiters."""
        me = get_ident()
        with self._mutex:
            self.owner = me
            try:
                if self._handed_out:
                    self._handed_out = self._publish()
                self._wake()
            finally:
                self.owner = None

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
        """In a forked child: makes the copy the child's own, if no thread was at work when the process forked.

        Raises:
            UnavailableError: a thread was at work, or the child cannot use its parent's parts.
        """
        if forks[0] == self.forks:
            return
        if self.alone is not None:
            raise UnavailableError(f"[{op}] this process was forked, and {self.alone} is its parent's")
        if self._adopting.acquire(timeout=5):
            try:
                if forks[0] == self.forks:
                    return  # another thread was first
                if self._at_rest() and not self._mutex.locked():
                    self.forks = forks[0]
                    return
            finally:
                self._adopting.release()
        raise UnavailableError(
            f"[{op}] this process was forked while another thread used the server, so that its copy is torn: use the "
            "server in the process that made it, or fork while no other thread uses it"
        )
