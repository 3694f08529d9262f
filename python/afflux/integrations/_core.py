"""The common part of the adapters: the server, the assignments of clients, their replies, and resuming after a crash.

An adapter translates messages. To let a client train, it calls `assign`, sends the task's params, and calls `sent` with
the key of the expected reply. It passes each reply to `receive` and each error to `fail`; `expire` ends the assignments
that exceed the timeout. These calls raise no error because of the content of a client's message. `receive` raises
errors of the server itself: a lack of memory, or an error of the store.

Adapters with a loop use _loop.py. An adapter whose framework calls it uses `TrainingRun` directly.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from afflux import Pulled, Task
from afflux.aggregation.reports import Receipt, Report
from afflux.arrays.interop import on_host
from afflux.integrations._clients import ClientKey, Clients
from afflux.integrations._reading import Unreadable, finite_number, fraction_of, own_dict
from afflux.integrations._server import are_zero, open_server, weighs_by_examples
from afflux.integrations._settings import RunSettings
from afflux.integrations._versions import VersionArrays, require_names
from afflux.ops.errors import AffluxError
from afflux.ops.validation import MOST_COUNT, as_int, brief, zero_dim
from afflux.rules.rule import EXAMPLES, ClientId, Rule

NamedArrays = Mapping[str, Any]
#: Identifies the reply to an assignment: the id of a message or a task; a client's id, if messages have none.
Key = int | str
#: JSON-able metrics of one reply, by name.
Metrics = Mapping[str, Any]
#: The statuses of replies that are part of a step, and of replies that are not.
JOINED = ("joined", "replaced")
NO_USE = ("faulty", "expired", "empty")


class Trained(msgspec.Struct, frozen=True):
    """The content of a reply, which may be invalid."""

    arrays: NamedArrays  #: the arrays of the model, by name
    num_examples: Any = None  #: a whole number, or another weight with a fraction; None: unknown
    loss: Any = None  #: anything but a finite number counts as unknown
    client_lr: Any = None  #: None: the learning rate of the settings
    local_steps: Any = None  #: None: the number of the settings
    metrics: Metrics | None = None  #: kept until the next step, if the reply joins
    client: Any = None  #: the client's id, if replies contain it (then client_key is a str)
    facts: Mapping[str, Any] | None = None  #: numbers; the finite ones that the server lists are pushed
    delta: bool = False  #: whether `arrays` is the difference from the model that was sent, including the buffers


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of a client that trains."""

    task: Task
    address: ClientId
    start: float  #: its start, by `TrainingRun.now`
    pulled: Pulled | None = None  #: an older version than the task's, from which the client trains instead

    @property
    def base(self) -> Pulled | None:
        """The version that the client trains from; None if it is no longer held."""
        try:
            return self.pulled or self.task.pulled
        except AffluxError:
            return None


