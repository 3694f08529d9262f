"""The vectors of a server in several shards, cut at any superblock, with the bits of one.

A shard is a range of elements. The sums over all elements are added in a binary tree over the superblocks of the whole
vector (engine/include/afflux/order.hpp), and a shard's range is in general no subtree. Therefore each shard has a
`LocalPlane` for each maximal subtree in its range, O(log d) of them, and each returns one partial result.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary, proxy, ref

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from afflux import ops
from afflux._engine import SUPERBLOCK, Buffer, Pool, strict_float_mode
from afflux.aggregation.cache.rows import RowMemory
from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.plane import NamedVectors, Parts, PlaneOptions, RoundPlan, StoredPlane, Vector
from afflux.aggregation.sharded_rows import ShardedRows, plan_at
from afflux.arrays.devices import as_list
from afflux.arrays.interop import is_torch
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import integer
from afflux.rules.rule import Float64

_Value = TypeVar("_Value")


class Shards:
    """A vector: that of each part."""

    __slots__ = ("__weakref__", "parts", "shown")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.shown: Callable[[], Any] = lambda: None  #: returns the array that callers have, if they still do


class ShardedRound(Struct, frozen=True, eq=False):
    """A prepared round of a `ShardedPlane`."""

    plan: RoundPlan
    parts: Sequence[LocalRound]
    drafts: Shards
    rule_vectors: tuple[str, ...]  #: the names of all
    swept: list[list[bool]]  #: of each part: not empty once its sweep has been made

    def make(self, done: list[bool]) -> None:
        try:
            for part, swept in zip(self.parts, self.swept, strict=True):
                if not swept:
                    part.make(swept)
        finally:  # an interrupt may come after the last sweep
            if all(self.swept):
                done.append(all(sound for (sound,) in self.swept))

    def publish(self) -> Any:
        params, vectors, rows = zip(*[part.publish() for part in self.parts], strict=True)
        return Shards(params), {name: Shards([part[name] for part in vectors]) for name in vectors[0]}, rows

    def release(self) -> None:
        for part in self.parts:
            part.release()
        self.plan.slots.clear()


class ShardedPlane(StoredPlane):
    """The vectors of a server on the CPU, in shards.

    `pull` and `Task.params` copy a version, once as long as callers have the copy; neither max_versions nor
    memory_budget counts the copies.

    With a store, each shard has a folder of its own in the store's; `Server.open` needs a plane with the same shards.

    Args:
        shards: the number of shards, which are about equally long. Shards of a vector with fewer superblocks are empty.
        cuts: the superblocks with which the second shard and the later ones begin, in place of `shards`.

    >>> from afflux import Server, rules
    >>> server = Server(rules.fedbuff(buffer_size=1), np.zeros(200_000, np.float32), plane=ShardedPlane(3))
    >>> receipt = server.push(client=1, version=0, update=np.ones(200_000, np.float32))
    >>> float(server.params.sum())
    200000.0
    """

    each_plane: Shards  #: the plane of each part, for calls

    def __init__(self, shards: int = 2, *, cuts: Sequence[int] | None = None) -> None:
        self._shards = integer(1)("ShardedPlane", "shards", shards)
        self._cuts = None if cuts is None else [integer(0)("ShardedPlane", "cuts", cut) for cut in cuts]

        plane = proxy(self)
        #: Returns memory of each part for a version; the argument is the name of the call. A store sets it.
        self.drafts: Callable[[str], Shards] = lambda op: Shards([part.versions.take(op) for part in plane.planes])
        #: Raises StoreError if a file of the vectors is missing or truncated. A store sets it.
        self.check_files: Callable[[], None] = lambda: None
        self._copies = WeakValueDictionary[int, Any]()  # the arrays of `shown` that callers have, by id
        self._shown = WeakValueDictionary[int, Shards]()  # their versions, if these are in use

    def cuts(self, size: int) -> tuple[int, ...]:
        total = superblocks(size)
        if self._cuts is not None:
            return tuple(min(cut, total) for cut in sorted(self._cuts))
        slack = total // self._shards >> 6
        return tuple(even_cut(total * i // self._shards, slack) for i in range(1, self._shards))

    def allocate(self, options: PlaneOptions) -> ShardedRows | None:
        if hasattr(self, "size"):
            raise AffluxError("[Server] plane was given to a server before: give a new one")
        parts = parts_of(options.size, self.cuts(options.size))
        self.size, self.inplace = options.size, options.inplace
        self._total, self._nodes = superblocks(self.size), [(part.first, part.length) for part in parts]
        self._begins = [part.first * SUPERBLOCK for part in parts]
        self._spans = [slice(a, b) for a, b in pairwise([*self._begins, self.size])]
        self._whole = Pool(self.size, options.dtype, 0)
        rows = self._allocate(parts, [replace(options, size=span.stop - span.start) for span in self._spans])
        return None if options.codec is None else ShardedRows(self.row_parts(rows, options.codec), self._begins)

    def _allocate(self, parts: Sequence["ShardPart"], options: Sequence[PlaneOptions]) -> Shards:
        """Make the plane of each part. Return memory of each part for rows."""
        self.planes = [LocalPlane() for _ in parts]
        self.each_plane = Shards(self.planes)
        return self.objects("allocate", Shards(options))

    def begin(self, size: int, path: Path) -> Path:
        """Prepare for calls before `allocate`: for vectors of this size, in the store at `path`.

        Return the path by which the parts open it.
        """
        return path

    def call(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> list[Any]:
        """Call a method of each part's plane, or of each part's object in `of`, or read an attribute.

        Where an argument is `Shards`, or has them, the call gets its part.
        """
        targets = enumerate((of or self.each_plane).parts)
        return [call_of(target, name, [part_of(arg, k) for arg in arguments], options) for k, target in targets]

    def objects(self, name: str, *arguments: Any, of: Shards | None = None, **options: Any) -> Shards:
        """Return the results of `call` where these are objects that are only for calls."""
        return Shards(self.call(name, *arguments, of=of, **options))

    def objects_later(self, name: str, *arguments: Any, of: Shards | None = None) -> Shards:
        """Return the results of `objects`, for a call that cannot fail and may be repeated: it may be made later."""
        return self.objects(name, *arguments, of=of)

    def call_later(self, name: str, *arguments: Any, of: Shards | None = None) -> None:
        """Make a call that cannot fail, may be repeated and has no results: it may be made later."""
        self.call(name, *arguments, of=of)

    def made(self, kind: Callable[..., Any], *arguments: Any) -> Shards:
        """Return new objects, which `kind` makes where the parts are."""
        count = max(len(argument.parts) for argument in arguments if isinstance(argument, Shards))
        return Shards([kind(*(part_of(argument, k) for argument in arguments)) for k in range(count)])

    def row_parts(self, rows: Shards, codec: Codec) -> Sequence[RowMemory]:
        """Return the rows of each part."""
        return rows.parts

    def drafted(self, op: str) -> Shards:
        """Return memory of each part for a version."""
        return self.drafts(op)

    def counted(self, version: Shards, like: Shards | None = None) -> Shards:
        """Return a version that counts as one of those in use, together with `like`."""
        return version

    def detach(self, vectors: Shards) -> None:
        """Make versions that are in use independent of the files of these `StoredVectors`."""
        self.call("detach", of=vectors)

    def unlock(self) -> None:
        """Leave the folders of `begin` to other servers. May be repeated."""

    def _scattered(self, values: Any) -> Shards:
        """Return the part of a flat array for each plane."""
        if len(values) != self.size:
            raise AffluxError(f"an array has {len(values)} elements, expected {self.size}")
        return Shards([values[span] for span in self._spans])

    def _root(self, values: Sequence[_Value], join: Callable[[_Value, _Value], _Value]) -> _Value:
        """Return the value at the root of the tree, from those of the parts."""
        leaves = dict(zip(self._nodes, values, strict=True))

        def value(first: int, count: int) -> _Value:
            if (first, count) in leaves:
                return leaves[first, count]
            left = left_part(count)
            return join(value(first, left), value(first + left, count - left))

        return strict_float_mode(lambda total: value(0, total), self._total)  # as the engine adds

    def reserve(self, *, counted: bool = True) -> Any:
        # Taken in the order of the parts, and freed in the reverse order: if the first part has a free slot, all have.
        slots = [*takewhile(lambda slot: slot is not None, (plane.reserve(counted=counted) for plane in self.planes))]
        return Shards(slots) if len(slots) == len(self.planes) else None

    def grow(self, limit: int) -> tuple[Any, ...]:
        for plane in self.planes:
            plane.grow(limit)
        return ()

    @property
    def slots_taken(self) -> int:
        return self.planes[0].slots_taken

    def ingest(
        self,
        parts: Parts,
        vector: Any,
        num_threads: int,
        conversion: ops.Conversion | None = None,
        beside: Any = None,
    ) -> ops.Ingested:
        cut = conversion
        try:
            if conversion is not None and not (conversion.base is None or isinstance(conversion.base, Shards)):
                cut = conversion._replace(base=self._scattered(conversion.base))
            pieces = Shards(flat_pieces(as_list(parts), self._spans))
            facts: list[ops.Ingested] = self.call("ingest", pieces, vector, num_threads, cut)
        except (AffluxError, UnavailableError, TypeError, ValueError, BufferError):
            # NumPy cannot cut these arrays: the engine reads them whole, or its error names the caller's own.
            if conversion is not None:
                conversion = conversion._replace(base=self.shown(conversion.base))
            buffer = Buffer(Pool(self.size, self._dtype(vector), 0))
            whole_facts = ops.ingest(parts, buffer, num_threads=num_threads, conversion=conversion)
            self.fill(vector, np.asarray(buffer))
            return whole_facts
        return self._facts_of(facts)

    def _facts_of(self, facts: Sequence[ops.Ingested]) -> ops.Ingested:
        """Return the facts of a vector, from those of its parts."""
        return self._root(
            [
                each._replace(first_nonfinite=None if each.first_nonfinite is None else each.first_nonfinite + begin)
                for each, begin in zip(facts, self._begins, strict=True)
            ],
            _both,
        )

    def _dtype(self, vector: Shards) -> str:
        """Return the type of a vector."""
        dtype = np.asarray(vector.parts[0]).dtype.name
        return "bfloat16" if dtype == "uint16" else dtype

    def first_beyond(self, vector: Any, most: float) -> int | None:
        pairs = zip(self.call("first_beyond", vector, most), self._begins, strict=True)
        return next((index + begin for index, begin in pairs if index is not None), None)

    def total(self, values: Float64 | None = None) -> Any:
        return self.objects("total", None if values is None else self._scattered(values))

    def add(self, total: Any, slot: Any, weight: float, *, first: bool, done: list[Any]) -> None:
        if not done:
            done.extend([[] for _ in self.planes])  # a list for each part
        for k, (plane, flags) in enumerate(zip(self.planes, done, strict=True)):
            plane.add(total.parts[k], slot.parts[k], weight, first=first, done=flags)

    def gram(self, vectors: Sequence[Any]) -> Float64:
        return self._root(self.call("gram", [*vectors]), np.add)

    def inner(
        self, slots: Sequence[Any], weights: Float64 | None, memory: Vector | None, shift: float, own_weight: float
    ) -> ops.InnerProducts:
        parts = self.call("inner", [*slots], weights, memory, shift, own_weight)
        squares, products, square = zip(*parts, strict=True)
        return ops.InnerProducts(
            self._root(squares, np.add),
            None if products[0] is None else self._root(products, np.add),
            self._root(square, lambda left, right: left + right),
        )

    def prepare(
        self, plan: RoundPlan, params: Any, rule_vectors: NamedVectors, rows: ShardedRows | None, op: str
    ) -> ShardedRound:
        plans, drafts = self._plans(plan, rows), self.drafted(op)
        own_rows = None if rows is None else Shards(rows.parts)
        parts = self.objects("prepare", plans, params, {**rule_vectors}, own_rows, op, drafts).parts
        return ShardedRound(plan, parts, drafts, (*rule_vectors,), [[] for _ in parts])

    def _plans(self, plan: RoundPlan, rows: ShardedRows | None) -> Shards:
        """Return the plan of each part."""
        slots: list[Any] = plan.slots
        plans = [replace(plan, slots=[slot.parts[k] for slot in slots]) for k in range(len(self._begins))]
        if plan.noise is not None:
            noises = [replace(plan.noise, first=begin) for begin in self._begins]
            plans = [replace(part, noise=noise) for part, noise in zip(plans, noises, strict=True)]
        if plan.rows is not None and rows is not None:
            pairs = zip(plans, self._begins, strict=True)
            plans = [replace(part, rows=plan_at(plan.rows, rows.codec, begin)) for part, begin in pairs]
        return Shards(plans)

    def version(self, write: Callable[[Any], object], op: str) -> Any:
        drafts = self.drafted(op)
        write(drafts)
        return self.counted(self.objects_later("finished", drafts), drafts)

    @property
    def versions_held(self) -> int:
        return self.planes[0].versions_held

    def vector(self, values: "Float64 | float | None" = None) -> Any:
        return self.objects("vector", self._scattered(values) if isinstance(values, np.ndarray) else values)

    def fill(self, vector: Any, values: Any) -> None:
        self.call("fill", vector, self._scattered(values))

    def shown(self, vector: Any, *, copy: bool = False) -> ops.Array:
        if copy:
            return self.read(vector)
        if not isinstance(vector, Shards):
            return vector
        array = vector.shown()
        if array is None:
            self.check_files()
            buffer = Buffer(self._whole)  # NumPy cannot make it writable again
            np.concatenate(self.call("read", vector, copy=False), out=np.asarray(buffer))
            buffer.freeze()
            array = np.asarray(buffer)
            if not self.inplace:
                self.remember(vector, array)
        return array

    def remember(self, vector: Shards, array: ops.Array) -> None:
        """Record that callers have this copy of a version."""
        vector.shown, self._copies[id(array)], self._shown[id(array)] = ref(array), array, vector

    def version_of(self, array: ops.Array) -> Shards | None:
        """Return the version of which callers have this copy, if it is in use."""
        return self._shown.get(id(array)) if self.owns(array) else None

    def read(self, vector: Any, *, copy: bool = True) -> Any:
        return np.concatenate(self.call("read", vector, copy=False))

    def owns(self, params: ops.Array) -> bool:
        """Return whether a caller's params are a result of `shown`."""
        return params is not None and self._copies.get(id(params)) is params

    def wait(self) -> None:
        pass


