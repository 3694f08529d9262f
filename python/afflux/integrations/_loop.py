"""The loop for frameworks that send messages: clients train until the server has made a number of steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from logging import Logger, getLogger
from time import sleep
from typing import Any, Self

from afflux import Task
from afflux.aggregation.reports import Pulled
from afflux.integrations._core import Metrics, Trained, TrainingRun
from afflux.integrations._settings import is_due
from afflux.rules.rule import ClientId

#: Seconds between two checks for clients that have connected or left.
_CLIENTS_EVERY = 2.0
#: Seconds between two warnings that no client is connected.
_GONE_EVERY = 60.0


#: A reply to a task: a function that reads it, whose exception counts as a failure of the client; or the reason why the
#: client has failed, or will never reply.
Reply = Callable[[], Trained] | str


class Transport(ABC):
    """The messages between a framework and its clients. Methods raise only for failures that end the run."""

    #: Name of the adapter: only the adapter that made a store can resume it.
    name = ""
    #: The framework's logger, so that its users find the lines.
    logger: Logger = getLogger("afflux")
    #: The type of `notes`, for msgspec.
    schema: Any = dict[str, Any]

    @abstractmethod
    def clients(self) -> Iterable[ClientId]:
        """Return the addresses of the connected clients."""

    @abstractmethod
    def send(self, address: ClientId, task: Task) -> str | None:
        """Send `task.pulled`; return the key of the reply, or None if the client cannot be reached."""

    @abstractmethod
    def replies(self, keys: list[str]) -> list[tuple[str, Reply]]:
        """Return the replies with these keys that have arrived, each with its key, without waiting."""

    def wait(self, seconds: float) -> None:
        """Wait until a reply may have arrived, for at most `seconds`."""
        sleep(seconds)

    def step_done(self, step: int, metrics: list[Metrics]) -> object:
        """Handle a step that the server has made; `metrics` are those of its replies.

        Called once for each step that the loop finds.

        Returns:
            The text about the metrics for the log.
        """
        return ""

    def evaluate(self, newest: Pulled) -> None:  # noqa: B027
        """Evaluate a version. Called with the newest one every `evaluate_every` steps and at the end."""

    def finish(self) -> None:  # noqa: B027
        """Wait for work beside training. Called after the last step was made and evaluated."""

    def notes(self) -> Mapping[str, Any]:
        """Return the adapter's data for a checkpoint, JSON-able."""
        return {}

    def restore(self, notes: Any) -> None:  # noqa: B027
        """Restore the notes of the last checkpoint, which have the type `schema`."""


