from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_T = TypeVar("_T")
_R = TypeVar("_R")

__version__: str
ORDER_VERSION: int
LANES: int
BLOCK: int
SUPERBLOCK: int
MOST_RULE_VECTORS: int
STEP_KINDS: dict[str, int]  # the number of states of each kind
# bits of an element, type of rows, whether rows are encoded with a key, and whether with the least and largest element
CODECS: dict[str, tuple[int, str, bool, bool]]
PIECE: int  # bytes of one read-ahead request

class AffluxError(ValueError): ...
class UnavailableError(RuntimeError): ...

class Pool:
    held: int
    allocated: int
    buffer_bytes: int
    free: list[int]
    damaged: list[int]
    def __init__(self, size: int, dtype: str, max_buffers: int, checked: bool = False, until_read: int = 0) -> None: ...
    def lend(self, memory: object) -> None: ...

@final
class Buffer:
    dtype: str
    size: int
    checksum: int | None
    is_lent: bool
    vector: object  # the lent vector, else None
    def __init__(self, pool: Pool) -> None: ...
    @staticmethod
    def lent(vector: object, size: int, dtype: str, gpu: int) -> Buffer: ...
    def freeze(self, tag: int = 0) -> None: ...
    def intact(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class FastPush:
    """The fast path of one server's most frequent pushes, without Python's frames: a vector that needs no conversion
    joins a buffer and does not fill it. All other pushes are left to Python.
    """

    def __init__(
        self,
        # ServerState, PendingArrival, Receipt, Join, Closed, ClientError
        classes: tuple[type, type, type, type, type, type],
        kind: str,  # of the vectors that the rule takes
        size: int,
        num_threads: int,  # of the sweep that copies a vector
        max_abs: float,
        max_norm: float,
        most_squares: float,
        max_staleness: int | None,
        both_count: bool,  # whether a client may have several arrivals in a buffer
    ) -> None: ...
    def push(
        self,
        aggregator: object,
        client: object,
        version: object,
        update: object,
        gradient: object,
        model: object,
        num_examples: object,
        loss: object,
        /,
    ) -> Any:  # a Receipt; or the fields of Pushed: the vector is in its slot, not joined; or None: nothing was done
        ...
    def join(
        self,
        aggregator: object,
        pushed: tuple[Any, ...],
        ticket: object,  # the push's Ticket, which gets the decision, or None
        /,
    ) -> Any:  # a Receipt; None if nothing was done
        ...

def columns(
    arrivals: list[Any],  # PendingArrival
    version: int,  # of the server
    # The clients' ids; and read-only (M,): versions, staleness, num_examples, losses, norms, local_steps, joins.
) -> tuple[tuple[Any, ...], Int64, Int64, Int64, Float64, Float64, Int64, Int64]: ...
def ingest(
    update: object,
    slot: object,
    num_threads: int,
    conversion: tuple[str, str, object, float] | None = None,  # afflux.ops.Conversion
    shapes: tuple[tuple[int, ...], ...] | None = None,  # of the parts; others are refused
    beside: RowCheck | None = None,
) -> tuple[int, float, float, float]: ...
def unflatten(
    vectors: list[tuple[object, list[object], tuple[tuple[int, ...], ...], bytes]], num_threads: int, dry: bool
) -> None: ...
def unready(arrays: list[object], shapes: tuple[tuple[int, ...], ...]) -> list[int]: ...
def gram(vectors: Sequence[object], out: object, num_threads: int) -> None: ...
def inner(
    vectors: Sequence[object],
    weights: object | None,
    memory: object | None,
    shift: float,
    memory_weight: float,
    out: object,
    num_threads: int,
) -> None: ...
def apply(
    round: object,  # afflux.ops.Pass, read by attribute name
    num_threads: int,
    done: list[bool] | None = None,
    # out, sum, rows, states, rule vectors
    checksums: list[tuple[bytes, bytes, list[bytes], list[bytes], list[bytes]]] | None = None,
) -> None: ...

class Parts:
    """A vector in parts, one for each array of a model; see `afflux.ops`."""

    arrays: tuple[object, ...]
    borders: list[int]
    conversion: object | None
    dtype: str | None
    is_lent: bool  # whether one of the arrays is a lent Buffer
    def __init__(
        self,
        arrays: list[Any] | tuple[Any, ...],
        borders: Int64,
        conversion: object | None = None,  # afflux.ops.Conversion
        dtype: str | None = None,
        shapes: tuple[tuple[int, ...], ...] | None = None,
    ) -> None: ...

class PreparedPass:
    """A checked round on the CPU. It refers to its arrays until `release`."""

    def __init__(self, round: object) -> None: ...  # afflux.ops.Pass
    def apply(
        self,
        round: object,  # that of the constructor
        num_threads: int,
        done: list[bool] | None,
        checksums: list[tuple[bytes, bytes, list[bytes], list[bytes], list[bytes]]] | None = None,
    ) -> None: ...
    def release(self) -> None: ...

forks: memoryview  # [0]: forks between the process that loaded the engine first and this one
children: memoryview  # [0]: forks by this process

def close_in_children(descriptor: int) -> None: ...  # in each child that is forked from now on
def close_descriptor(descriptor: int) -> None: ...  # of `close_in_children`, in the process that called that only
def strict_float_mode(function: Callable[[_T], _R], argument: _T) -> _R: ...
def row_bytes(codec: str, size: int) -> int: ...
def encode(codec: str, vector: object, row: object, key: int, low: float, high: float, num_threads: int) -> None: ...
def decode(codec: str, row: object, vector: object, num_threads: int) -> None: ...
def exp(x: float) -> float: ...
def log(x: float) -> float: ...
def pow(x: float, y: float) -> float: ...

class RowCheck:
    """Reads a row in a mapped file, and verifies its checksums, in parallel with an `ingest`."""

    sound: bool  # false until the row was found to have these checksums
    def __init__(self, memory: object, block: int, head: int, checksums: bytes, num_threads: int) -> None: ...

def crc32c(data: object, block: int, head: int, num_threads: int, table: bool = False) -> bytes: ...
def prefetch(memory: object) -> None: ...
def address(memory: object) -> int: ...
def populate(memory: object, write: bool) -> int: ...
def first_changed(files: Sequence[tuple[bytes, int, int]]) -> int: ...  # path, inode, least bytes; -1 if none changed
def detach(memory: object) -> None: ...
def backends() -> list[tuple[str, str, bool, bool, bool, str]]: ...
def choose_isa(name: str) -> None: ...
def policy() -> str: ...
def cpu_quota(root: str = "") -> int: ...  # 0: none
def choose_policy(text: str) -> None: ...
def processor_family() -> str: ...