class ShardPart(NamedTuple):
    """A part of each vector: a maximal subtree in the range of a shard."""

    shard: int
    first: int  #: superblock
    length: int  #: in superblocks


def call_of(target: Any, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call a method, or return an attribute."""
    attribute = getattr(target, name)
    return attribute(*arguments, **options) if callable(attribute) else attribute


def part_of(argument: Any, k: int) -> Any:
    """Return the argument of a call of part `k`: in the place of vectors, of which it has some, their parts."""
    if isinstance(argument, Shards):
        return argument.parts[k]
    if isinstance(argument, list):
        return [part_of(element, k) for element in argument]
    if isinstance(argument, dict):
        return {name: part_of(element, k) for name, element in argument.items()}
    if isinstance(argument, ops.Conversion):
        return argument._replace(base=part_of(argument.base, k))
    return argument


def superblocks(size: int) -> int:
    """Return the number of superblocks of a vector."""
    return -(-size // SUPERBLOCK)


def parts_of(size: int, cuts: Sequence[int]) -> list[ShardPart]:
    """Return the parts of a vector of `size` elements; `cuts` are the superblocks with which later shards begin."""
    total = superblocks(size)
    shards = enumerate(pairwise([0, *cuts, total]))
    return [ShardPart(k, *node) for k, ends in shards for node in subtrees(*ends, total)] or [ShardPart(0, 0, 0)]


def even_cut(cut: int, slack: int) -> int:
    """Return the number nearest to `cut`, at most `slack` away, that has the most factors of two.

    The ranges on both sides of such a cut have fewer maximal subtrees.

    >>> even_cut(191, 2), len(subtrees(0, 191, 382)), len(subtrees(0, 192, 382))
    (192, 7, 2)
    """
    step = 1
    while cut and abs((cut + step) // (2 * step) * (2 * step) - cut) <= slack:
        step *= 2
    return (cut + step // 2) // step * step


def left_part(count: int) -> int:
    """Return the number of leaves in the left subtree of a tree with `count` leaves, at least 2."""
    return 1 << (count - 1).bit_length() - 1


def subtrees(begin: int, end: int, total: int) -> list[tuple[int, int]]:
    """Return the maximal subtrees within [begin, end) of the tree over `total` superblocks: (first, number of leaves).

    >>> subtrees(0, 8, 8), subtrees(1, 7, 8)
    ([(0, 8)], [(1, 1), (2, 2), (4, 2), (6, 1)])
    """

    def within(first: int, count: int) -> list[tuple[int, int]]:
        if first >= end or first + count <= begin:
            return []
        if begin <= first and first + count <= end:
            return [(first, count)]
        left_count = left_part(count)
        return within(first, left_count) + within(first + left_count, count - left_count)

    return within(0, total)


def _both(left: ops.Ingested, right: ops.Ingested) -> ops.Ingested:
    """Return the facts of two parts that follow one another."""
    first = right.first_nonfinite if left.first_nonfinite is None else left.first_nonfinite
    low, high = right.min if right.min < left.min else left.min, left.max if right.max < left.max else right.max
    return ops.Ingested(first, left.sum_of_squares + right.sum_of_squares, low, high)


def flat_pieces(arrays: Sequence[Any], spans: Sequence[slice]) -> list[Any]:
    """Return, for each of these ranges of elements, the pieces of arrays that form one flat vector."""
    flat = [_flat(array) for array in arrays]
    return [_cut(flat, span) for span in spans]


def _flat(array: Any) -> Any:
    """Return a caller's array with one dimension."""
    array = array.detach() if is_torch(array) else np.asarray(array)
    if getattr(array.dtype, "hasobject", False):
        raise TypeError("objects")  # a shard in another process would unpickle them
    return array if array.ndim == 1 else array.reshape(-1)


def _cut(arrays: Sequence[Any], span: slice) -> Any:
    """Return the pieces of these flat arrays in a range of their elements."""
    if len(arrays) == 1:
        return arrays[0][span]
    pieces, begin = [], 0
    for array in arrays:
        size = len(array)
        start, stop = max(span.start - begin, 0), min(span.stop - begin, size)
        if start < stop:
            pieces.append(array[start:stop])
        begin += size
    return pieces
