"""The vectors of a server in shards, each of them in an actor of Ray.

`RayPlane` is a `ShardedPlane` whose calls go to the parts by messages: one for each shard, to all of them at once. A
vector is a `Handle` of each part. What needs no reply (a slot, a publication, the end of a handle) is sent with the
next call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as replace_fields
from itertools import count, pairwise
from pathlib import Path
from time import time_ns
from types import MappingProxyType
from typing import Any
from warnings import warn
from weakref import proxy

from msgspec.structs import asdict, replace

from afflux._engine import SUPERBLOCK, Buffer, Pool
from afflux.aggregation.cache.rows import RowMemory
from afflux.aggregation.cache.staging import EncodedRow
from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.plane import NamedVectors, Parts, PlaneOptions, RoundPlan
from afflux.aggregation.sharded_plane import ShardedPlane, ShardedRound, ShardPart, Shards, part_of, parts_of
from afflux.aggregation.sharded_rows import ShardedRows
from afflux.distributed import connection
from afflux.distributed.connection import START_TIMEOUT, Connection, RemoteShard
from afflux.distributed.handle import MOST_REQUESTS, Mailbox, ServerHandle
from afflux.distributed.service import RemoteSlices, Service
from afflux.distributed.shard import Call, Ref, Shard
from afflux.ops import Conversion, Ingested
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import integer, optional, positive

#: A shard of fewer elements costs more by its messages than it saves: see docs/guides/distributed.md.
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


class RemoteRows(RowMemory):
    """The rows of one part."""

    def __init__(self, plane: "RayPlane", part: int, handle: Handle, size: int, codec: Codec) -> None:
        super().__init__(size, codec)
        self._plane, self._part, self._handle = plane, part, handle

    def __reduce__(self) -> Any:
        return self._handle.__reduce__()

    def _get(self, name: str, *arguments: Any) -> Any:
        return self._plane.connection.settled({self._part: Call(self._handle, name, arguments, {})})[self._part]

    @property
    def sum(self) -> EncodedRow:
        """The sum of all rows, a copy."""
        return self._get("sum")

    def row(self, slot: int) -> EncodedRow:
        """Return a copy of the row in a slot, encoded."""
        return self._get("row", slot)

    def publish(self, new: Any) -> None:
        """Make these rows the current ones. May be repeated."""
        self._plane.remote(self._part).later.append(Call(self._handle, "publish", (new,), {}))

    def loaded(self, rows: Any, total: EncodedRow) -> "RemoteRows":
        """Return other rows, with copies of these."""
        handle = Handle(self._plane.remote(self._part))
        self._plane.connection.settled({self._part: Call(self._handle, "loaded", ([*rows], total), {}, handle.number)})
        return RemoteRows(self._plane, self._part, handle, self.size, self.codec)


class RemoteVector(Shards):
    """A vector: a handle of each part."""

    is_slot = False
    counter: Any = None  #: of a slot or a version: what counts it in this process

    def number(self, k: int) -> int:
        """Return the number of a part's object."""
        number: int = self.parts[k].number
        return number


class RemoteRound(ShardedRound, frozen=True, eq=False):
    """A prepared round of a `RayPlane`."""

    plane: "RayPlane"
    #: The calls that prepare it, if one message has them with its sweep. They may be sent again after an error.
    first: Mapping[int, Call]

    def make(self, done: list[bool]) -> None:
        calls = self.plane.calls("sweep", [Shards(self.parts)])
        done.append(all(self.plane.connection.settled(calls, self.first).values()))

    def publish(self) -> Any:
        plane = self.plane
        params, rows = plane.handles(), plane.handles()
        vectors = {name: plane.handles() for name in self.rule_vectors}

        def out(k: int) -> Any:
            return params.number(k), {name: vector.number(k) for name, vector in vectors.items()}, rows.number(k)

        plane.queue(plane.calls("publish", [], Shards(self.parts), out=out))
        return plane.counted(params, self.drafts), vectors, rows.parts

    def release(self) -> None:
        self.plane.call_later("release", Shards(self.parts))
        self.plan.slots.clear()


