"""The open tasks of a server: which client trains from which version, and the params of these versions.

The params are held for conversions from and to models, up to a limit: a step never fails because of a task. Methods
that change the object are called with the server's mutex. Their statements are ordered so that the object is consistent
if an interrupt comes between any two of them.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from time import monotonic, time

from afflux.aggregation.reports import Closed, Opened, Pulled
from afflux.rules.rule import ClientId

#: The largest number of versions whose params are held for tasks, if the server was made without max_versions.
MOST_BASES = 64


class OpenTask:
    """An open task."""

    __slots__ = ("deadline", "opened")

    def __init__(self, opened: Opened, deadline: float) -> None:
        self.opened = opened
        self.deadline = deadline  #: by time.monotonic(); inf: none


class TaskBook:
    """The open tasks of a server.

    Args:
        max_versions: the largest number of versions whose params are held; None: MOST_BASES.
        max_staleness: params older than this are not held; None: no limit.
        closed_last: returns the id of the last closed task in the server's state, or the ids of those that a step has
            closed; None if no task was closed.
    """

    def __init__(
        self,
        max_versions: int | None,
        max_staleness: int | None,
        closed_last: Callable[[], str | tuple[str, ...] | None],
    ) -> None:
        self._most = MOST_BASES if max_versions is None else max_versions
        self._max_staleness = max_staleness
        self._closed_last = closed_last
        self._open: dict[str, OpenTask] = {}
        self._bases: dict[int, tuple[Pulled, set[str]]] = {}  # by version, with the ids of the tasks that hold it
        self._start, self._numbers = (0, ""), count()
        #: A heap of deadlines. Closed tasks stay in it until their deadline, or until they are the larger part.
        self._leases: list[tuple[float, int, OpenTask]] = []
        self.next_deadline = inf  #: no open task has an earlier deadline

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTask]:
        self._finish_closing()
        return iter([*self._open.values()])

    def opened(self) -> list[Opened | Closed]:
        """Return the log entries that have opened the tasks."""
        return [task.opened for task in self]

    def is_open(self, task: OpenTask) -> bool:
        """Return whether a task is open."""
        self._finish_closing()
        return self._is_open(task)

    def _is_open(self, task: OpenTask) -> bool:
        return self._open.get(task.opened.task) is task

    def _finish_closing(self) -> None:
        """Close the tasks that the state has closed last, if an interrupt came before the book closed them too."""
        last = self._closed_last()
        for task_id in last if isinstance(last, tuple) else () if last is None else (last,):
            if (torn := self._open.get(task_id)) is not None:
                self.close(torn)

    def find(self, task_id: str) -> OpenTask | None:
        """Return the open task of this id; None if there is none."""
        return self._open.get(task_id)

    def base(self, version: int) -> Pulled | None:
        """Return the version of this number; None if no task holds it."""
        found = self._bases.get(version)
        return None if found is None else found[0]

    def base_of(self, task: OpenTask) -> Pulled | None:
        """Return the version that a task holds; None if the task is closed, or the version was released."""
        held = task.opened.hold and self._is_open(task)
        return self.base(task.opened.version) if held else None

    def bases(self) -> dict[int, Pulled]:
        """Return the versions that are held, by number."""
        return {version: base for version, (base, _) in self._bases.items()}

    def new(self, client_id: ClientId, version: int, lease: float | None, *, hold: bool) -> OpenTask:
        """Return a new task, which is not in the book yet."""
        pid = os.getpid()
        if self._start[0] != pid:  # ids are unique: a random start for each process, and a counter
            self._start = pid, os.urandom(8).hex()
        until = None if lease is None else time() + lease
        opened = Opened(f"{self._start[1]}-{next(self._numbers)}", client_id, version, hold, until, lease)
        return OpenTask(opened, inf if lease is None else monotonic() + lease)

    def add(self, task: OpenTask, base: Pulled | None) -> None:
        """Open the task. If `base` is given, the task holds it."""
        if task.deadline != inf:
            heappush(self._leases, (task.deadline, next(self._numbers), task))
            self.next_deadline = self._leases[0][0]
            if len(self._leases) > 100 + 2 * len(self._open):
                leases = [lease for lease in self._leases if lease[2] is task or self._is_open(lease[2])]
                heapify(leases)
                self._leases = leases
        self._open[task.opened.task] = task
        if base is not None and task.opened.hold:
            self._bases.setdefault(base.version, (base, set()))[1].add(task.opened.task)
            while len(self._bases) > self._most:
                self._bases.pop(min(self._bases))

    def restore(self, opened: Iterable[Opened], bases: Mapping[int, Pulled]) -> None:
        """Open the tasks of a store, with the bases that the store has kept.

        The system's clock may have been set back: at most the whole lease is left.
        """
        now = time()
        for entry in opened:
            left = inf if entry.until is None else min(entry.until - now, inf if entry.lease is None else entry.lease)
            self.add(OpenTask(entry, monotonic() + left), bases.get(entry.version))

    def close(self, task: OpenTask) -> None:
        """Close the task. May be repeated."""
        task_id, version = task.opened.task, task.opened.version
        held = self._bases.get(version)
        if held is not None:
            held[1].discard(task_id)
            if not held[1]:
                self._bases.pop(version, None)
        self._open.pop(task_id, None)  # last: a task that is still in the book is closed again

    def clear(self) -> None:
        """Close all tasks."""
        self._open, self._bases, self._leases, self.next_deadline = {}, {}, [], inf

    def next_overdue(self) -> OpenTask | None:
        """Return the open task whose lease has ended first, until it is closed; None if there is none."""
        while self._leases and not self._is_open(self._leases[0][2]):
            heappop(self._leases)
        self.next_deadline = self._leases[0][0] if self._leases else inf
        return self._leases[0][2] if self.next_deadline <= monotonic() else None

    def release_outdated(self, version: int) -> None:
        """Release the bases that are too old at this version of the server."""
        if self._max_staleness is not None:
            while self._bases and version - min(self._bases) > self._max_staleness:
                self._bases.pop(min(self._bases))

    def release_one(self, newest: int) -> bool:
        """Release the oldest base whose memory this frees. Return False if there is none."""
        for version in sorted(self._bases):
            if version == newest:
                break  # the server itself holds it
            base, users = self._bases.pop(version)
            alive, buffers = weakref.ref(base.params), base.buffers
            del base
            if (params := alive()) is None:
                return True
            self._bases[version] = Pulled(params, version, buffers), users  # another reference keeps the memory
            del params
        return False
