"""The open tasks of a server: which client trains from which version, and the params of these versions.

The params are held for conversions from and to models, within bounds: a step never fails because of a task. All methods
but `find` are called with the server's mutex.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from math import inf
from secrets import token_hex
from time import monotonic, time

from afflux.aggregation.reports import Closed, Opened, Pulled
from afflux.rules.rule import ClientId

#: Versions whose params are held for tasks, if the server was made without max_versions.
MOST_BASES = 64


class OpenTask:
    """A task of the book."""

    __slots__ = ("base", "deadline", "opened")

    def __init__(self, opened: Opened, base: Pulled | None, deadline: float) -> None:
        self.opened = opened
        self.base = base  #: the version that the client starts from, while it is held
        self.deadline = deadline  #: of time.monotonic(); inf: none


class TaskBook:
    """The open tasks of a server.

    Args:
        max_versions: the largest number of versions whose params are held; None: MOST_BASES.
        max_staleness: params older than this are not held; None: however old.
    """

    def __init__(self, max_versions: int | None, max_staleness: int | None) -> None:
        self._most = MOST_BASES if max_versions is None else max_versions
        self._max_staleness = max_staleness
        self._open: dict[str, OpenTask] = {}
        self._held: dict[int, set[OpenTask]] = {}  # by version, those with a base
        # Never the same twice: a random start for each process, and a counter.
        self._ids = map(f"{token_hex(8)}-{{}}".format, count())
        self.next_deadline = inf  #: no open task's is earlier

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTask]:
        return iter([*self._open.values()])

    def opened(self) -> list[Opened | Closed]:
        """The entries that have opened them."""
        return [task.opened for task in self]

    def find(self, task_id: str) -> OpenTask | None:
        """The open task of this id; None if there is none."""
        return self._open.get(task_id)

    def base(self, version: int) -> Pulled | None:
        """The version of this number, if it is held."""
        return next((task.base for task in self._held.get(version, ())), None)

    def bases(self) -> dict[int, Pulled]:
        """The versions that are held, by number."""
        found = {version: self.base(version) for version in self._held}
        return {version: base for version, base in found.items() if base is not None}

    def new(self, client_id: ClientId, base: Pulled, lease: float | None, *, hold: bool) -> OpenTask:
        """A task that is not in the book yet."""
        until = None if lease is None else time() + lease
        opened = Opened(next(self._ids), client_id, base.version, hold, until)
        return OpenTask(opened, base if hold else None, inf if lease is None else monotonic() + lease)

    def add(self, task: OpenTask) -> None:
        """From now on the task is open."""
        self._open[task.opened.task] = task
        self.next_deadline = min(self.next_deadline, task.deadline)
        if task.base is not None:
            self._held.setdefault(task.base.version, set()).add(task)
            while len(self._held) > self._most:
                self.release_oldest()

    def restore(self, opened: Iterable[Opened], bases: "dict[int, Pulled]") -> None:
        """Opens the tasks of a store, with those of their bases that it has kept."""
        for entry in opened:
            left = inf if entry.until is None else monotonic() + entry.until - time()
            self.add(OpenTask(entry, bases.get(entry.version) if entry.hold else None, left))

    def close(self, task: OpenTask) -> None:
        """The task is no longer open."""
        self._open.pop(task.opened.task, None)
        self._release(task)

    def overdue(self) -> list[OpenTask]:
        """The tasks whose time is over."""
        now = monotonic()
        found = [task for task in self._open.values() if task.deadline <= now]
        left = [task.deadline for task in self._open.values() if task.deadline > now]
        self.next_deadline = min(left, default=inf)
        return found

    def release_outdated(self, version: int) -> None:
        """Lets go of the bases that are too old at this version of the server."""
        if self._max_staleness is not None and self._held:
            while self._held and version - min(self._held) > self._max_staleness:
                self.release_oldest()

    def release_oldest(self) -> bool:
        """Lets go of the oldest base; False if none is held."""
        if not self._held:
            return False
        for task in [*self._held[min(self._held)]]:
            self._release(task)
        return True

    def _release(self, task: OpenTask) -> None:
        if task.base is None:
            return
        tasks = self._held[task.base.version]
        tasks.discard(task)
        if not tasks:
            del self._held[task.base.version]
        task.base = None
