"""The interface between control and the vectors of a server.

Control decides: admission, weights, versions, tasks, the log. It holds no vector, but handles: objects that only the
plane which has made them can read. A plane holds the vectors and makes every sweep; it knows no client, rule, staleness
or task. One assignment of control's state, which has the handles, decides which vectors are the server's; a vector to
which no handle is left is freed.

Each call may be repeated until it has returned, with the same result: an interrupt may come before its return.

RoundPlan    what a round is about to do, as data without vectors of d elements
Prepared     a round that a plane has prepared
DataPlane    the vectors of a server
StoredPlane  the vectors of a server that may have a store
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NewType, Protocol

from msgspec import Struct

from afflux import ops
from afflux.aggregation.cache.table import RowPlan
from afflux.ops.codecs import Codec
from afflux.ops.errors import UnavailableError
from afflux.rules.rule import Float64

#: Handles: of a pushed vector; of params, or a vector that the rule keeps; of a version that is being written; of a
#: float64 sum. They are freed when their last reference is dropped. mypy checks the kinds of handles in the calls of
#: control; the methods of a plane take and return its own objects as Any.
Slot = NewType("Slot", object)
Vector = NewType("Vector", object)
Draft = NewType("Draft", object)
Sum = NewType("Sum", object)
#: Arrays of callers: a flat vector, or the arrays of a tree.
Parts = Any
#: The vectors that a server keeps for its rule, by name, in the order of Rule.rule_vectors.
NamedVectors = Mapping[str, Vector]


class RoundPlan(Struct, frozen=True, eq=False):
    """A round that is decided and not prepared. Its repr is what the round is about to do.

    The round writes params of `version`, the vectors of `states`, those of `rule_vectors` that `next` changes, and the
    rows and the sum of `rows`.
    """

    version: int  #: that the round makes
    slots: list[Slot]  #: handles in canonical order; of a server that accumulates only that of the sum
    weights: Float64  #: of the slots
    params_weight: float
    step: ops.Step
    rule_vectors: tuple[str, ...]  #: the names of those that the round reads
    coefficients: tuple[float, ...]  #: their weights in the direction; empty: zeros
    next: Float64 | None  #: row s: the new values of rule vector s, from the direction and all of them
    states: Sequence[str]  #: the names of the vectors of the step
    rows: RowPlan | None
    most: float  #: the largest magnitude of an element of the slots, if no push has checked some of them; else inf
    trim: float = 0.0  #: see `Weights.trim`
    noise: ops.Noise | None = None  #: with its key, which no repr shows


class Prepared(Protocol):
    """A round for which everything that can fail has been done: only the sweep and its publication remain."""

    def make(self, done: list[bool]) -> None:
        """Make the sweep, once, also if an interrupted call is repeated. Append to `done` whether all values that it
        has written are finite.
        """

    def publish(self) -> tuple[Vector, NamedVectors, Any]:
        """Return the params, the rule vectors and the rows that the sweep has written. No call can fail after this."""

    def release(self) -> None:
        """Release slots and the frozen sweep, which frames of a stored traceback may hold longer."""


class PlaneOptions(Struct, frozen=True):
    """The vectors of one server: their sizes, types and numbers."""

    size: int  #: d
    dtype: str
    slot_dtype: str
    slots: int  #: the most slots
    together: int  #: the number of slots that a round reads
    num_threads: int = 1  #: of a round's sweep
    max_versions: int | None = None
    inplace: bool = False
    codec: Codec | None = None  #: of cached rows
    rows_on_host: bool = False  #: whether rows are kept on the host, for rounds on a GPU


class DataPlane(ABC):
    """The vectors of one server. It belongs to the server that has called `allocate`."""

    alone: str | None = None  #: what a forked child cannot use; None: the child has its own copy
    #: Whether a round may read callers' arrays that no push has checked: slots of its plan may be `ops.Parts`.
    reads_in_place: bool = False
    gpu: str | None = None  #: the name of the GPU that has the vectors

    def handle(self, server: Any, timeout: float) -> Any:
        """Return the handle of `Server.handle`."""
        raise UnavailableError("[handle] needs a server with plane=afflux.distributed.RayPlane(...)")

    @abstractmethod
    def allocate(self, options: PlaneOptions) -> Any:
        """Prepare for the vectors of a server. Return memory for cached rows, without rows; without a codec None."""

    # Pushed vectors: without control's mutex. Nothing joins before control has decided.

    @abstractmethod
    def reserve(self, *, counted: bool = True) -> Slot | None:
        """Return a free slot; None if all are in use. If not `counted`, return a new one beyond the limit."""

    @abstractmethod
    def grow(self, limit: int) -> tuple[Any, ...]:
        """Raise the most slots to `limit`, if fewer. Return their pools for pushes in C++; (): there are none."""

    @property
    @abstractmethod
    def slots_taken(self) -> int:
        """The number of slots in use."""

    @abstractmethod
    def ingest(
        self,
        parts: Parts,
        vector: Slot | Vector | Draft,
        num_threads: int,
        conversion: ops.Conversion | None = None,
        beside: Any = None,
    ) -> ops.Ingested:
        """Copy callers' arrays into a vector, in one sweep, as `ops.ingest`.

        If `reads_in_place`, `beside`, a check of a row, runs in parallel with the sweep.
        """

    @abstractmethod
    def first_beyond(self, vector: Slot | Vector | Draft, most: float) -> int | None:
        """Return the index of the first element that is NaN or has a magnitude beyond `most`; None: there is none."""

    # Sums of servers that accumulate: terms are added in the order of their joins.

    @abstractmethod
    def total(self, values: Float64 | None = None) -> Sum:
        """Return a sum, a slot of float64: of nothing, or with these values."""

    @abstractmethod
    def add(self, total: Sum, slot: Slot, weight: float, *, first: bool, done: list[Any]) -> None:
        """Add the slot times its weight. `first`: the sum has no terms yet.

        An interrupted call is repeated with its own list `done`, in which the call notes what it has done.
        """

    # Rounds: one at a time.

    @abstractmethod
    def gram(self, vectors: Sequence[Slot | Vector]) -> Float64:
        """Return the inner products of all pairs of these vectors."""

    @abstractmethod
    def inner(
        self, slots: Sequence[Slot], weights: Float64 | None, memory: Vector | None, shift: float, own_weight: float
    ) -> ops.InnerProducts:
        """Return the inner products of `Arrivals.inner`; `memory` is a rule vector."""

    @abstractmethod
    def prepare(self, plan: RoundPlan, params: Vector, rule_vectors: NamedVectors, rows: Any, op: str) -> Prepared:
        """Allocate what a round writes, build its sweep and check it. An error changes nothing.

        The round reads these params and rule vectors, and `rows`, a result of `allocate`, or None.

        Raises:
            StoreError: the disk is full, or a file has vanished.
            AffluxError: all versions are held; the message names `op`, the call that makes the round.
        """

    # Versions and the other vectors of the state.

    @abstractmethod
    def version(self, write: Callable[[Draft], object], op: str) -> Vector:
        """Return a version, which no caller can write to, with the values that `write` writes.

        Raises AffluxError, which names the call `op`, if max_versions are held.
        """

    @property
    @abstractmethod
    def versions_held(self) -> int:
        """The number of versions that are in use."""

    @abstractmethod
    def vector(self, values: "Float64 | float | None" = None) -> Vector:
        """Return a new vector: with these values, or this value in each element; None: not yet written."""

    @abstractmethod
    def fill(self, vector: Slot | Vector | Draft, values: Any) -> None:
        """Write a NumPy array of the vector's type (uint16 for bfloat16) into a vector."""

    @abstractmethod
    def shown(self, vector: Vector, *, copy: bool = False) -> ops.Array:
        """Return a vector for callers, as one array: a version, read-only where its library supports that; with `copy`
        a copy of any vector, which callers may change.
        """

    @abstractmethod
    def read(self, vector: Slot | Vector | Sum, *, copy: bool = True) -> Any:
        """Return the vector as one array of NumPy; without `copy` it may be the vector itself."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the work that this thread has queued in the library of the vectors is done."""


class StoredPlane(DataPlane):
    """A plane whose vectors a store can hold (`afflux.store.sharded_vectors`)."""

    on_one_node: bool = True  #: whether the vectors end with the machine of this process, and only with it

    def cuts(self, size: int) -> tuple[int, ...]:
        """Return the superblocks with which the second shard of `size` elements and the later ones begin."""
        return ()


def stored_plane(plane: DataPlane) -> StoredPlane:
    """Return the plane; raise UnavailableError if no store can hold its vectors."""
    if isinstance(plane, StoredPlane):
        return plane
    raise UnavailableError("[Server] a store cannot hold the vectors of this plane")
