"""One shard of a server's vectors, in a process of its own: the planes of its parts, and the objects of their handles.

Control refers to an object of a shard by a number, which control chooses: `Ref`. So a call whose reply was lost can be
repeated, and the object of a handle that control has dropped is freed. This module does not import Ray.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from msgspec.structs import replace

from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.plane import RoundPlan
from afflux.aggregation.sharded_plane import call_of
from afflux.arrays.interop import on_host
from afflux.arrays.pools import Draft
from afflux.ops.errors import PlaneError
from afflux.store.lock import InUseError, Lock

#: Seconds for which a shard waits for the end of a process that another control has left in its folder.
PATIENCE = 30.0


class Ref:
    """Names an object of a shard."""

    def __init__(self, number: int) -> None:
        self.number = number


class Call(NamedTuple):
    """A call of a method in a shard."""

    target: Ref
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    out: Any = None  #: numbers for the objects of the result: one, or a tuple or dict of them; None: return the result


class Failure(NamedTuple):
    """The result of a call that has raised."""

    error: Exception


class PartPlane(LocalPlane):
    """The vectors of one part. Calls whose replies may be lost can be repeated."""

    _added: tuple[int, ...] = ()  # the numbers of the latest calls of `add_once`
    _prepared: tuple[int, LocalRound] | None = None  # the latest call of `prepare_once`

    def take(self, op: str) -> Draft:
        """Return memory for a version."""
        return self.versions.take(op)

    def prepare_once(self, number: int, *arguments: Any) -> LocalRound:
        """Make the call of `prepare` with this number once, on memory for a version of its own."""
        if self._prepared is None or self._prepared[0] != number:
            self._prepared = number, self.prepare(*arguments)
        return self._prepared[1]

    def release(self, prepared: LocalRound) -> None:
        """Release a round's slots and vectors."""
        if self._prepared is not None and self._prepared[1] is prepared:
            self._prepared = None
        prepared.release()

    def sweep(self, prepared: LocalRound) -> bool:
        """Make the sweep of a round once. Return whether all values that it has written are finite."""
        if not prepared.swept:
            prepared.make(prepared.swept)
        return prepared.swept[0]

    def add_once(self, number: int, total: Any, slot: Any, weight: float, *, first: bool) -> None:
        """Make the call of `add` with this number once."""
        if number not in self._added:
            self.add(total, slot, weight, first=first, done=[])
            self._added = (*self._added[-63:], number)


class Shard:
    """The planes of one shard's parts, and the objects that control refers to.

    The references of the planes are negative: -1 is that of the first part. 0 is the shard itself.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._objects: dict[int, Any] = {0: self}
        self._lock: Lock | None = None
        self._failure: Failure | None = None

    def begin(self, parts: int) -> None:
        """Begin anew, with planes for this number of parts."""
        self.unlock()
        self._objects = {0: self, **{-k: PartPlane() for k in range(1, parts + 1)}}

    def lock(self, folder: Path) -> None:
        """Lock the shard's folder in a store: a process that another control has left there ends first.

        Raises:
            StoreError: another process has held the folder for `PATIENCE` seconds.
        """
        end = monotonic() + PATIENCE
        while self._lock is None:
            try:
                self._lock = Lock(folder)
            except InUseError:
                if monotonic() > end:
                    raise

    def unlock(self) -> None:
        """Release the lock of the shard's folder."""
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def call(self, epoch: int, without_reply: Sequence[Call], calls: Sequence[Call]) -> list[Any]:
        """Make calls in their order; return a result, or `Failure`, for each of `calls`.

        Those `without_reply` come again with the next calls if an interrupt came while they were sent. Their errors are
        raised by the calls that need their results; by all later calls, if they have none.

        Raises:
            PlaneError: the calls are of an older epoch than others before: of a control that has been replaced.
        """
        self._admit(epoch)
        for call in without_reply:
            result = self._make(call)
            if call.out is None and isinstance(result, Failure):
                self._failure = self._failure or result
        return [self._failure or self._make(call) for call in calls]

    def _admit(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise PlaneError(f"[shard] a call of epoch {epoch} came in epoch {self._epoch}: its server was replaced")
        self._epoch = epoch

    def _make(self, call: Call) -> Any:
        if call.out is not None:
            self._keep(call.out, None)  # if the call is repeated, the memory that it has taken is free again
        try:
            result = call_of(self._object(call.target), call.name, self._resolved([*call.arguments]), call.options)
        except Exception as error:
            result = Failure(error.with_traceback(None))
            error.__context__ = None  # its frames would keep vectors
        if call.out is None:
            return result
        self._keep(call.out, result)
        return result if isinstance(result, Failure) else None

    def free(self, number: int) -> None:
        """Free an object."""
        self._objects.pop(number, None)

    def make(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        """Return a new object."""
        return kind(*arguments)

    def piece(self, vector: Any, begin: int, end: int) -> Any:
        """Return some elements of a vector."""
        return on_host(vector)[begin:end]

    def _object(self, ref: Ref) -> Any:
        value = self._objects[ref.number]
        if isinstance(value, Failure):
            raise value.error
        return value

    def _keep(self, out: Any, result: Any) -> None:
        """Keep the objects of a result under the numbers in `out`."""
        if isinstance(out, int):
            self._objects[out] = result
        elif isinstance(out, dict):
            for name, each in out.items():
                self._keep(each, result[name] if isinstance(result, dict) else result)
        else:
            for i, each in enumerate(out):
                self._keep(each, result if result is None or isinstance(result, Failure) else result[i])

    def _resolved(self, argument: Any) -> Any:
        """Return an argument with objects in the place of their references."""
        if isinstance(argument, Ref):
            return self._object(argument)
        if isinstance(argument, list):
            return [self._resolved(each) for each in argument]
        if isinstance(argument, dict):
            return {name: self._resolved(each) for name, each in argument.items()}
        if isinstance(argument, tuple) and hasattr(argument, "_make"):
            return argument._make(map(self._resolved, argument))
        if isinstance(argument, RoundPlan):
            return replace(argument, slots=self._resolved(argument.slots))
        return argument
