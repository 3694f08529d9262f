"""Answers the requests of handles in the process that has the server: a thread takes them, and one for each answers.

A client whose next request does not come in time is an error of its push: the slot is free again. No error of a client
ends a thread that other clients need.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from typing import Any
from weakref import finalize, ref

from afflux.aggregation.reports import Opened, Pulled
from afflux.aggregation.sharded_plane import Shards
from afflux.distributed.connection import connected_ray, kill
from afflux.distributed.messages import (
    Checkout,
    Done,
    Failed,
    Message,
    Pull,
    Push,
    PushResult,
    RemoteTask,
    SliceWrites,
    VersionParts,
    Written,
    decode,
    encode,
    error_text,
)
from afflux.distributed.shard import Call
from afflux.ops.errors import AffluxError, PlaneError
from afflux.ops.validation import brief
from afflux.server.server import Server
from afflux.server.versions import VersionReading

#: What is wrong if a request cannot be read.
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
            request = decode(self._request, UNREADABLE, Checkout, Push, Pull)
            reply = encode(self._answer(server, request))
        except BaseException as error:
            reply = encode(Failed.of(error))
            error.__context__ = error.__cause__ = error.__traceback__ = None  # frames of them would keep the server
        self._reply(reply)

    def _reply(self, reply: bytes) -> None:
        if self._number >= 0:
            self._service.reply(self._number, reply)

    def next(self, message: Callable[[int], Message], *kinds: type[Message]) -> Any:
        """Reply with a message that has the token of this exchange. Return the client's next request.

        Raises:
            AffluxError: it did not come in time, or is of none of these kinds.
        """
        token, waiting = next(self._service.tokens), self._service.waiting
        reply = encode(message(token))
        waiting[token] = self._inbox
        self._reply(reply)
        self._number = -1
        try:
            self._number, request = self._inbox.get(timeout=self._timeout)
        except Empty:
            if waiting.pop(token, None) is not None:
                late = f"the client has not sent all slices within {self._timeout:g} seconds (timeout)"
                raise AffluxError(late) from None
            self._number, request = self._inbox.get()  # it comes now
        return decode(request, UNREADABLE, *kinds)

    def _answer(self, server: Server, request: Checkout | Push | Pull) -> Message:
        if isinstance(request, Checkout):
            task = server.checkout(request.client, lease=request.lease, hold=request.hold)
            return RemoteTask(task.id, task.client, task.version)
        self._timeout = min(request.timeout, TIMEOUT_MAX)
        if isinstance(request, Push):
            vectors: dict[str, Any] = {kind: RemoteSlices(server._adapter.size, self) for kind in request.kinds}
            return PushResult(server.push(**request.arguments | vectors | {"buffers": request.buffers}))
        aggregator = server._aggregator
        aggregator.enter("pull")
        with VersionReading(aggregator):
            self._show(server, request.task)  # a round that waits for the end of this block finds the version released
        return Done()

    def _show(self, server: Server, task: Any) -> None:
        """Let the client read a version."""
        version = server._aggregator.locked(lambda: _version(server, task))
        self._service.wait_for_shards()  # they have made the version before the client's message comes
        parts = tuple(version.params.parts)
        self.next(lambda token: VersionParts(token, version.version, version.buffers, parts), Done)


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
        writes = tuple([(calls[k].target, *calls[k].arguments) for k in range(len(calls))])
        written = self._exchange.next(lambda token: SliceWrites(token, writes), Written, Failed)
        if isinstance(written, Failed):
            raise written.error()
        if len(written.facts) != len(writes):
            raise AffluxError(f"the client has facts of {len(written.facts)} slices, of {len(writes)}")
        return dict(enumerate(written.facts))


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
                self.reply(number, encode(Failed.of(AffluxError(late))))

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
            self.reply(number, encode(Failed.of(AffluxError(problem))))


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
