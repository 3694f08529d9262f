"""What the adapters share: which clients train, what becomes of their replies, and how a run resumes after a crash.

An adapter translates messages. For each client that shall train it calls `assign`, sends the task's params, and calls
`sent` with the key by which its framework names the reply. Each reply goes to `receive`, each error to `fail`, and
`expire` ends the assignments whose time is over. None of these calls raises because of what a client has sent.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from afflux import Layout, Pulled, Server, Task, ops
from afflux.aggregation.options import Options
from afflux.aggregation.reports import Receipt
from afflux.arrays.likeness import Like
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_float, count_of, positive
from afflux.rules.rule import ClientId, Rule

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A client that trains."""

    task: Task
    deadline: float  #: by time.monotonic()
    resumed: bool = False  #: opened by an earlier run; other clients train in its place, because its reply may be lost


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
    count = ops.threads(threads)  # replies are taken in one by one, by all threads
    if store is not None and Path(store).is_dir() and any(Path(store).iterdir()):
        server = Server.open(store, rule, num_threads=count, push_threads=count)
        if server.layout != Layout.of(arrays):
            server.close(checkpoint=False)
            raise AffluxError(f"[{rule.name}] {store} holds a server of another model")
        return server
    chosen: Options = {"faults": "record"}
    chosen.update(options)
    return Server(rule, arrays, store=store, num_threads=count, push_threads=count, **chosen)


class TrainingRun:
    """The clients that train for one server, and the replies since its last step.

    Args:
        server: takes the replies; made with faults="record".
        concurrency: clients that train at the same time, at most.
        timeout: seconds after which an assignment ends; a later reply has no effect.
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
        #: Counts of replies without an assignment, of clients that failed, and of clients that exceeded the timeout.
        self.lost: dict[str, int] = {"unknown": 0, "failed": 0, "overdue": 0}
        self._assigned: dict[str, Assignment] = {}
        self._metrics: list[Any] = []
        self._any_joined = False
        self._random = random.Random(seed)

    # Clients that train

    @property
    def keys(self) -> list[str]:
        """The keys of the replies to open assignments."""
        return list(self._assigned)

    @property
    def free(self) -> int:
        """How many more clients may train."""
        return max(0, self.concurrency - sum(not assigned.resumed for assigned in self._assigned.values()))

    def choose(self, clients: Iterable[ClientId]) -> list[ClientId]:
        """Clients to train next, drawn from those that do not train: as many as may, and are there."""
        busy = {assigned.task.client for assigned in self._assigned.values() if not assigned.resumed}
        idle = [client for client in clients if client not in busy]
        return self._random.sample(idle, min(self.free, len(idle)))

    def assign(self, client: ClientId) -> Task:
        """A task for this client, of the newest version."""
        return self.server.checkout(client, lease=self.timeout)

    def sent(self, key: str, task: Task, *, resumed: bool = False) -> None:
        """The task was sent, and the reply to it will have this key."""
        self._assigned[key] = Assignment(task, monotonic() + self.timeout, resumed)

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
            What became of the reply; None if its key has no open assignment, as for the second of two replies.

        Raises:
            AffluxError: the rule takes gradients, and client_lr or local_steps is missing before any reply has joined:
                the operator has not set them. Later a reply without them is faulty.
        """
        assigned = self._assigned.pop(key, None)
        if assigned is None:
            self.lost["unknown"] += 1
            return None
        try:
            model = arrays()
        except Exception as error:  # bytes that are no array, a record that lacks one
            model = _Unreadable(error)
        if self._any_joined and self.server.rule.kind == "gradient" and not _is_complete(training):
            model = _Unreadable(ValueError("the reply lacks client_lr or local_steps"))
            training = {}
        number = as_float(loss)
        known_loss = number if number is not None and isfinite(number) else None
        receipt = self.server.push(
            task=assigned.task, model=model, num_examples=num_examples, loss=known_loss, **training
        )
        if receipt.status in ("joined", "replaced"):
            self._any_joined = True
            if metrics is not None:
                self._metrics.append(metrics)
        return receipt

    def fail(self, key: str) -> None:
        """The client has failed, or will never reply."""
        if self._end(key):
            self.lost["failed"] += 1

    def expire(self) -> list[str]:
        """Ends the assignments that exceed the timeout; returns their keys."""
        now = monotonic()
        overdue = [key for key, assigned in self._assigned.items() if assigned.deadline <= now]
        for key in overdue:
            self._end(key)
            self.lost["overdue"] += 1
        return overdue

    def _end(self, key: str) -> bool:
        assigned = self._assigned.pop(key, None)
        if assigned is not None:
            assigned.task.cancel()
        return assigned is not None

    def end(self) -> None:
        """Ends all assignments."""
        for key in self.keys:
            self._end(key)

    def take_metrics(self) -> list[Any]:
        """The metrics of the replies that joined since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    # Resuming

    def checkpoint(self, notes: Mapping[str, Any]) -> None:
        """Commits the server with its open tasks and the adapter's notes, JSON-able; nothing without a store."""
        if self.stored:
            tasks = {key: assigned.task.id for key, assigned in self._assigned.items()}
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

    in_flight: dict[str, str] = {}  #: the id of the task of each open assignment, by the key of its reply
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


def _is_complete(training: Mapping[str, Any]) -> bool:
    return training.get("client_lr") is not None and training.get("local_steps") is not None


class VersionArrays:
    """The arrays of one version, by name and in the model's dtypes.

    Args:
        arrays: the initial model.
        layout: of the server.
    """

    def __init__(self, arrays: Arrays, layout: Layout | None) -> None:
        assert layout is not None  # the server was made with a tree
        self._layout = layout
        self._likes = {name: Like("numpy", np.asarray(array).dtype) for name, array in arrays.items()}

    def of(self, version: Pulled) -> dict[str, npt.NDArray[Any]]:
        """Read-only views of the version's params, as far as they have the model's dtypes, else copies."""
        views = self._layout.views(version.params, version.buffers)
        return {name: like.made_of(name, views[name]) for name, like in self._likes.items()}
