"""A handle of a server for tasks and actors of Ray: slices go to the shards, and only facts to the server's process.

Ray cannot call into the process that has the server. Clients' requests therefore wait in a `Mailbox`, an actor, until a
thread of that process takes them (service.py). A push has two requests: after the first one the process reserves the
slot, and replies with the calls that write the slices; the second one has the results of these calls. The mailbox reads
neither requests nor replies: they are pickles that the process unpickles for one request, and a client for its own.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from traceback import format_exception_only
from typing import Any, NamedTuple

import numpy as np

from afflux.aggregation.reports import Pulled, Receipt
from afflux.aggregation.sharded_plane import flat_pieces
from afflux.arrays.interop import on_gpu, on_host
from afflux.arrays.layout import Layout
from afflux.arrays.modules import is_module, is_state_dict
from afflux.distributed.connection import Connection, connected_ray, import_ray
from afflux.distributed.shard import Call, Failure, Ref
from afflux.ops.errors import AffluxError, BusyError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId, Float64
from afflux.server.inputs import InputAdapter

#: The kinds of vectors that a client pushes.
KINDS = "update", "gradient", "model"
#: The most first requests that wait for a reply of the server's process; twice as many wait if some are second ones.
MOST_REQUESTS = 100_000


class Mailbox:
    """An actor with the requests of clients that wait for the server's process, and with its replies."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  #: see MOST_REQUESTS
        self._numbers = count()
        self._requests = asyncio.Queue[tuple[int, int | None, bytes]]()
        self._replies: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, token: int | None, request: bytes) -> bytes:
        """Return the reply to a client's request, a first one (token None) or a second one; BusyError if many wait."""
        if len(self._replies) >= (self._limit if token is None else 2 * self._limit):
            busy = f"[handle] {len(self._replies)} requests wait for the server's process: try again later"
            return packed(Failure(BusyError(busy)))
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((number, token, request))
        return await self._replies[number]

    async def next(self) -> tuple[int, int | None, bytes]:
        """Return the number of the next request, its token, and the request."""
        return await self._requests.get()

    async def reply(self, number: int, reply: bytes) -> None:
        """Reply to the request of this number."""
        self._replies.pop(number).set_result(reply)


class FirstRequest(NamedTuple):
    """The first request of a push, a pull or a checkout."""

    name: str
    arguments: dict[str, Any]
    timeout: float  #: seconds for which the server waits for the next one


class Continuation(NamedTuple):
    """The second request of a push or pull."""

    token: int  #: of the reply to the first one
    results: Any


class SliceCalls(NamedTuple):
    """The reply to the first request of a push: calls that write its slices, each without its first argument."""

    token: int
    calls: dict[int, Call]  #: by part


class VersionParts(NamedTuple):
    """The reply to a pull: the vectors of a version, which the server holds until the client has read them."""

    token: int
    version: int
    buffers: Float64 | None
    parts: Sequence[Ref]


class RemoteTask(NamedTuple):
    """The result of `ServerHandle.checkout`."""

    id: str  #: for `pull` and `push`
    client: ClientId
    version: int  #: that the client trains from