class Loop:
    """The loop that sends tasks to clients and pushes their replies.

    A context manager: it always closes the store at the end, after a last checkpoint if possible.

    Args:
        training: the server and its clients; closed if an error is raised here.
        transport: sends and receives messages.

    Raises:
        AffluxError: the store belongs to another program, or none of its clients is connected.
    """

    def __init__(self, training: TrainingRun, transport: Transport) -> None:
        self.training, self.transport = training, transport
        training.clients.warn, training.expires_at_looks = transport.logger.warning, True
        with training.closed_on_error():
            transport.restore(training.resume(transport.schema, adapter=transport.name))
            training.clients.are(transport.clients())
            training.clients.require_known()
            self._warn_too_few()
            training.checkpoint(transport.notes())  # so that the first steps are stored together with their notes
        self._looked = training.clock()  # time of the last check for clients
        self._gone: float | None = None  # time of the last warning that no client is connected; None: some are
        self._first = training.server.version
        self._noted = self._first  # the newest step that was evaluated and logged
        self._evaluated = -1  # the version that was evaluated last
        self._last: Pulled | None = None  # the version of the last step, once it was evaluated
        if training.settings.store is not None and training.server.joins:
            transport.logger.info("Going on from step %d of store %s", self._first, training.settings.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        notes = None
        try:
            notes = self.transport.notes()
        finally:
            self.training.close(notes)

    def run(self, last: int) -> None:
        """Run until the server has made `last` steps, or can make no further one; then end all tasks.

        Raises:
            RuntimeError: all clients fail.
        """
        server = self.training.server
        if server.version == 0:
            self.transport.evaluate(server.pull())
            self._evaluated = 0
        while server.version < last:
            self.send_out()
            if not self.training.assignments and (why := self.training.spent):
                self._end_early(last, why)
                break
            self.take_replies(last)
        self.training.end()
        self.transport.finish()
        self._log_end(last)

    def _end_early(self, last: int, why: str) -> None:
        """Evaluate the newest version, unless it was evaluated."""
        newest = self._last = self.training.server.pull()
        self.transport.logger.warning("The run ends after step %d of %d: %s", newest.version, last, why)
        if self._evaluated != newest.version:
            self.transport.evaluate(newest)

    @property
    def result(self) -> Pulled:
        """The version that was evaluated last; the newest one if no step was needed."""
        return self.training.server.pull() if self._last is None else self._last

    def _log_end(self, last: int) -> None:
        log, step, first = self.transport.logger.info, self.training.server.version, self._first
        counts = {name: count for name, count in self.training.counts.items() if count}
        if step == first:
            log("No step was needed: the store holds step %d of %d: %s", first, last, counts)
        else:
            earlier = f", after {first} of earlier runs; of all runs" if first else ""
            log("Made %d steps%s: %s", step - first, earlier, counts)

    def _warn_too_few(self) -> None:
        server, there = self.training.server, len(self.training.clients.there)
        if server.options.duplicates != "both" and there < server.rule.buffer_size:
            self.transport.logger.warning(
                "A buffer of %s takes each client once, and M = %d: no step before as many clients are there as that, "
                "and now there are %d",
                *(server.rule.name, server.rule.buffer_size, there),
            )

    def send_out(self) -> None:
        """Send the newest version to idle clients, as many as may train."""
        training, clients = self.training, self.training.clients
        now = training.clock()
        if now - self._looked > _CLIENTS_EVERY:
            addresses, self._looked = list(self.transport.clients()), now
            with training.untimed():
                clients.are(addresses)
            clients.require_some_of_use(now)
            self._note_gone(len(addresses))
        for address in training.choose():
            task = training.assign(address)
            try:
                key = self.transport.send(address, task)
            except BaseException:
                task.cancel()
                raise
            training.sent(key, task, address)

    def _note_gone(self, there: int) -> None:
        """Log that no client is connected, at once and then each minute, and that some are again."""
        if there:
            if self._gone is not None:
                self.transport.logger.info("%d clients are connected again", there)
            self._gone = None
        elif self._gone is None or self._looked - self._gone >= _GONE_EVERY:
            self.transport.logger.warning("No client is connected: the run waits")
            self._gone = self._looked

    def take_replies(self, last: int) -> None:
        """Receive the replies that have arrived, and handle the steps that they make, up to `last`."""
        training = self.training
        now = training.now()
        replies = self.transport.replies([*training.assignments])
        for key, reply in replies:
            if training.server.version < last:
                if isinstance(reply, str):
                    training.fail(key, reply)
                else:
                    training.receive(key, reply)
                training.clients.require_some_of_use()
                self._note_step(last)
        if training.expire(now) or not replies:  # messages that could not be sent are failures, too
            training.clients.require_some_of_use()
        if training.server.version < last:
            training.poll()
        self._note_step(last)
        if not replies:
            self.transport.wait(training.settings.poll_interval)

    def _note_step(self, last: int) -> None:
        """Log, evaluate and store the newest version, once, independent of what caused its step."""
        if self.training.server.version != self._noted:
            with self.training.untimed():
                self._note_newest(last)

    def _note_newest(self, last: int) -> None:
        before, settings = self._noted, self.training.settings
        newest = self.training.server.pull()
        step = self._noted = newest.version
        text, report = str(self.transport.step_done(step, self.training.take_metrics())), self.training.report
        if report is not None and report.version == step:
            text += f" staleness: mean {report.staleness.mean():.1f}, largest {report.staleness.max()}"
        self.transport.logger.info("[STEP %d] %s", step, text)
        if is_due(settings.evaluate_every, before, step) or step >= last:
            self.transport.evaluate(newest)
            self._evaluated = step
        if is_due(settings.checkpoint_every, before, step):
            self.training.checkpoint(self.transport.notes())
        if step >= last:
            self._last = newest
