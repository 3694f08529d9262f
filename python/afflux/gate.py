"""Who may touch a server when: a short mutex, one round being made at a time, slots that run out, and forks."""

import os
from collections.abc import Callable
from threading import Condition, Lock, get_ident
from time import monotonic
from typing import TypeVar

from afflux.errors import AffluxError, UnavailableError
from afflux.round import Round
from afflux.slots import Slot, Slots

_Found = TypeVar("_Found")


class Gate:
    """The mutex is held for decisions only: never while a vector is taken in, nor while a round's sweep runs."""

    def __init__(self, slots: Slots, make: Callable[[Round], None], commit: Callable[[Round], None]) -> None:
        """`make` does a round's sweep, without the mutex; `commit` makes it count, with it."""
        self.mutex = Lock()
        self.round: Round | None = None  #: decided and not yet committed
        self.slots = slots
        self._make = make
        self._commit = commit
        self._changed = Condition(self.mutex)  # a round is over, or a slot is free
        self._sleepers = 0
        self._pid = os.getpid()
        self._in_rule: int | None = None  # the thread that runs the rule's code, with the mutex

    def enter(self, op: str, waiting: int) -> None:
        """Refuses calls that would hang or tear: from the rule's own code, or in a child forked amid a push."""
        if os.getpid() != self._pid:
            self._adopt(op, waiting)
        if self._in_rule is not None and self._in_rule == get_ident():
            raise AffluxError(f"[{op}] called from within the rule's weigh or step, which hold the server")

    def _adopt(self, op: str, waiting: int) -> None:
        """Makes a forked copy the child's own, if the fork found the server at rest."""
        if self.mutex.acquire(blocking=False):
            resting = self.round is None and self.slots.taken == waiting
            self.mutex.release()
            if resting:
                self._pid = os.getpid()
                return
        raise UnavailableError(
            f"[{op}] this process was forked while another thread used the server, so that its copy is torn: use the "
            "server in the process that made it, or fork while it rests"
        )

    def prepare(self, decide: Callable[[], Round]) -> Round:
        """Runs the rule's code, with the mutex."""
        self._in_rule = get_ident()
        try:
            return decide()
        finally:
            self._in_rule = None

    def drive(self, sealed: Round) -> None:
        """Makes and commits a round; the mutex, which the caller holds, is free during the sweep."""
        sealed.driver = get_ident()
        try:
            self.mutex.release()
            self._make(sealed)
        finally:
            self.mutex.acquire()
            sealed.driver = None  # if this thread is interrupted, the next one that needs the round goes on with it
            if sealed.done:
                self._commit(sealed)
                self.round = None
                self.slots.give_back(*sealed.slots)
            self._changed.notify_all()

    def settle(self) -> None:
        """Waits, with the mutex, until no round is being made."""
        self._wait_for(lambda: True if self.round is None else None, None)

    def take_slot(self, timeout: float | None) -> Slot:
        """A free slot, or a new one, or the next that is given back."""
        slot = self.slots.take()
        if slot is None:
            with self.mutex:
                slot = self.slots.checked("push", self._wait_for(self.slots.take_or_make, timeout))
        return slot

    def _wait_for(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """What `look` gives, with the mutex, as soon as it gives something; None after `timeout` seconds."""
        deadline = None if timeout is None else monotonic() + timeout
        self._sleepers += 1
        try:
            while (found := look()) is None:
                if self.round is not None and self.round.driver is None:
                    self.drive(self.round)
                    continue
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        finally:
            self._sleepers -= 1
        return found

    def give_back(self, slot: Slot) -> None:
        """Frees a slot; without the mutex."""
        self.slots.give_back(slot)
        # A sleeper counts itself before it looks for a slot: it has seen this one, or is seen here.
        if self._sleepers:
            with self.mutex:
                self.wake()

    def wake(self) -> None:
        """Lets those who wait look again; with the mutex."""
        self._changed.notify_all()