class RayPlane(ShardedPlane):
    """The vectors of a server in the memory of Ray's actors, on the CPU.

    Results are bit-identical to those of one process. The plane connects to the cluster that this process is connected
    to. Without one, it starts one on this machine, which listens on the loopback address only and uses Ray's token
    authentication.

    If a shard's process or the cluster ends, vectors are lost: each later call that needs them raises a PlaneError, or
    a StoreError if the server has a store.

    Args:
        shards: the number of shards, which are about equally long.
        cuts: the superblocks with which the second shard and the later ones begin, in place of `shards`.
        actor_options: options of Ray for the actors, for example `resources`; a sequence has those of each shard.
        start_timeout: seconds to wait for the start of the actors, for which a cluster may lack resources; None: no
            limit. After 20 seconds a warning says what they request, and what the cluster has.

    Raises:
        UnavailableError: Ray is not installed. The server's constructor raises it, too, after `start_timeout`.
    """

    alone = "a connection to Ray"

    def __init__(
        self,
        shards: int = 2,
        *,
        cuts: Sequence[int] | None = None,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        integer(1)("RayPlane", "shards", shards)
        super().__init__(shards, cuts=cuts)
        self._number = shards if cuts is None else len(cuts) + 1
        each = [actor_options] * self._number if isinstance(actor_options, Mapping) else [*actor_options]
        self._actor_options = each or [{}] * self._number
        if len(self._actor_options) != self._number:
            raise AffluxError(f"[RayPlane] actor_options has {len(each)} elements, of {self._number} shards")
        self._start_timeout = optional(positive)("RayPlane", "start_timeout", start_timeout)
        connection.import_ray()
        self.connection = Connection(self._number, time_ns())
        self.drafts = lambda op: self.objects_later("take", op)
        self._service: Service | None = None

    def _allocate(self, parts: Sequence[ShardPart], options: Sequence[PlaneOptions]) -> Shards:
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
        self.planes[0].allocate(replace(options[0], size=0))
        self._start(parts, self.size)
        # A limit here would count a slot or version until the message that frees it.
        return self.objects("allocate", Shards([replace(each, slots=0, max_versions=None) for each in options]))

    def begin(self, size: int, path: Path) -> Path:
        self._start(parts_of(size, self.cuts(size)), size)
        path = path.absolute()  # the actors may have other working directories
        folders = [path / (f"shard-{number}" if self._number > 1 else "params") for number in self._of_shards]
        self.connection.send("lock", {k: [folder] for k, folder in zip(self._of_shards, folders, strict=True)})
        self.connection.path = path
        return path

    def _start(self, parts: Sequence[ShardPart], size: int) -> None:
        """Start the actors, if they were not started before."""
        if self.remotes:
            return
        self.connection.shard_of = self.shard_of = [part.shard for part in parts]
        self._of_shards = sorted({*self.shard_of})  # without those that have no elements
        self.each_plane = Shards([Ref(-1 - self.shard_of[:k].count(shard)) for k, shard in enumerate(self.shard_of)])
        self._sizes = [b - a for a, b in pairwise([*(part.first * SUPERBLOCK for part in parts), size])]
        self.connect()
        for chosen in self._actor_options:
            settings = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **chosen}
            actor = connection.import_ray().remote(Shard).options(**settings).remote()
            self.remotes.append(RemoteShard(actor))
        counts = [self.shard_of.count(number) for number in range(self._number)]
        requests = [{"num_cpus": 0, **chosen} for chosen in self._actor_options]
        self.connection.begin(counts, requests, self._start_timeout)

    @property
    def remotes(self) -> list[RemoteShard]:
        """The shards."""
        return self.connection.remotes

    @property
    def on_one_node(self) -> bool:  # type: ignore[override]
        """Whether all shards are on the node of Ray of this process."""
        calls = {k: Call(Ref(0), "make", (connection.node_id,), {}) for k in range(len(self.shard_of))}
        return {*self.connection.settled(calls).values()} == {connection.node_id()}

    def remote(self, part: int) -> RemoteShard:
        """Return the shard of a part."""
        return self.remotes[self.shard_of[part]]

    @staticmethod
    def connect() -> None:
        """Start a cluster on this machine, if this process is connected to none."""
        connection.connect()

    def close(self) -> None:
        """End the actors. They end also when the server is deleted, or this process ends."""
        self.connection.close()

    def calls(
        self,
        name: str,
        arguments: Sequence[Any],
        of: Shards | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        out: Callable[[int], Any] = lambda k: None,
    ) -> dict[int, Call]:
        """Return a call for each part's plane, or object in `of`; `out` returns its numbers of objects."""
        return {
            k: Call(target, name, tuple(part_of(each, k) for each in arguments), {**options}, out(k))
            for k, target in enumerate((of or self.each_plane).parts)
        }

    def queue(self, calls: Mapping[int, Call]) -> None:
        """Make these calls, which need no reply, with the next message."""
        for k, call in calls.items():
            self.remote(k).later.append(call)

    def handles(self) -> RemoteVector:
        """Return new handles, for an object of each part."""
        return RemoteVector([Handle(self.remote(k)) for k in range(len(self.shard_of))])

    def wait_for_shards(self) -> None:
        """Wait until the shards have made the calls that need no reply."""
        self.call("slots_taken")

    def handle(self, server: Any, timeout: float) -> ServerHandle:
        if self.inplace:
            raise UnavailableError("[handle] inplace=True: a round would overwrite params that a client reads")
        if self._service is None:
            options = {"num_cpus": 0, "max_concurrency": 2 * MOST_REQUESTS + 8}  # requests, and what ends at once
            mailbox = connection.connected_ray().remote(Mailbox).options(**options).remote(MOST_REQUESTS)
            plane = proxy(self)
            self._service = Service(server, mailbox, lambda: plane.wait_for_shards())
        adapter = replace_fields(server._adapter, plane=None, likes={}, rebuild=None)
        return ServerHandle(self._service.mailbox, self.connection, adapter, (*self._spans,), timeout)

    def ingest(
        self,
        parts: Parts,
        vector: Any,
        num_threads: int,
        conversion: Conversion | None = None,
        beside: Any = None,
    ) -> Ingested:
        if not isinstance(parts, RemoteSlices):
            return super().ingest(parts, vector, num_threads, conversion, beside)
        self.wait_for_shards()  # they have the slot, and the base, before the client's message comes
        try:
            facts = parts.write(self.calls("ingest", [vector, num_threads, conversion]))
        except Exception:
            self.wait_for_shards()  # raises an error if a shard has ended
            raise
        return self._facts_of([facts[k] for k in range(len(facts))])

    def call(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> list[Any]:
        results = self.connection.settled(self.calls(name, arguments, of, options))
        return [results[k] for k in range(len(results))]

    def objects(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> RemoteVector:
        handles = self.handles()
        self.connection.settled(self.calls(name, arguments, of, options, handles.number))
        return handles

    def objects_later(self, name: str, *arguments: Any, of: Shards | None = None) -> RemoteVector:
        handles = self.handles()
        self.queue(self.calls(name, arguments, of, out=handles.number))
        return handles

    def call_later(self, name: str, *arguments: Any, of: Shards | None = None) -> None:
        self.queue(self.calls(name, arguments, of))

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

    def detach(self, vectors: Shards) -> None:
        self._leave(lambda: self.call("detach", of=vectors))

    def unlock(self) -> None:
        self._leave(lambda: self.connection.send("unlock", {number: [] for number in self._of_shards}))

    def _leave(self, call: Callable[[], object]) -> None:
        """Make a last call. If a shard or the cluster has ended, the other shards end too: callers have copies."""
        try:
            call()
        except Exception:
            with suppress(Exception):
                self.close()

    def reserve(self, *, counted: bool = True) -> Any:
        counter = self.planes[0].reserve(counted=counted)
        if counter is None:
            return None
        slot = self.objects_later("reserve")
        slot.counter, slot.is_slot = counter, True
        return slot

    def _dtype(self, vector: Shards) -> str:
        is_slot = isinstance(vector, RemoteVector) and vector.is_slot
        return self._options.slot_dtype if is_slot else self._options.dtype

    def add(self, total: Any, slot: Any, weight: float, *, first: bool, done: list[Any]) -> None:
        if not done:
            done.append(next(_numbers))
        self.call("add_once", done[0], total, slot, weight, first=first)

    def prepare(
        self, plan: RoundPlan, params: Any, rule_vectors: NamedVectors, rows: ShardedRows | None, op: str
    ) -> RemoteRound:
        plane = self.planes[0]
        allocates = not self.inplace and plane.versions.held == plane.versions.allocated
        if allocates or rows is not None or self.connection.path is not None:
            return RemoteRound(**asdict(super().prepare(plan, params, rule_vectors, rows, op)), plane=self, first={})
        # The shards have memory for the version. All other errors are raised on vectors without elements.
        slots = [Buffer(Pool(0, self._options.slot_dtype, 0)) for _ in plan.slots]
        vectors = {name: plane.vector() for name in rule_vectors}
        plane.prepare(replace(plan, slots=slots), plane.vector(), vectors, None, op, plane.vector())
        drafts, parts = RemoteVector([]), self.handles()
        drafts.counter = plane.versions.take(op)
        numbers = Shards([handle.number for handle in parts.parts])
        arguments = [numbers, self._plans(plan, None), params, {**rule_vectors}, None, op]
        first = self.calls("prepare_once", arguments, out=parts.number)
        return RemoteRound(plan, parts.parts, drafts, (*rule_vectors,), [], self, first)
