"""The loop of a framework that sends messages: it keeps clients training until the server has made so many steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import Logger, getLogger
from time import monotonic, sleep
from typing import Any, Self

from afflux import Task
from afflux.integrations._clients import MOST_REASON
from afflux.integrations._core import NO_USE, Metrics, Trained, TrainingRun
from afflux.integrations._settings import is_due
from afflux.rules.rule import ClientId

#: Seconds between two looks for clients that have come or gone.
_CLIENTS_EVERY = 2.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a task."""

    key: str  #: what `Transport.send` returned
    read: Callable[[], Trained]  #: what it raises is the client's fault
    error: str | None = None  #: the client has failed, or will never reply; `read` is not called


class Transport(ABC):
    """How a framework reaches its clients. Methods raise for failures of the framework only; those end the run."""

    #: Of the adapter: a store goes on with the adapter that has made it.
    name = ""
    #: Of the framework, so that lines go where its users look.
    logger: Logger = getLogger("afflux")
    #: The type of `notes`, for msgspec.
    schema: Any = dict[str, Any]

    @abstractmethod
    def clients(self) -> Iterable[ClientId]:
        """The addresses of the clients that are there."""

    @abstractmethod
    def send(self, address: ClientId, task: Task) -> str | None:
        """Sends `task.pulled`; returns the key of the reply, or None if the client cannot be reached."""

    @abstractmethod
    def replies(self, keys: list[str]) -> Iterable[Reply]:
        """The replies to these that have come. Does not wait."""

    def wait(self, seconds: float) -> None:
        """Waits until a reply may have come, for so many seconds at most."""
        sleep(seconds)

    def step_done(self, step: int, metrics: list[Metrics]) -> object:
        """The server has made this step, of replies with these metrics. Called once for each step that is seen.

        Returns:
            What the log says of the metrics.
        """
        return ""

    def evaluate(self, step: int) -> None:  # noqa: B027
        """Evaluates the newest version, which is of this step. Called every `evaluate_every` steps and at the end."""

    def finish(self) -> None:  # noqa: B027
        """The last step is made and evaluated. Waits for what goes on beside training."""

    def notes(self) -> Mapping[str, Any]:
        """What a checkpoint stores of the adapter, JSON-able."""
        return {}

    def restore(self, notes: Any) -> None:  # noqa: B027
        """Takes over the notes of the last checkpoint, which are of the type `schema`."""


class Loop:
    """Keeps clients training. A context manager, which closes the store, whatever happens, after a last checkpoint if
    that can be made.

    Args:
        training: the server and its clients; closed if an error is raised here.
        transport: to them.

    Raises:
        AffluxError: the store is that of another program, or of clients none of which is there.
    """

    def __init__(self, training: TrainingRun, transport: Transport) -> None:
        self.training, self.transport = training, transport
        with training.closed_on_error():
            transport.restore(training.resume(transport.schema, adapter=transport.name))
            training.clients.are(transport.clients())
            training.clients.require_known()
            self._warn_too_few()
            training.checkpoint(transport.notes())  # the first steps are stored beside the notes that they need
        self._looked = monotonic()  # for clients
        self._first = training.server.version
        self._noted = self._first  # the newest step that was evaluated and logged
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
        """Goes on until the server has made this many steps; then no client has a task any more.

        Raises:
            RuntimeError: no client is of use.
        """
        server = self.training.server
        if server.version == 0:
            self.transport.evaluate(0)
        while server.version < last:
            self.send_out()
            self.take_replies(last)
        self.training.end()
        self.transport.finish()
        self._log_end(last)

    def _log_end(self, last: int) -> None:
        logger, server, first = self.transport.logger, self.training.server, self._first
        counts = {name: count for name, count in self.training.counts.items() if count}
        if server.version == first:
            logger.info("No step was needed: the store holds step %d of %d: %s", first, last, counts)
        elif not first:
            logger.info("Made %d steps: %s", server.version, counts)
        else:
            made = server.version - first
            logger.info("Made %d steps, after %d of earlier runs; of all runs: %s", made, first, counts)

    def _warn_too_few(self) -> None:
        server, there = self.training.server, self.training.clients.there
        if server.options.duplicates != "both" and there < server.rule.buffer_size:
            self.transport.logger.warning(
                "A buffer of %s takes each client once, and M = %d: no step before as many clients are there as that, "
                "and now there are %d",
                *(server.rule.name, server.rule.buffer_size, there),
            )

    def send_out(self) -> None:
        """Gives the newest version to idle clients, as far as more may train."""
        training, clients = self.training, self.training.clients
        if monotonic() - self._looked > _CLIENTS_EVERY:
            clients.are(self.transport.clients())
            clients.require_some_of_use()
            self._looked = monotonic()
        for address in training.choose():
            task = training.assign(address)
            try:
                key = self.transport.send(address, task)
            except BaseException:
                task.cancel()
                raise
            training.sent(key, task, address)
            if key is None:
                self._warn_failed(address, "nothing can be sent to it")

    def take_replies(self, last: int) -> None:
        """Takes in the replies that have come, and notes the steps that they make, up to this one."""
        came, server = False, self.training.server
        for reply in self.transport.replies(self.training.keys):
            came = True
            if server.version < last:
                self._take(reply)
                self._note_step(last)
        for key in self.training.expire():
            self.transport.logger.warning("No reply to %s within %g s", key, self.training.timeout)
            self.training.clients.require_some_of_use()
        if not came:
            self.training.poll()
        self._note_step(last)  # also of a step that `flush_after` has made beside these replies
        if not came:
            self.transport.wait(self.training.settings.poll_interval)

    def _take(self, reply: Reply) -> None:
        address = self.training.address_of(reply.key)
        if reply.error is not None:
            self.training.fail(reply.key, reply.error)
            self._warn_failed(address, reply.error)
            return
        receipt = self.training.receive(reply.key, reply.read)
        if receipt is not None and receipt.status in NO_USE:
            self._warn_failed(address, f"its reply is {receipt.status}. {receipt.reason}")

    def _warn_failed(self, address: ClientId | None, why: str) -> None:
        if address is not None:
            self.transport.logger.warning("Client %s: %s", address, why[:MOST_REASON])
            self.training.clients.require_some_of_use()

    def _note_step(self, last: int) -> None:
        """Logs, evaluates and stores the newest version, once, however its step came about."""
        step, before, settings = self.training.server.version, self._noted, self.training.settings
        if step == before:
            return
        self._noted = step
        said, report = self.transport.step_done(step, self.training.take_metrics()), self.training.report
        if report is None or report.version != step:  # `flush_after` made the step beside a call
            self.transport.logger.info("[STEP %d] %s", step, said)
        else:
            mean, largest = report.staleness.mean(), report.staleness.max()
            self.transport.logger.info("[STEP %d] %s staleness: mean %.1f, largest %d", step, said, mean, largest)
        if is_due(settings.evaluate_every, before, step) or step >= last:
            self.transport.evaluate(step)
        if is_due(settings.checkpoint_every, before, step):
            self.training.checkpoint(self.transport.notes())
