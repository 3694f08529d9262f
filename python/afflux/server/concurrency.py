"""Who may touch a server when: a short mutex, one round being made at a time, slots that run out, and forks."""

import os
from _thread import LockType
from collections.abc import Callable
from threading import Lock, RLock, get_ident
from time import monotonic
from typing import TypeVar
from weakref import ref

from afflux.aggregation.admission import Admission
from afflux.aggregation.round import Round
from afflux.aggregation.streaming import Term, Total
from afflux.arrays.pools import Slot, Slots
from afflux.ops.errors import AffluxError, StoreError, UnavailableError

_Found = TypeVar("_Found")

#: A sleeper looks again after so many seconds, even if nobody rings: a slot may come free with the end of a traceback,
#: or between a look and its bell.
_LOOK_AGAIN = 0.05


class Gate:
    """The mutex is held for decisions and for copies of the state: never while a vector is taken in or a sweep runs."""

    def __init__(
        self,
        joins: Admission,
        slots: Slots,
        make: Callable[[Round | Total], None],
        commit: Callable[[Round], None],
        alone: str | None,
    ) -> None:
        """`make` does the sweeps, without the mutex; `commit` makes it count, with it, and may be repeated."""
        # Reentrant only so that it knows its owner: nobody enters twice.
        self.mutex = RLock()
        self._joins = joins
        self._slots = slots
        self._make = make
        self._commit = commit
        self._bells: list[LockType] = []  # of those who wait for the end of a round, or for a slot
        self._pid = os.getpid()
        self._adopting = Lock()
        self.store: str | None = None  # where the server keeps its state, if it does
        self.alone = alone  # what a forked child cannot use: the store, or a GPU
        self.check: Callable[[], None] = lambda: None  # refuses a store whose files have vanished or were cut off
        self.closed = False

    def enter(self, op: str) -> None:
        """Refuses calls that would hang or tear: from amid this thread's own, or in a child forked amid a push."""
        self.enter_process(op)
        if self.closed:
            raise StoreError(f"[{op}] this server is closed: Server.open({self.store!r}) goes on with it")
        making, adding = self._joins.book.round, self._joins.book.total
        if (
            self.mutex._is_owned()  # type: ignore[attr-defined]
            or (making is not None and making.driver == get_ident())
            or (adding is not None and adding.driver == get_ident())
        ):
            raise AffluxError(
                f"[{op}] called from within the rule's weigh or step, or by a signal handler, amid another call of "
                "this thread"
            )

    def enter_process(self, op: str) -> None:
        """Refuses calls in a child forked amid a push, or of a server that is its parent's alone."""
        if os.getpid() != self._pid:
            self._adopt(op)

    def _adopt(self, op: str) -> None:
        """Makes a forked copy the child's own, if the fork found the server at rest."""
        if self.alone is not None:
            raise UnavailableError(f"[{op}] this process was forked, and {self.alone} is its parent's")
        if self._adopting.acquire(timeout=5):
            try:
                if os.getpid() == self._pid:
                    return  # another thread was first
                book = self._joins.book
                adding = book.total is not None and book.total.driver is not None
                at_rest = book.round is None and not adding and self._slots.taken == book.slots_held
                if at_rest and self.mutex.acquire(blocking=False):
                    self.mutex.release()
                    self._pid = os.getpid()
                    return
            finally:
                self._adopting.release()
        raise UnavailableError(
            f"[{op}] this process was forked while another thread used the server, so that its copy is torn: use the "
            "server in the process that made it, or fork while it rests"
        )

    def drive(self, work: Round | Total) -> None:
        """Makes a round and commits it, or makes terms; the mutex, which the caller holds, is free during the sweep."""
        alive = _Alive()
        work.drive = (ref(alive), get_ident())
        held = (1, get_ident())
        try:
            self.mutex._release_save()  # type: ignore[attr-defined]
            self._make(work)
        finally:
            # First, without a call: from here on another thread may go on with the work, if this one is interrupted.
            alive = None  # type: ignore[assignment]
            self.mutex._acquire_restore(held)  # type: ignore[attr-defined]
            self._conclude(work)

    def _conclude(self, work: Round | Total) -> None:
        making = self._joins.book.round
        if making is not None and making is work and making.finished:
            self._commit(making)
        self._ring()

    def _sleep(self, seconds: float) -> None:
        """Sleeps without the mutex, which the caller holds, until somebody rings."""
        bell = Lock()
        bell.acquire()
        held = (1, get_ident())
        self._bells.append(bell)
        # Not a Condition, whose wait may be interrupted between the release and its own try. Unlike acquire,
        # _acquire_restore cannot be interrupted while it waits: the mutex is held again, whatever is raised.
        try:
            self.mutex._release_save()  # type: ignore[attr-defined]
            bell.acquire(timeout=seconds)
        finally:
            self.mutex._acquire_restore(held)  # type: ignore[attr-defined]

    def _ring(self) -> None:
        """Wakes all who sleep; with the mutex."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def settle(self) -> None:
        """Waits, with the mutex, until what is decided is made: the round, and the terms of the buffer."""
        self._joins.tidy()
        self.check()
        if self._joins.book.unfinished:
            self._wait_for(lambda: None if self._joins.book.unfinished else True, None)

    def added(self, term: Term) -> None:
        """Waits, with the mutex, until a term is in its total; this thread adds it, if no other one does."""
        self._wait_for(lambda: True if term.done else None, None)

    def _add(self) -> bool:
        """Adds the terms on the book to their total; not if there are none, or another thread is at it."""
        book = self._joins.book
        total = book.total
        if total is None or total.added == book.filled or total.driver is not None:
            return False
        total.due = [w.slot for w in book.waiting[total.added : book.filled] if isinstance(w.slot, Term)]
        self.drive(total)
        return True

    def take_slot(self, timeout: float | None) -> Slot:
        """A free slot, or a new one, or the next that comes free."""
        slot = self._slots.take()
        if slot is None:
            with self.mutex:
                slot = self._slots.checked("push", self._wait_for(self._slots.take, timeout))
        return slot

    def wake(self) -> None:
        """Lets those who wait for a slot look again; without the mutex."""
        if self._bells:
            with self.mutex:
                self._ring()

    def _wait_for(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """What `look` gives, with the mutex, as soon as it gives something; None after `timeout` seconds."""
        deadline = None if timeout is None else monotonic() + timeout
        while (found := look()) is None:
            making = self._joins.book.round
            if making is not None and making.driver is None:
                self.drive(making)
                continue
            if self._add():
                continue
            left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - monotonic())
            if left <= 0:
                break
            self._sleep(left)
        return found


class _Alive:
    """Lives as long as its thread is in the sweep."""
