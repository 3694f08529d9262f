"""A handle of a server for tasks and actors of Ray: slices go to the shards, and only facts to the server's process.

Ray cannot call into the process that has the server. Clients' requests therefore wait in a `Mailbox`, an actor, until a
thread of that process takes them (service.py). A push has two requests: after the first one the process reserves the
slot, and replies with what writes the slices; the second one has what the shards have found in them. The mailbox passes
requests and replies on as bytes (messages.py). Slices go between a client and the shards as arrays of NumPy, by Ray.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from afflux.aggregation.reports import Pulled, Receipt
from afflux.aggregation.sharded_plane import flat_pieces
from afflux.arrays.interop import on_gpu, on_host
from afflux.arrays.layout import Layout
from afflux.arrays.modules import is_module, is_state_dict
from afflux.distributed.connection import Connection, connected_ray
from afflux.distributed.messages import (
    Checkout,
    Done,
    Failed,
    Message,
    Pull,
    Push,
    PushResult,
    RemoteTask,
    SliceWrite,
    SliceWrites,
    VersionParts,
    Written,
    decode,
    encode,
    plain,
)
from afflux.distributed.shard import Call, Ref
from afflux.ops import Conversion, Kind
from afflux.ops.errors import AffluxError, BusyError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId, Float64
from afflux.server.inputs import InputAdapter

#: The kinds of vectors that a client pushes.
KINDS: tuple[Kind, ...] = "update", "gradient", "model"
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
            return encode(Failed.of(BusyError(busy)))
        number = next(self._numbers)
        # Nothing else reaches the server's process: a TypeError is the client's.
        self._requests.put_nowait((number, None if token is None else int(token), bytes(memoryview(request))))
        self._replies[number] = asyncio.get_running_loop().create_future()
        return await self._replies[number]

    async def next(self) -> tuple[int, int | None, bytes]:
        """Return the number of the next request, its token, and the request."""
        return await self._requests.get()

    async def reply(self, number: int, reply: bytes) -> None:
        """Reply to the request of this number."""
        self._replies.pop(number).set_result(reply)


@dataclass(frozen=True)
class ServerHandle:
    """The result of `Server.handle`: a server for tasks and actors of Ray, to which it can be sent.

    Slices of vectors go from the client to the shards, or from the shards to the client, and only facts to the process
    that has the server. The calls raise the errors that the server raises; those of classes that are neither afflux's
    nor Python's, for example of an `on_step`, as an AffluxError with their text. They raise a BusyError while 100,000
    requests wait for the server's process, and an AffluxError if that process has ended, the server was deleted, an
    argument cannot be sent, or a request or reply cannot be read where it arrives.

    Arguments are sent to the server's process as numbers (ints of at most 64 bits), texts, lists and dicts, a model's
    buffers as bytes, errors by their names and messages; no object of a caller's class is. NumPy's numbers, and arrays
    without dimensions, become Python's. Ray carries the slices, as arrays of NumPy, and the handle itself.
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
        request = Checkout(**_plain("checkout", client=client, lease=lease, hold=hold))
        task: RemoteTask = self._request(request, RemoteTask)
        return task

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
        vectors = {kind: arguments.pop(kind) for kind in KINDS if arguments.get(kind) is not None}
        buffers, pieces, values = arguments.pop("buffers", None), list[Any](), None
        if len(vectors) == 1:
            pieces, values = self._pieces(*next(iter(vectors.items())), buffers, arguments.get("client"))
        request = Push((*vectors,), _plain("push", **arguments), values, self._timeout)
        reply: SliceWrites | PushResult = self._request(request, SliceWrites, PushResult)
        if isinstance(reply, SliceWrites):
            reply = self._request(self._written(pieces, reply.writes), PushResult, token=reply.token)
        assert isinstance(reply, PushResult)
        return reply.receipt

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
        reply: VersionParts = self._request(Pull(_plain("pull", task=task)["task"], self._timeout), VersionParts)
        ranges = [(k, max(begin - at.start, 0), min(end, at.stop) - at.start) for k, at in enumerate(self._spans)]
        calls = {
            k: Call(Ref(0), "piece", (reply.parts[k], start, stop), {}) for k, start, stop in ranges if start < stop
        }
        try:
            pieces = self._connection.settled(calls)
        except Exception as error:
            raise AffluxError(f"[pull] the slices of version {reply.version} were not read in time: {error}") from None
        finally:
            self._send(Done(), reply.token)
        params = np.concatenate([pieces[k] for k in sorted(pieces)])
        params.flags.writeable = False
        return Pulled(params, reply.version, reply.buffers)

    def _pieces(self, kind: Kind, vector: Any, buffers: Any, client: Any) -> tuple[list[Any], Float64 | None]:
        """Return the slice of a push's vector for each part, and the model's buffers."""
        ray, adapter, values = connected_ray(), self._adapter, None
        if isinstance(vector, ray.ObjectRef):
            vector = ray.get(vector)
        whose = f"[push] client {brief(client)}'s" if client is not None else "[push] the task's"
        what = f"{whose} {kind}"
        if kind != "model" and (is_module(vector) or is_state_dict(vector)):
            raise AffluxError(f"{what} is a module or its state_dict, which holds the client's params: use model=")
        parts = adapter.parts(what, vector)
        if adapter.layout is not None and adapter.layout.apart:
            values = adapter.buffers(whose, vector if kind == "model" else None, buffers)
        arrays = [on_host(each) if on_gpu(each) else each for each in (parts if isinstance(parts, list) else [parts])]
        return flat_pieces(arrays, self._spans), values

    def _written(self, pieces: Sequence[Any], writes: Sequence[SliceWrite]) -> Message:
        """Write the slices; return what the shards have found in them, or the first error."""
        calls = {
            k: Call(plane, "ingest", (pieces[k], slot, num_threads, conversion and Conversion(*conversion)), {})
            for k, (plane, slot, num_threads, conversion) in enumerate(writes)
        }
        try:
            return Written(tuple([facts for _, facts in sorted(self._connection.settled(calls).items())]))
        except Exception as error:
            return Failed.of(error)

    def _request(self, request: Message, *kinds: type[Message], token: int | None = None) -> Any:
        """Return the reply to a request, of one of these kinds; a request with a token is a second one."""
        ray = connected_ray()
        try:
            data = ray.get(self._send(request, token))
        except ray.exceptions.RayActorError:
            raise AffluxError("[handle] the server's process has ended, or the server was deleted") from None
        reply = decode(data, "the client cannot read the reply", *kinds, Failed)
        if isinstance(reply, Failed):
            raise reply.error()
        return reply

    def _send(self, request: Message, token: int | None = None) -> Any:
        """Send a request; return the reference of its reply."""
        connected_ray()
        return self._mailbox.ask.remote(token, encode(request))


def _plain(op: str, /, **arguments: Any) -> dict[str, Any]:
    """Return arguments as plain data: of a task its id, and of a pulled version its number."""
    for name, kind, field in (("task", RemoteTask, "id"), ("version", Pulled, "version")):
        if isinstance(arguments.get(name), kind):
            arguments[name] = getattr(arguments[name], field)
    return {name: plain(f"[{op}] {name}", value) for name, value in arguments.items()}