class TrainingRun:
    """A server, the clients that train for it, and the replies since its last step.

    Args:
        rule: the rule of the server.
        arrays: the initial model: arrays by name, or a torch module; see `open_server`.
        settings: the settings of the run.
        num_clients: number of clients at the start; the default of the concurrency and of the server's num_clients.
        key: the source of the clients' ids, if they are not the addresses.

    Attributes:
        server: the server to which replies are pushed.
        lost: counts of replies without an assignment ("unknown"), of clients that failed ("failed"), and of clients
            that exceeded the timeout ("overdue").
        slowest: the longest duration of a reply, in seconds.
        clock: returns the seconds of the run's clock; an adapter may replace it by a virtual time. `now` measures the
            time of clients.
        expires_at_looks: whether the adapter looks for replies and then calls `expire`, again and again: a reply that a
            look finds came after the look before, when its task was not overdue, so it is not late.
        assignments: the open assignments, by the key of the reply.
        fact_names: the names of the facts that pushes may have.
        report: the report of the last step of this run.

    Raises:
        AffluxError, StoreError: the rule does not fit the model or the options; the store belongs to another server, or
            is damaged; `arrays` are not arrays by name. No store stays open then.
    """

    clock: Callable[[], float] = staticmethod(monotonic)

    def __init__(
        self, rule: Rule, arrays: Any, settings: RunSettings, *, num_clients: int, key: ClientKey | None = None
    ) -> None:
        self.settings = settings
        self.concurrency, self.timeout = settings.concurrency or max(1, num_clients), settings.timeout or 3600.0
        self._needs_examples, self._takes_gradients = weighs_by_examples(rule), rule.kind == "gradient"
        require_names(arrays)
        self.server = open_server(rule, arrays, settings, max(1, num_clients), self.concurrency)
        with self.closed_on_error():
            self.versions = VersionArrays(arrays, self.server)  # a store may have another order
            self.clients = Clients(self.server, settings, key)
        fact_names = self.server.options.fact_names(rule)
        self.fact_names = tuple(name for name in fact_names if name != EXAMPLES)
        self._takes_fractions = EXAMPLES in fact_names
        self.lost: dict[str, int] = {"unknown": 0, "failed": 0, "overdue": 0}
        self.slowest = 0.0
        self.assignments: dict[Any, Assignment] = {}
        self.expires_at_looks = False
        self._own_time = 0.0  # seconds of `untimed` blocks that have ended
        self._stopped: float | None = None  # the clock's time at the start of the present block; None: there is none
        self._metrics: dict[int, tuple[ClientId, Metrics]] = {}  # by the number of the join
        self._adapter = ""
        self.report: Report | None = None
        self._has_warned = False  # of updates that are 0

    @property
    def counts(self) -> dict[str, int]:
        """The number of replies by outcome: `Server.counts`, and `lost`."""
        return {**self.server.counts, **self.lost}

    # Time

    def now(self) -> float:
        """Return the seconds of the run's clock without those in steps, in commits and in the user's functions."""
        return (self.clock() if self._stopped is None else self._stopped) - self._own_time

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Stop `now`, the time that clients have for their replies, in the block."""
        if self._stopped is not None:  # in another block
            yield
            return
        start = self._stopped = self.clock()
        try:
            yield
        finally:
            self._own_time += self.clock() - start
            self._stopped = None

    # Clients that train

    @property
    def busy(self) -> set[ClientId]:
        """The addresses of the clients that train."""
        return {assigned.address for assigned in self.assignments.values()}

    def choose(self) -> list[ClientId]:
        """Return addresses for new tasks: as many connected, idle clients as may train, without those that rest.

        If no client trains, and those that are there have entered in the pass, or have failed, the pass ends.
        """
        free = self.concurrency - len(self.assignments)
        if free < min(self.settings.dispatch_size, self.concurrency) or self.spent:
            return []
        with self.untimed():  # the user may choose
            entered = self.server.entered
            ends = self.server.rule.needs.passes and entered and not self.assignments
            if ends and self.clients.have_all_entered(entered):
                if (report := self.server.end_pass()) is not None:
                    self._note(report)
                entered = self.server.entered
            return self.clients.choose(free, self.busy, self.clock(), entered)

    @property
    def spent(self) -> str:
        """The reason why the clients that are there can make no further round; empty if they can.

        They cannot if too few of them were in fewer rounds than the rule allows. Then none gets a task.
        """
        server, there = self.server, self.clients.there
        if server.rule.needs.participations is None or not there:
            return ""
        free = {*map(self.clients.id_of, there), *server.waiting.values()} - server.entered
        least = server.rule.buffer_size if server.options.flush_after is None else 1
        if len(free) >= least:
            return ""
        return (
            f"a round needs {least} clients that were in fewer rounds than {server.rule.name} allows "
            f"({server.rule.needs.participations}), and there are {len(free)}"
        )

    def assign(self, address: ClientId) -> Task:
        """Open a task of the newest version for the client at this address."""
        return self.server.checkout(self.clients.id_of(address))

    def sent(self, key: Key | None, task: Task, address: ClientId | None = None, pulled: Pulled | None = None) -> None:
        """Record that a task was sent.

        Args:
            key: the key of the reply; None: the task could not be sent.
            task: the task.
            address: the destination; None: the client's id.
            pulled: the version that the client trains from instead of the task's, if it got that version before its
                id was known.
        """
        where = task.client if address is None else address
        if key is None:
            task.cancel()
            self.drop(where, "nothing can be sent to it")
        else:
            self.assignments[key] = Assignment(task, where, self.now(), pulled=pulled)

    def drop(self, address: ClientId, reason: str) -> None:
        """Record that a client without an assignment has failed."""
        self.lost["failed"] += 1
        now = self.clock()
        self.clients.failed(address, reason, now, now)

    # Replies

    def receive(self, key: Key, read: Callable[[], Trained]) -> Receipt | None:
        """Push a client's model.

        Args:
            key: the key of the reply.
            read: reads the reply; an exception that it raises counts as a failure of the client.

        Returns:
            The receipt; None if the key has no open assignment, as for the second of two replies.
        """
        assigned = self.assignments.pop(key, None) if isinstance(key, Key) else None
        if assigned is None:
            self.lost["unknown"] += 1
            return None
        task, trained = assigned.task, None
        if late := self.note_duration(assigned.start) >= self.timeout and not self.expires_at_looks:
            task.cancel()  # the reply becomes "expired"
        base = assigned.base if self.report is None else None
        try:
            trained = read()
            arguments = self._arguments(assigned, trained, late=late)
        except Exception as error:  # bytes that are no array, a record without one, MemoryError for a forged header
            # Without its traceback, which would hold the base, and this frame, in a circle of references.
            arguments, trained = {"task": task, "model": Unreadable(error.with_traceback(None))}, None
        with self.untimed():  # it may take a step, and commit it
            receipt = self.server.push(**arguments)
        if receipt.report is not None:
            self._note(receipt.report, base)
        if "task" not in arguments:
            task.cancel()
        client, joined = arguments.get("client", task.client), receipt.status in JOINED
        if receipt.status not in NO_USE:
            self.clients.succeeded(assigned.address, client, joined=joined)
        elif receipt.status != "expired" or trained is None:  # else the client is only slow
            self._failed(assigned, f"its reply is {receipt.status}. {receipt.reason}".strip())
        if receipt.status == "replaced":
            self._metrics = {join: own for join, own in self._metrics.items() if own[0] != client}
        if joined and receipt.join is not None and trained is not None and trained.metrics is not None:
            self._metrics[receipt.join] = client, trained.metrics
        return receipt

    def _arguments(self, assigned: Assignment, trained: Trained, *, late: bool) -> dict[str, Any]:
        """Return the arguments of the push of a reply; raise an error if the reply is invalid.

        `late`: its task is closed.
        """
        task, delta, count = assigned.task, trained.delta, trained.num_examples
        client = self.clients.identify(assigned.address, trained.client)
        arguments: dict[str, Any] = {"loss": finite_number(trained.loss)}
        if count is not None:
            arguments["num_examples"] = count
        elif self._needs_examples:
            raise ValueError("the reply lacks its number of examples, which sets its weight")
        number = 0.0 if count is None else finite_number(zero_dim(count))
        if type(count) is not int and (number is None or number < 0):
            raise ValueError(f"its number of examples is {brief(count)}, must be a finite number of at least 0")
        if type(count) is not int and (weight := fraction_of(count)) is not None:
            if self._needs_examples and not self._takes_fractions:
                raise ValueError(f"its number of examples is {weight:g}, and the store's server counts whole numbers")
            arguments |= {"num_examples": 1, "facts": {EXAMPLES: weight} if self._takes_fractions else None}
        if self._takes_gradients or trained.local_steps is not None:
            arguments |= self._rate_of(trained)
        if self.fact_names:
            values = {name: finite_number((trained.facts or {}).get(name)) for name in self.fact_names}
            numbers = {name: value for name, value in values.items() if value is not None}
            arguments["facts"] = numbers | (arguments.get("facts") or {})
        # Else its task was opened before it was known.
        is_own = late or (assigned.pulled is None and client == task.client)
        base = None if is_own and not delta else assigned.base
        if is_own or (delta and base is None):
            arguments["task"] = task
        else:
            arguments |= {"client": client, "version": base or task.version}
        arguments["update" if delta else "model"] = arrays = own_dict(trained.arrays)
        if delta and base is None:
            task.cancel()  # the reply becomes "expired"
        elif delta and base is not None:
            arguments["buffers"] = self._buffers_of(base, arrays)
        self.versions.check(arrays, arguments.get("buffers"))
        return arguments

    def _rate_of(self, trained: Trained) -> dict[str, Any]:
        """Return the arguments that convert an update to a gradient, for rules that take gradients.

        For others, only the number of steps that the client has reported.
        """
        if not self._takes_gradients:
            reported = as_int(trained.local_steps)
            return {} if reported is None or not 0 < reported < MOST_COUNT else {"local_steps": reported}
        rate = self.settings.client_lr if trained.client_lr is None else trained.client_lr
        steps = self.settings.local_steps if trained.local_steps is None else trained.local_steps
        if rate is None or steps is None:
            raise ValueError("the reply lacks client_lr or local_steps, and the settings do not say them")
        return {"client_lr": rate, "local_steps": steps}

    def _buffers_of(self, base: Pulled, delta: NamedArrays) -> npt.NDArray[np.float64] | None:
        """Return the client's values of the model's buffers, from its differences."""
        layout = self.versions.layout
        for field in layout.constants:
            values = np.asarray(on_host(delta.get(field.name, 0)))
            if not ((values == 0) | (values != values)).all():  # infinity minus infinity is NaN
                raise ValueError(f"{field.name} is a constant, and the reply changes it")
        if base.buffers is None:
            return None
        differences = layout.arrays(delta)
        sums = {
            field.name: (values + np.asarray(on_host(differences[field.name]))).astype(values.dtype)
            for field, values in layout._pieces_of(np.zeros(layout.size), base.buffers)
            if field.role != "trained"
        }
        return layout.flatten_buffers(sums)

    def fail(self, key: Key, reason: str = "error") -> None:
        """Record that the client has failed, or will never reply."""
        assigned = self.cancel(key)
        if assigned is not None:
            self.lost["failed"] += 1
            self.note_duration(assigned.start)
            self._failed(assigned, reason)

    def note_duration(self, start: float) -> float:
        """Record the duration of a reply to a task that was sent at this time of `now`, and return it."""
        self.slowest = max(self.slowest, duration := self.now() - start)
        return duration

    def poll(self) -> None:
        """Make the step that `flush_after` requires, if one is due."""
        with self.untimed():
            report = self.server.poll()
        if report is not None:
            self._note(report)

    def _note(self, report: Report, base: Pulled | None = None) -> None:
        """Store the report of a step; warn once if all its updates are 0."""
        self.report = report
        if not self._has_warned and are_zero(self.server, report, base):
            self._has_warned = True
            text = "All updates of step %d are exactly 0: its clients replied with the models that they got"
            self.clients.warn(text, report.version)

    def expire(self, now: float | None = None) -> bool:
        """End the assignments that exceed the timeout; return whether there are any.

        Args:
            now: the time of `now` from which on replies were looked for; None: now.
        """
        now = self.now() if now is None else now
        overdue = {key: each for key, each in self.assignments.items() if now - each.start >= self.timeout}
        for key, assigned in overdue.items():
            self.cancel(key)
            self.lost["overdue"] += 1
            self._failed(assigned, f"no reply within {self.timeout:g} s")
        return bool(overdue)

    def _failed(self, assigned: Assignment, reason: str) -> None:
        clock = self.clock()
        self.clients.failed(assigned.address, reason, clock - (self.now() - assigned.start), clock)

    def cancel(self, key: Key) -> Assignment | None:
        """End an assignment, if it is open; return it."""
        assigned = self.assignments.pop(key, None)
        if assigned is not None:
            assigned.task.cancel()
        return assigned

    def end(self) -> None:
        """End all assignments."""
        for key in [*self.assignments]:
            self.cancel(key)

    def take_metrics(self) -> list[Metrics]:
        """Return the metrics of the replies that joined since the last call, without those of a later step."""
        waiting = self.server.waiting
        taken = [own for join, (_, own) in self._metrics.items() if join not in waiting]
        self._metrics = {join: own for join, own in self._metrics.items() if join in waiting}
        return taken

    # Checkpoints

    def checkpoint(self, notes: Mapping[str, Any]) -> None:
        """Commit the server and the adapter's notes, JSON-able; without a store, do nothing."""
        if self.settings.store is not None:
            metrics = {str(join): dict(own) for join, (_, own) in self._metrics.items()}
            shared = {"adapter": self._adapter, "client_key": self.clients.source, "lost": self.lost}
            self.server.checkpoint({**shared, "metrics": metrics, "own": notes})

    def close(self, notes: Mapping[str, Any] | None = None) -> None:
        """Close the store, after a last checkpoint with these notes; with None it stays at its last commit."""
        if self.settings.store is not None:
            try:
                if notes is not None:
                    self.checkpoint(notes)
            finally:
                self.server.close(checkpoint=False)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the store if the block raises an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def resume(self, schema: Any, *, adapter: str = "") -> Any:
        """Continue from the last checkpoint. Its open tasks are cancelled, because no framework delivers their replies.

        Args:
            schema: the type of the adapter's notes, a dict.
            adapter: its name; a store of an adapter of another name is refused.

        Returns:
            The notes of the last checkpoint; an empty dict if there are none.

        Raises:
            AffluxError: the notes of the store belong to another program, or its clients had ids from another source.
                The store is then closed.
        """
        with self.closed_on_error():
            notes = self.server.notes if self.settings.store is not None else None
            try:
                found = msgspec.convert({} if notes is None else notes, _Notes, str_keys=True)
                own = msgspec.convert(found.own, schema, str_keys=True)
            except msgspec.ValidationError as error:
                raise AffluxError(f"[resume] the store's notes are not those of this adapter: {error}") from None
            if adapter and found.adapter not in ("", adapter):
                before = brief(found.adapter)
                raise AffluxError(f"[resume] the store is of a run of {before}, and this one is of {adapter}")
            self.clients.require_source(found.client_key)
            self._adapter = adapter
            for task in self.server.tasks:
                task.cancel()
            self.lost.update({name: count for name, count in found.lost.items()})
            waiting = self.server.waiting
            self._metrics = {join: (waiting[join], said) for join, said in found.metrics.items() if join in waiting}
            return own


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    """The data that a checkpoint stores in addition to the server."""

    lost: dict[Literal["unknown", "failed", "overdue"], int] = {}
    metrics: dict[int, dict[str, Any]] = {}  #: metrics of waiting arrivals, by join
    adapter: str = ""  #: its name; empty: unknown
    client_key: str | None = None  #: description of the source of the clients' ids; None: unknown
    own: dict[str, Any] = {}  #: the adapter's own notes
