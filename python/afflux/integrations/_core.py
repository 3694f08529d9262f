"""What the adapters share: which clients train, what becomes of their replies, and how a run resumes after a crash.

An adapter translates messages. For each client that shall train it calls `assign`, sends the task's params, and calls
`sent` with the key by which its framework names the reply. Each reply goes to `receive`, each error to `fail`, and
`expire` ends the assignments whose time is over. None of these calls raises because of what a client has sent.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from afflux import Layout, Server, Task
from afflux.aggregation.options import Options
from afflux.aggregation.reports import Receipt
from afflux.ops.errors import AffluxError
from afflux.ops.validation import count_of, positive
from afflux.rules.rule import ClientId, Rule

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A client that trains."""

    client: ClientId
    task: str  #: its id
    version: int  #: that the client trains from
    deadline: float  #: by time.monotonic()
    resumed: bool = False  #: of a run before this one: its reply may have come and been lost, so nobody waits for it


def missing(package: str, extra: str, error: ImportError) -> NoReturn:
    """Raises the error of an adapter whose framework is not installed."""
    raise ImportError(
        f"afflux.integrations.{extra} needs {package}: pip install 'afflux[{extra}]' ({error})", name=error.name
    ) from error


def open_server(
    rule: Rule, arrays: Arrays, store: "str | PathLike[str] | None", threads: int | None, options: Options
) -> Server:
    """A new server, or the one that a store holds.

    Args:
        rule: of the server; a store's own rule is replaced by it, if they are of one name.
        arrays: the initial model by name; only its layout counts if the store holds a server.
        store: a folder, new or made by an earlier run; None: the server is in memory.
        threads: of a step; None: all CPUs of this process.
        options: of a new server; `faults` is "record" if it is not given.

    Raises:
        AffluxError, StoreError: the store holds a server of another rule or model, or is damaged.
    """
    if store is not None and Path(store).is_dir() and any(Path(store).iterdir()):
        server = Server.open(store, rule, num_threads=threads)
        if server.layout != Layout.of(arrays):
            server.close(checkpoint=False)
            raise AffluxError(f"[{rule.name}] {store} holds a server of another model")
        return server
    chosen: Options = {"faults": "record"}
    chosen.update(options)
    return Server(rule, arrays, store=store, num_threads=threads, **chosen)


