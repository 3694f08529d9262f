"""The vectors of a server in shards, each of them in an actor of Ray.

`RayPlane` is a `ShardedPlane` whose calls go to the parts by messages: one for each shard, to all of them at once. A
vector is a `Handle` of each part. What needs no reply (a slot, a publication, the end of a handle) is sent with the
next call.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from secrets import token_hex
from threading import Lock
from time import time_ns
from types import MappingProxyType
from typing import Any
from warnings import warn

from msgspec.structs import replace

from afflux._engine import SUPERBLOCK
from afflux.aggregation.cache.rows import RowMemory
from afflux.aggregation.cache.staging import Row
from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.plane import NamedVectors, PlaneOptions, Slot, Vector
from afflux.aggregation.sharded_plane import Part, ShardedPlane, ShardedRound, Shards, part_of, parts_of
from afflux.distributed.shard import Call, Failure, Ref, Shard
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError, StoreError, UnavailableError
from afflux.ops.validation import integer
from afflux.rules.rule import Float64

#: A shard of fewer elements costs more by its messages than it saves: see docs/distributed.md.
LEAST_ELEMENTS = 4_000_000

#: The numbers of objects, and of calls of `add_once`, of all planes of this process. 0 is the shard itself.
_numbers = count(1)


class Handle(Ref):
    """An object of a shard. It is freed after the last reference to its handle was dropped."""

    def __init__(self, shard: "RemoteShard") -> None:
        super().__init__(next(_numbers))
        self._later = shard.later

    def __del__(self) -> None:
        self._later.append(Call(Ref(0), "free", (self.number,), {}))

    def __reduce__(self) -> Any:
        return Ref, (self.number,)


class RemoteShard:
    """An actor that holds a shard, and the calls that are sent with the next one."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.later: list[Call] = []
        self._lock = Lock()

    def send(self, epoch: int, calls: Sequence[Call]) -> Any:
        """Send calls; return the reference of their results."""
        with self._lock:
            before = self.later[:]
            reply = self.actor.call.remote(epoch, before, calls)
            del self.later[: len(before)]  # after an interrupt they are sent again
        return reply


class RemoteRows(RowMemory):
    """The rows of one part."""

    def __init__(self, plane: "RayPlane", part: int, handle: Handle, size: int, codec: Codec) -> None:
        super().__init__(size, codec)
        self._plane, self._part, self._handle = plane, part, handle

    def __reduce__(self) -> Any:
        return self._handle.__reduce__()

    def _get(self, name: str, *arguments: Any) -> Any:
        return self._plane.settled({self._part: Call(self._handle, name, arguments, {})})[self._part]

    @property
    def sum(self) -> Row:
        """The sum of all rows, a copy."""
        return self._get("sum")

    def row(self, slot: int) -> Row:
        """Return a copy of the row in a slot, encoded."""
        return self._get("row", slot)

    def publish(self, new: Any) -> None:
        """Make these rows the current ones. May be repeated."""
        self._plane.remote(self._part).later.append(Call(self._handle, "publish", (new,), {}))

    def loaded(self, rows: Any, total: Row) -> "RemoteRows":
        """Return other rows, with copies of these."""
        handle = Handle(self._plane.remote(self._part))
        self._plane.settled({self._part: Call(self._handle, "loaded", ([*rows], total), {}, handle.number)})
        return RemoteRows(self._plane, self._part, handle, self.size, self.codec)


class RemoteVector(Shards):
    """A vector: a handle of each part."""

    is_slot = False
    counter: Any = None  #: of a slot or a version: what counts it in this process

    def number(self, k: int) -> int:
        """Return the number of a part's object."""
        number: int = self.parts[k].number
        return number


