"""`Server.checkout`: the tasks of clients, and closing a task without a push."""

from typing import Literal, NoReturn

from afflux.aggregation.reports import Opened, Params, Pulled
from afflux.arrays.layout import Tree
from afflux.ops.errors import AffluxError, BlockedError
from afflux.ops.validation import brief, flag, optional, plain_id, positive
from afflux.rules.rule import ClientId
from afflux.server import versions
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter
from afflux.server.tasks import new_task
from afflux.server.tracebacks import clears_tracebacks


class Task:
    """The result of `Server.checkout`: a version from which a client trains, and an id for its push.

    >>> import numpy as np
    >>> from afflux import Server, rules
    >>> server = Server(rules.fedavg(buffer_size=1), {"w": np.ones(2, np.float32)})
    >>> task = server.checkout("ann")
    >>> model = task.tree()
    >>> model["w"] += 2  # training
    >>> server.push(task=task, model=model).status, server.params.tolist(), server.tasks
    ('joined', [3.0, 3.0], ())
    """

    __slots__ = ("_adapter", "_aggregator", "_task", "copied")

    def __init__(self, task: Opened, copied: Pulled | None, aggregator: Aggregator, adapter: InputAdapter) -> None:
        self._task = task
        self.copied = copied  #: a copy of the version, if the server overwrites its params
        self._aggregator = aggregator
        self._adapter = adapter

    @property
    def id(self) -> str:
        """An id for remote clients: `push(task=id)`. No other task of any server has the same id."""
        return self._task.task

    @property
    def client(self) -> ClientId:
        """The id of the task's client."""
        return self._task.client_id

    @property
    def version(self) -> int:
        """The version that the client trains from."""
        return self._task.version

    @property
    @clears_tracebacks
    def pulled(self) -> Pulled:
        """The version, as `pull` returns it: read-only, and not copied unless the server's vectors are in shards.

        Raises:
            AffluxError: the version is no longer held, because the task is closed or the version is too old.
        """
        pulled = self.copied or self._aggregator.admission.base_of(self._task.task)
        if pulled is None and not self._task.hold:
            newest = versions.newest(self._aggregator)  # a copy, if the server overwrites its params
            pulled = newest if newest.version == self.version else None
        if pulled is None:
            raise AffluxError(
                f"[Task] version {self.version} is no longer held for client {brief(self.client)}: the task is closed "
                "or of hold=False, or the version is too old (max_staleness, max_versions), or the store was opened at "
                "a commit that was no checkpoint(). cancel() an open task, and checkout() the client again"
            )
        return versions.shared(self._aggregator, pulled)

    @property
    @clears_tracebacks
    def params(self) -> Params:
        """The params of `pulled`, (d,)."""
        return self.pulled.params

    @clears_tracebacks
    def load(self, target: Tree) -> None:
        """Copy params, buffers and constants into a torch module or a tree of writable arrays; see `Layout.load`.

        Raises:
            AffluxError: as `pulled`, or as `Server.pull`; nothing is written.
        """
        with versions.VersionReading(self._aggregator):
            self._adapter.copy_out("Task.load", self.pulled, target)

    @clears_tracebacks
    def tree(self) -> Tree:
        """Return a writable copy, in the library, the dtypes and the nesting of the server's first params.

        The copy of a torch module is a dict by dotted name, for `load_state_dict` (with strict=False if some arrays of
        the module are not selected). JAX's arrays are not writable; a node that is registered with JAX has its own
        type. If the server was opened from a store, all arrays are NumPy's, in dicts and lists.

        Raises:
            AffluxError: as `pulled`, or a value is not finite in the dtype of its array.
        """
        with versions.VersionReading(self._aggregator):
            return self._adapter.copied_tree(self.pulled)

    @clears_tracebacks
    def cancel(self) -> bool:
        """Close the task, because its client will not push. Return whether the task was open."""
        self._aggregator.enter("Task.cancel")
        return close_task(self._aggregator, self._task.task, "cancelled")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @clears_tracebacks
    def __reduce__(self) -> NoReturn:
        raise AffluxError("[Task] a task is not pickled: send its id, and what load() or tree() gives")

    def __repr__(self) -> str:
        return f"Task({self.id!r}, client={brief(self.client)}, version={self.version})"


def open_task(aggregator: Aggregator, adapter: InputAdapter, client: object, lease: object, hold: bool) -> Task:
    """Open the task of `Server.checkout`."""
    client_id = plain_id(client, "checkout")
    seconds = optional(positive)("checkout", "lease", lease)
    inplace = aggregator.inplace
    if flag("checkout", "hold", hold) and inplace:
        raise AffluxError("[checkout] inplace=True overwrites params: no version can be held, give hold=False")

    def opened() -> tuple[Opened, Pulled | None]:
        admission = aggregator.admission
        if admission.blocks(client_id):
            why = "has entered in this pass: wait for the next one"
            if not admission.in_passes:
                rule = admission.rule
                why = f"was in as many rounds as {rule.name} allows: {rule.needs.participations}"
            raise BlockedError(f"[checkout] client {brief(client_id)} {why}")
        now = admission.current
        if inplace:
            now = versions.read_only_copy(aggregator.plane, now)
        task, deadline = new_task(client_id, now.version, seconds, hold=hold)
        admission.open_task(task, task.task, task.version, hold, deadline, now)
        return task, now if inplace else None  # a step of another thread may need the memory of the version

    # With inplace, a round in progress writes to the newest version.
    task, copied = aggregator.when_idle("checkout", opened) if inplace else aggregator.locked(opened)
    return Task(task, copied, aggregator, adapter)


def close_task(aggregator: Aggregator, task_id: str, why: Literal["expired", "cancelled"]) -> bool:
    """Close a task without a push, if it is open. Return whether it was open."""
    return aggregator.locked(lambda: aggregator.admission.close_task(task_id, why))


def close_overdue(aggregator: Aggregator) -> None:
    """Close the tasks whose lease has ended."""
    if aggregator.admission.has_overdue_task:
        while (task_id := aggregator.locked(aggregator.admission.next_overdue)) is not None:
            close_task(aggregator, task_id, "expired")