class TrainingRun:
    """The clients that train for one server, and the replies since its last step.

    Args:
        server: takes the replies; made with faults="record".
        concurrency: clients that train at the same time, at most.
        timeout: seconds after which a client is given up; its late reply is `expired`.
        seed: of the choice of clients.
        stored: whether the server has a store, for `checkpoint` and `resume`.
    """

    def __init__(
        self, server: Server, *, concurrency: int, timeout: float, seed: int = 0, stored: bool = False
    ) -> None:
        self.server = server
        self.stored = stored
        self.concurrency = count_of(1)("TrainingRun", "concurrency", concurrency)
        self.timeout = positive("TrainingRun", "timeout", timeout)
        #: Replies that nobody waits for, clients that failed, and clients that were given up.
        self.lost: dict[str, int] = {"unknown": 0, "failed": 0, "overdue": 0}
        self._assigned: dict[str, Assignment] = {}
        self._metrics: list[Any] = []
        self._random = random.Random(seed)

    # Clients that train

    @property
    def keys(self) -> list[str]:
        """The keys of the replies that are waited for."""
        return list(self._assigned)

    @property
    def free(self) -> int:
        """How many more clients may train."""
        return max(0, self.concurrency - sum(not assigned.resumed for assigned in self._assigned.values()))

    def choose(self, clients: Iterable[ClientId]) -> list[ClientId]:
        """Clients to train next, drawn from those that do not train: as many as may, and are there."""
        busy = {assigned.client for assigned in self._assigned.values() if not assigned.resumed}
        idle = [client for client in clients if client not in busy]
        return self._random.sample(idle, min(self.free, len(idle)))

    def assign(self, client: ClientId) -> Task:
        """A task for this client, of the newest version."""
        return self.server.checkout(client, lease=self.timeout)

    def sent(self, key: str, task: Task, *, resumed: bool = False) -> None:
        """The task was sent, and the reply to it will have this key."""
        self._assigned[key] = Assignment(task.client, task.id, task.version, monotonic() + self.timeout, resumed)

    # Replies

    def receive(
        self,
        key: str,
        arrays: Callable[[], Arrays],
        *,
        num_examples: Any = 1,
        loss: object = None,
        metrics: object = None,
        **training: Any,
    ) -> Receipt | None:
        """Pushes a client's model.

        Args:
            key: of the reply.
            arrays: reads the model; what it raises is the client's fault.
            num_examples: as for `Server.push`.
            loss: likewise; what is no finite number counts as not known.
            metrics: kept until the next step, if the reply joins.
            training: client_lr and local_steps, as for `Server.push`.

        Returns:
            What became of the reply; None if nobody waits for it, as for the second of two replies.
        """
        assigned = self._assigned.pop(key, None)
        if assigned is None:
            self.lost["unknown"] += 1
            return None
        try:
            model = arrays()
        except Exception as error:  # bytes that are no array, a record that lacks one
            model = _Unreadable(error)
        known_loss = loss if isinstance(loss, int | float) and np.isfinite(loss) else None
        receipt = self.server.push(
            task=assigned.task, model=model, num_examples=num_examples, loss=known_loss, **training
        )
        if receipt.status in ("joined", "replaced") and metrics is not None:
            self._metrics.append(metrics)
        return receipt

    def fail(self, key: str) -> None:
        """The client has failed, or will never reply."""
        if self._end(key):
            self.lost["failed"] += 1

    def expire(self) -> list[str]:
        """Gives up the clients whose time is over; returns their keys."""
        now = monotonic()
        overdue = [key for key, assigned in self._assigned.items() if assigned.deadline <= now]
        for key in overdue:
            self._end(key)
            self.lost["overdue"] += 1
        return overdue

    def _end(self, key: str) -> bool:
        assigned = self._assigned.pop(key, None)
        if assigned is not None:
            self._cancel({assigned.task})
        return assigned is not None

    def _cancel(self, ids: Iterable[str]) -> None:
        wanted = set(ids)
        for task in self.server.tasks if wanted else ():
            if task.id in wanted:
                task.cancel()

    def end(self) -> None:
        """Gives up all clients that still train: the run is over."""
        self._cancel(assigned.task for assigned in self._assigned.values())
        self._assigned.clear()

    def take_metrics(self) -> list[Any]:
        """The metrics of the replies that joined since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    # Resuming

    def checkpoint(self, notes: Mapping[str, Any]) -> None:
        """Commits the server with its open tasks and the adapter's notes, JSON-able; nothing without a store."""
        if self.stored:
            tasks = {key: assigned.task for key, assigned in self._assigned.items()}
            self.server.checkpoint({"in_flight": tasks, "lost": self.lost, "own": notes})

    def resume(self, schema: Any) -> Any:
        """Goes on after the last checkpoint.

        Replies of clients that trained then are taken in, while others train in their place; tasks that were opened
        later are cancelled.

        Args:
            schema: the type of the adapter's notes, a dict.

        Returns:
            The notes of the last checkpoint; an empty dict if there are none.

        Raises:
            AffluxError: the notes of the store are those of another program.
        """
        notes = self.server.notes if self.stored else None
        try:
            found = msgspec.convert({} if notes is None else notes, _Notes)
            own = msgspec.convert(found.own, schema, str_keys=True)
        except msgspec.ValidationError as error:
            raise AffluxError(f"[resume] the store's notes are not those of this adapter: {error}") from None
        opened = {task.id: task for task in self.server.tasks}
        for key, task in found.in_flight.items():
            if task in opened:
                self.sent(key, opened.pop(task), resumed=True)
        for other in opened.values():
            other.cancel()
        for name, count in found.lost.items():
            self.lost[name] = count
        return own


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint stores beside the server."""

    in_flight: dict[str, str] = {}  #: the task of each reply that is waited for
    lost: dict[Literal["unknown", "failed", "overdue"], int] = {}
    own: dict[str, Any] = {}  #: the adapter's


class _Unreadable(Mapping[str, Any]):
    """The model of a reply that holds none. The server that reads it counts the error, and keeps the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, name: str) -> NoReturn:
        raise self._error

    def __iter__(self) -> NoReturn:
        raise self._error

    def __len__(self) -> NoReturn:
        raise self._error


class VersionArrays:
    """The arrays of one version, by name and in the model's dtypes.

    Args:
        arrays: the initial model.
        layout: of the server.
    """

    def __init__(self, arrays: Arrays, layout: Layout | None) -> None:
        assert layout is not None  # the server was made with a tree
        self._layout = layout
        self._dtypes = {name: np.asarray(array).dtype for name, array in arrays.items()}

    def of(self, task: Task) -> dict[str, npt.NDArray[Any]]:
        """Read-only views of the version's params, as far as they have the model's dtypes, else copies."""
        pulled = task.pulled
        views = self._layout.views(pulled.params, pulled.buffers)
        copies = None
        for name, dtype in self._dtypes.items():
            if views[name].dtype != dtype:
                copies = task.tree() if copies is None else copies
                views[name] = np.asarray(copies[name]).astype(dtype, copy=False)
        return {name: views[name] for name in self._dtypes}