@dataclass(frozen=True)
class ServerHandle:
    """The result of `Server.handle`: a server for tasks and actors of Ray, to which it can be sent.

    Slices of vectors go from the client to the shards, or from the shards to the client, and only facts to the process
    that has the server. The calls raise the errors that the server raises; those of classes that are neither afflux's
    nor Python's, for example of an `on_step`, as an AffluxError with their text. They raise a BusyError while 100,000
    requests wait for the server's process, and an AffluxError if that process has ended, the server was deleted, or a
    request or reply cannot be unpickled where it arrives.
    """

    _mailbox: Any
    _connection: Connection
    _adapter: InputAdapter
    _spans: tuple[slice, ...]  #: the elements of each part
    _timeout: float

    @property
    def layout(self) -> Layout | None:
        """As `Server.layout`: its `load` copies params and buffers of `pull` into a model."""
        return self._adapter.layout

    def checkout(self, client: ClientId, *, lease: float | None = None, hold: bool = True) -> RemoteTask:
        """Open a task, see `Server.checkout`."""
        reply: RemoteTask = self._ask("checkout", {"client": client, "lease": lease, "hold": hold})
        return reply

    def push(self, **arguments: Any) -> Receipt:
        """Push a client's update, gradient or model, see `Server.push`.

        Args:
            arguments: those of `Server.push`. The vector may also be an `ObjectRef` of one. A `task` is
                the result of `checkout`, or its id. For a `version` that is a `Pulled`, its number is sent.

        Raises:
            AffluxError: as `Server.push`; or not all slices came within the handle's timeout. Nothing has changed. The
                server does not count errors that it never saw: arrays that do not fit.
            StoreError, BusyError: as `Server.push`.

        Cost: a reply of the server's process, one of all shards at once, which take the slices, and a reply of the
        server's process. Before the first reply it waits for all shards once.
        """
        if isinstance(arguments.get("version"), Pulled):
            arguments["version"] = arguments["version"].version
        if isinstance(arguments.get("task"), RemoteTask):
            arguments["task"] = arguments["task"].id
        kinds = [kind for kind in KINDS if arguments.get(kind) is not None]
        pieces: Sequence[Any] = ()
        if len(kinds) == 1:
            pieces = self._pieces(kinds[0], arguments)
        for kind in kinds:
            arguments[kind] = None
        reply = self._ask("push", {**arguments, "kinds": kinds})
        if isinstance(reply, SliceCalls):
            calls = {k: call._replace(arguments=(pieces[k], *call.arguments)) for k, call in reply.calls.items()}
            reply = self._request(Continuation(reply.token, self._results(calls)))
        receipt: Receipt = reply
        return receipt

    def pull(self, begin: int = 0, end: int | None = None, *, task: RemoteTask | str | None = None) -> Pulled:
        """Return the newest version, or that of a task, or some elements of it.

        All slices are of one version, also if the server makes the next one meanwhile.

        Args:
            begin: the first element.
            end: the element after the last one; None: all that follow.
            task: the result of `checkout`, or its id; None: the newest version.

        Returns:
            Params from `begin` to `end`, read-only; the number of the version; the buffers of the model.

        Raises:
            AffluxError: there are no such elements, the version of the task is no longer held, or the slices were not
                read within the handle's timeout.
        """
        size = self._spans[-1].stop
        end = size if end is None else end
        if not 0 <= begin < end <= size:
            raise AffluxError(f"[pull] elements {begin} to {end} are not among the {size} of params")
        reply = self._ask("pull", {"task": task.id if isinstance(task, RemoteTask) else task})
        assert isinstance(reply, VersionParts)
        ranges = [(k, max(begin - at.start, 0), min(end, at.stop) - at.start) for k, at in enumerate(self._spans)]
        calls = {
            k: Call(Ref(0), "piece", (reply.parts[k], start, stop), {}) for k, start, stop in ranges if start < stop
        }
        pieces = self._results(calls)
        self._send(Continuation(reply.token, None))
        if isinstance(pieces, Failure):
            raise AffluxError(f"[pull] the slices of version {reply.version} were not read in time: {pieces.error}")
        params = np.concatenate([pieces[k] for k in sorted(pieces)])
        params.flags.writeable = False
        return Pulled(params, reply.version, reply.buffers)

    def _pieces(self, kind: str, arguments: dict[str, Any]) -> Sequence[Any]:
        """Return the slice of a push's vector for each part; the model's buffers become an argument of their own."""
        ray, adapter, vector = import_ray(), self._adapter, arguments[kind]
        if isinstance(vector, ray.ObjectRef):
            vector = ray.get(vector)
        client = arguments.get("client")
        whose = f"[push] client {brief(client)}'s" if client is not None else "[push] the task's"
        what = f"{whose} {kind}"
        if kind != "model" and (is_module(vector) or is_state_dict(vector)):
            raise AffluxError(f"{what} is a module or its state_dict, which holds the client's params: use model=")
        parts = adapter.parts(what, vector)
        if adapter.layout is not None and adapter.layout.apart:
            model = vector if kind == "model" else None
            arguments["buffers"] = adapter.buffers(whose, model, arguments.get("buffers"))
        arrays = [on_host(each) if on_gpu(each) else each for each in (parts if isinstance(parts, list) else [parts])]
        return flat_pieces(arrays, self._spans)

    def _results(self, calls: Mapping[int, Call]) -> dict[int, Any] | Failure:
        """Return the results of the shards; or the first error."""
        try:
            return self._connection.settled(calls)
        except Exception as error:
            return Failure(error.with_traceback(None))

    def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        return self._request(FirstRequest(name, arguments, self._timeout))

    def _request(self, request: FirstRequest | Continuation) -> Any:
        ray = import_ray()
        try:
            data = ray.get(self._send(request))
        except ray.exceptions.RayActorError:
            raise AffluxError("[handle] the server's process has ended, or the server was deleted") from None
        reply = unpacked(data, "the client cannot read the reply")
        if isinstance(reply, Failure):
            raise reply.error
        return reply

    def _send(self, request: FirstRequest | Continuation) -> Any:
        """Send a request; return the reference of its reply."""
        token = request.token if isinstance(request, Continuation) else None
        connected_ray()
        return self._mailbox.ask.remote(token, packed(request))


def packed(value: Any) -> bytes:
    """Return the pickle of a request or reply."""
    data: bytes = import_ray().cloudpickle.dumps(value)
    return data


def unpacked(data: bytes, problem: str) -> Any:
    """Return a request or reply.

    Raises:
        AffluxError: this process cannot unpickle it: the problem, and the error.
    """
    try:
        return import_ray().cloudpickle.loads(data)
    except Exception as error:
        raise AffluxError(f"[handle] {problem}: {error_text(error)}") from None


def error_text(error: BaseException) -> str:
    """Return the class and the message of an error, also if its `__str__` fails."""
    return "".join(format_exception_only(error)).strip()
