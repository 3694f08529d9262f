"""Answers the requests of handles in the process that has the server: a thread takes them, and one for each answers.

A client whose next request does not come in time is an error of its push: the slot is free again. No error of a client
ends a thread that other clients need.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize, ref

from afflux.aggregation.reports import Opened, Pulled
from afflux.aggregation.sharded_plane import Shards
from afflux.distributed.connection import connected_ray, kill
from afflux.distributed.handle import RemoteTask, SliceCalls, VersionParts, error_text, packed, unpacked
from afflux.distributed.shard import Call, Failure
from afflux.ops.errors import AffluxError, PlaneError
from afflux.ops.validation import brief
from afflux.server.server import Server
from afflux.server.versions import VersionReading

#: What is wrong if a request cannot be unpickled.
UNREADABLE = "the server's process cannot read the request"


class Exchange:
    """The requests of one push or pull of a client."""

    def __init__(self, service: "Service", number: int, request: bytes) -> None:
        self._service, self._number, self._request = service, number, request
        self._timeout = 0.0  #: seconds for which the next request is awaited
        self._inbox = SimpleQueue[tuple[int, bytes]]()

    def run(self, server: Server) -> None:
        """Answer the first request, and those that follow it."""
        try:
            request = unpacked(self._request, UNREADABLE)
            self._timeout = request.timeout
            answer: Callable[..., Any] = getattr(self, f"_{request.name}")
            reply = packed(answer(server, **request.arguments))
        except BaseException as error:
            reply = packed(Failure(_sendable(error)))
        self._reply(reply)

    def _reply(self, reply: bytes) -> None:
        if self._number >= 0:
            self._service.reply(self._number, reply)

    def next(self, message: Callable[[int], Any]) -> Any:
        """Reply with a message that has the token of this exchange.

        Return the results in the client's next request; a Failure if that did not come in time.
        """
        token, waiting, seconds = next(self._service.tokens), self._service.waiting, self._timeout
        reply = packed(message(token))
        waiting[token] = self._inbox
        self._reply(reply)
        self._number = -1
        try:
            self._number, continuation = self._inbox.get(timeout=seconds)
        except Empty:
            if waiting.pop(token, None) is not None:
                return Failure(AffluxError(f"the client has not sent all slices within {seconds:g} seconds (timeout)"))
            self._number, continuation = self._inbox.get()  # it comes now
        return unpacked(continuation, UNREADABLE).results

    def _checkout(self, server: Server, **arguments: Any) -> RemoteTask:
        task = server.checkout(**arguments)
        return RemoteTask(task.id, task.client, task.version)

    def _push(self, server: Server, kinds: list[str], **arguments: Any) -> Any:
        vectors = {kind: RemoteSlices(server._adapter.size, self) for kind in kinds}
        return server.push(**{**arguments, **vectors})

    def _pull(self, server: Server, task: str | None) -> None:
        aggregator = server._aggregator
        aggregator.enter("pull")
        with VersionReading(aggregator):
            self._show(server, task)  # a round that waits for the end of this block finds the version released

    def _show(self, server: Server, task: str | None) -> None:
        """Let the client read a version."""
        version = server._aggregator.locked(lambda: _version(server, task))
        self._service.wait_for_shards()  # they have made the version before the client's message comes
        self.next(lambda token: VersionParts(token, version.version, version.buffers, version.params.parts))


class RemoteSlices:
    """The vector of a push, in the process of a client."""

    def __init__(self, size: int, exchange: Exchange) -> None:
        self.shape = (size,)
        self._exchange = exchange

    def write(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Let the client make these calls, each with its slice as the first argument; return the results.

        Raises:
            AffluxError: the client did not make them in time, or one has failed.
        """
        results = self._exchange.next(lambda token: SliceCalls(token, {**calls}))
        if isinstance(results, Failure):
            raise results.error
        written: dict[int, Any] = results
        return written


class Service:
    """The mailbox of a server, and the thread that takes requests from it, until the server is deleted."""

    def __init__(self, server: Server, mailbox: Any, wait_for_shards: Callable[[], None]) -> None:
        self.mailbox, self.wait_for_shards = mailbox, wait_for_shards
        self.tokens = count()
        self.waiting: dict[int, SimpleQueue[tuple[int, bytes]]] = {}  #: for the next request, by token
        self._server = ref(server)
        finalize(server, kill, mailbox).atexit = False
        Thread(target=self._run, name="afflux-handles", daemon=True).start()

    def reply(self, number: int, reply: bytes) -> None:
        """Reply to a request."""
        with suppress(PlaneError):  # the client has an error of Ray
            connected_ray()
            self.mailbox.reply.remote(number, reply)

    def _run(self) -> None:
        while True:
            try:
                number, token, request = connected_ray().get(self.mailbox.next.remote())
            except Exception:  # the server was deleted, or the cluster has ended; a request, as bytes, is no cause
                kill(self.mailbox)  # no client waits for a thread that has ended
                return
            if token is None:
                self._begin(number, request)
            elif (inbox := self.waiting.pop(token, None)) is not None:
                inbox.put((number, request))
            else:
                late = "[handle] the slices came too late: their slot was given up (timeout)"
                self.reply(number, packed(Failure(AffluxError(late))))

    def _begin(self, number: int, request: bytes) -> None:
        """Answer a first request in a thread of its own."""
        server = self._server()
        if server is None:
            return  # the mailbox ends
        exchange = Exchange(self, number, request)
        try:
            Thread(target=exchange.run, args=(server,), name="afflux-handle", daemon=True).start()
        except Exception as error:  # the process has too many threads
            problem = f"[handle] the server's process cannot answer the request: {error_text(error)}"
            self.reply(number, packed(Failure(AffluxError(problem))))


def _sendable(error: BaseException) -> Exception:
    """Return an error that clients can read."""
    if isinstance(error, Exception) and type(error).__module__.partition(".")[0] in ("afflux", "builtins"):
        error.__context__ = error.__cause__ = None  # frames of them would keep the server
        with suppress(Exception):
            unpacked(packed(error), "an error")
            return error.with_traceback(None)
    return AffluxError(f"[handle] {error_text(error)}")


def _version(server: Server, task_id: str | None) -> Pulled:
    """Return the newest version, or that of a task, with the handles of its parts."""
    aggregator = server._aggregator
    newest = aggregator.admission.current
    if task_id is None:
        return newest
    admission = aggregator.admission
    task: Opened | None = admission.opened(task_id)
    version: Pulled | None = admission.base_of(task_id)
    if version is None and task is not None and not task.hold and task.version == newest.version:
        version = newest
    if version is None or not isinstance(version.params, Shards):
        raise AffluxError(
            f"[pull] the version of task {brief(task_id)} is no longer held: the task is closed or of hold=False, or "
            "the version is too old (max_staleness, max_versions)"
        )
    return version