class RayPlane(ShardedPlane):
    """The vectors of a server in the memory of Ray's actors, on the CPU.

    Results have the bits of a server in one piece. The plane connects to the cluster that this process is connected
    to. Without one, it starts one on this machine, which listens on the loopback address only and uses Ray's token
    authentication.

    If a shard's process ends, its vectors are lost: each later call that needs them raises an error.

    Args:
        shards: the number of shards, which are about equally long.
        cuts: the superblocks with which the second shard and the later ones begin, in place of `shards`.
        actor_options: options of Ray for the actors, for example `resources`; a sequence has those of each shard.

    Raises:
        UnavailableError: Ray is not installed.
    """

    alone = "a connection to Ray"

    def __init__(
        self,
        shards: int = 2,
        *,
        cuts: Sequence[int] | None = None,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    ) -> None:
        integer(1)("RayPlane", "shards", shards)
        super().__init__(shards, cuts=cuts)
        self._number = shards if cuts is None else len(cuts) + 1
        each = [actor_options] * self._number if isinstance(actor_options, Mapping) else [*actor_options]
        self._actor_options = each or [{}] * self._number
        if len(self._actor_options) != self._number:
            raise AffluxError(f"[RayPlane] actor_options has {len(each)} elements, of {self._number} shards")
        self.remotes: list[RemoteShard] = []
        self._ray = _ray()
        self._epoch = time_ns()
        self._lost: AffluxError | None = None
        self.drafts = lambda op: self.objects_later("take", op)
        self._path: Path | None = None

    def _allocate(self, parts: Sequence[Part], options: Sequence[PlaneOptions]) -> None:
        whole = self.size
        self._options = replace(options[0], size=whole)
        if whole < LEAST_ELEMENTS * self._number:
            warn(
                f"[RayPlane] {whole // self._number} elements a shard: below {LEAST_ELEMENTS} one process is faster",
                RuntimeWarning,
                stacklevel=5,
            )
        #: Vectors without elements: they count slots and versions, in the place of those in the shards.
        self.planes = [LocalPlane()]
        self.planes[0].allocate(replace(options[0], size=0, check_versions=False))
        self._start(parts, self.size)
        # A limit here would count a slot or version until the message that frees it.
        self.call("allocate", Shards([replace(each, slots=0, max_versions=None) for each in options]))

    def begin(self, size: int, path: Path) -> Path:
        self._start(parts_of(size, self.cuts(size)), size)
        path = path.absolute()  # the actors may have other working directories
        folders = [path / (f"shard-{number}" if self._number > 1 else "params") for number in self._of_shards]
        self._send("lock", {number: [folder] for number, folder in zip(self._of_shards, folders, strict=True)})
        self._path = path
        return path

    def _start(self, parts: Sequence[Part], size: int) -> None:
        """Start the actors, if they were not started before."""
        if self.remotes:
            return
        self.shard_of = [part.shard for part in parts]
        self._of_shards = sorted({*self.shard_of})  # without those that have no elements
        self._planes = [Ref(-1 - self.shard_of[:k].count(shard)) for k, shard in enumerate(self.shard_of)]
        self._sizes = [b - a for a, b in pairwise([*(part.first * SUPERBLOCK for part in parts), size])]
        self.connect()
        for chosen in self._actor_options:
            settings = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **chosen}
            self.remotes.append(RemoteShard(self._ray.remote(Shard).options(**settings).remote()))
        self._send("begin", {number: [self.shard_of.count(number)] for number in range(self._number)})

    def _send(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> None:
        """Call a method of some shards themselves."""
        replies = [
            self.remotes[number].send(self._epoch, [Call(Ref(0), name, tuple(arguments[number]), {})])
            if number in arguments
            else None
            for number in range(self._number)
        ]
        for results in self._wait(replies):
            for result in results or ():
                if isinstance(result, Failure):
                    raise result.error

    def remote(self, part: int) -> RemoteShard:
        """Return the shard of a part."""
        return self.remotes[self.shard_of[part]]

    @staticmethod
    def connect() -> None:
        """Start a cluster on this machine, if this process is connected to none."""
        _connect(_ray())

    def close(self) -> None:
        """End the actors. They end also when the server is deleted, or this process ends."""
        for shard in self.remotes:
            self._ray.kill(shard.actor)

    def _wait(self, replies: Sequence[Any]) -> list[Any]:
        """Wait for all replies of the shards; raise an error after that, if a shard is lost."""
        results, errors, dead = list[Any](), list[BaseException](), list[int]()
        for number, reply in enumerate(replies):
            result = None
            try:
                result = None if reply is None else self._ray.get(reply)
            except self._ray.exceptions.RayActorError:
                dead.append(number)
            except self._ray.exceptions.RayTaskError as error:
                errors.append(error.cause)
            results.append(result)
        if dead:
            remedy = (
                "a server without a store cannot go on; start again from a state of `Server.state_dict`"
                if self._path is None
                else f"Server.open({str(self._path)!r}, plane=RayPlane(...)) goes on from the last commit. What has "
                "joined after it is lost: an arrival whose receipt's `durable` is None or a later version"
            )
            shards = ", ".join(map(str, dead))
            message = (
                f"[RayPlane] shard {shards} of {self._number} has ended, and its part of the vectors is lost: {remedy}"
            )
            self._lost = AffluxError(message) if self._path is None else StoreError(message)
            raise self._lost
        if errors:
            raise errors[0]
        return results

    def settled(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Make one call in each of these parts, in all shards at once; return their results.

        Raises:
            AffluxError: a shard is lost, or a call has failed: then the error of the first one, after all have ended.
        """
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        parts_of_shards = [[k for k in sorted(calls) if self.shard_of[k] == number] for number in range(self._number)]
        replies = [
            shard.send(self._epoch, [calls[k] for k in parts]) if parts else None
            for shard, parts in zip(self.remotes, parts_of_shards, strict=True)
        ]
        results = dict[int, Any]()
        for parts, values in zip(parts_of_shards, self._wait(replies), strict=True):
            results.update(zip(parts, values or (), strict=True))
        for k in sorted(results):
            if isinstance(results[k], Failure):
                raise results[k].error
        return results

    def _calls(
        self,
        name: str,
        arguments: Sequence[Any],
        of: Shards | None,
        options: Mapping[str, Any] = MappingProxyType({}),
        out: Callable[[int], Any] = lambda k: None,
    ) -> dict[int, Call]:
        """Return a call for each part; `out` returns its numbers of objects."""
        targets = self._planes if of is None else of.parts
        return {
            k: Call(target, name, tuple(part_of(each, k) for each in arguments), {**options}, out(k))
            for k, target in enumerate(targets)
        }

    def _queue(self, calls: Mapping[int, Call]) -> None:
        for k, call in calls.items():
            self.remote(k).later.append(call)

    def _handles(self) -> RemoteVector:
        return RemoteVector([Handle(self.remote(k)) for k in range(len(self.shard_of))])

    def call(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> list[Any]:
        results = self.settled(self._calls(name, arguments, of, options))
        return [results[k] for k in range(len(results))]

    def objects(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> RemoteVector:
        handles = self._handles()
        self.settled(self._calls(name, arguments, of, options, handles.number))
        return handles

    def objects_later(self, name: str, *arguments: Any, of: Shards | None = None) -> RemoteVector:
        handles = self._handles()
        self._queue(self._calls(name, arguments, of, out=handles.number))
        return handles

    def call_later(self, name: str, *arguments: Any, of: Shards | None = None) -> None:
        self._queue(self._calls(name, arguments, of))

    def made(self, kind: Callable[..., Any], *arguments: Any) -> RemoteVector:
        return self.objects("make", kind, *arguments, of=Shards([Ref(0)] * len(self.shard_of)))

    def row_parts(self, rows: Shards, codec: Codec) -> Sequence[RowMemory]:
        return [RemoteRows(self, k, rows.parts[k], size, codec) for k, size in enumerate(self._sizes)]

    def drafted(self, op: str) -> Shards:
        counter, drafts = self.planes[0].versions.take(op), self.drafts(op)
        assert isinstance(drafts, RemoteVector)
        drafts.counter = counter
        return drafts

    def counted(self, version: Shards, like: Shards | None = None) -> Shards:
        assert isinstance(version, RemoteVector)
        version.counter = like.counter if isinstance(like, RemoteVector) else self.planes[0].versions.take()
        return version

    @property
    def each_plane(self) -> Shards:
        return Shards(self._planes)

    def detach(self, vectors: Shards) -> None:
        try:
            self.call("detach", of=vectors)
            self._send("unlock", {number: [] for number in self._of_shards})
        except Exception:  # a shard or the cluster has ended: callers have copies, and the other shards end too
            with suppress(Exception):
                self.close()

    def reserve(self, *, counted: bool = True) -> Slot | None:
        counter = self.planes[0].reserve(counted=counted)
        if counter is None:
            return None
        slot = self.objects_later("reserve")
        slot.counter, slot.is_slot = counter, True
        return slot

    def grow(self, limit: int) -> None:
        self.planes[0].grow(limit)

    def _dtype(self, vector: Shards) -> str:
        is_slot = isinstance(vector, RemoteVector) and vector.is_slot
        return self._options.slot_dtype if is_slot else self._options.dtype

    def add(self, total: Shards, slots: Sequence[Shards], weights: Float64, *, first: bool, done: list[Any]) -> None:
        if not done:
            done.append(next(_numbers))
        self.call("add_once", done[0], total, [*slots], weights, first=first)

    def make(self, prepared: ShardedRound, done: list[bool], weights: Any = None) -> None:
        done.append(all(self.call("sweep", Shards(prepared.parts))))

    def publish(self, prepared: ShardedRound, version: int) -> tuple[Vector, NamedVectors, Any]:
        params, rows = self._handles(), self._handles()
        vectors = {name: self._handles() for name in prepared.rule_vectors}

        def out(k: int) -> Any:
            return params.number(k), {name: vector.number(k) for name, vector in vectors.items()}, rows.number(k)

        self._queue(self._calls("publish", [Shards(prepared.parts), version], None, out=out))
        return self.counted(params, prepared.drafts), vectors, rows.parts


def _ray() -> Any:
    """Import Ray.

    If this is the first import of Ray in the process, a cluster that the process starts listens on the loopback address
    only, and uses token authentication.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listens on the loopback address only
        if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(f"[RayPlane] needs Ray: pip install 'afflux[ray]' ({error})") from None
    return ray


def _connect(ray: Any) -> None:
    """Start a cluster on this machine, if this process is connected to none."""
    if ray.is_initialized():
        return
    if "RAY_ADDRESS" not in os.environ and (
        os.environ.get("RAY_AUTH_MODE") != "token" or os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    ):
        raise UnavailableError(
            "[RayPlane] Ray was imported without token authentication: make the plane before the first `import ray`, "
            "or connect to a cluster of your own with ray.init"
        )
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
