from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final, overload

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
# bits of an element, type of rows, whether rows are encoded with a key, and whether with the least and largest element;
# how many elements are encoded together
CODECS: dict[str, tuple[int, str, bool, bool, int]]
PIECE: int  # bytes of one read-ahead request

class AffluxError(ValueError): ...
class UnavailableError(RuntimeError): ...

class Pool:
    held: int
    allocated: int
    buffer_bytes: int
    free: list[int]
    def __init__(self, size: int, dtype: str, max_buffers: int, until_read: int = 0) -> None: ...
    def lend(self, memory: object) -> None: ...

@final
class Buffer:
    dtype: str
    size: int
    def __init__(self, pool: Pool) -> None: ...
    def freeze(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Mutex:
    """A mutex for threads that knows its owner. Taking it and noting the owner is one step for signals."""

    handed_out: bool  # whether there are jobs whose results may be unpublished
    driver: int | None  # the thread that has claimed the last job
    awaited: bool  # whether threads wait to be told that something has changed
    fork: int  # the fork counter of the process that may use what the mutex guards

    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...
    def acquire(self, blocking: bool, /) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...
    @property
    def owner(self) -> int | None: ...
    @property
    def is_mine(self) -> bool: ...

class Ledger:
    """All decisions of a server, see `afflux.aggregation.admission.Admission`, which gives these methods their types.

    A decision is one call that runs no code of Python: it is made whole or not at all. Callers hold `mutex`, but for
    `push` and `join`, which take it if it is free.
    """

    @overload
    def __init__(
        self,
        # PendingArrival, Receipt, Join, Closed, ServerState, Participation
        classes: tuple[type, type, type, type, type, type],
        duplicates: str,
        max_staleness: int | None,
        flush_after: float | None,
        by_flush: bool,
        log: bool,
        reporting: bool,
        accumulates: bool,
        max_bases: int,  # versions that are held for tasks
    ) -> None: ...
    @overload
    def __init__(self, begun: Ledger) -> None: ...  # a draft of the decisions of one step
    # A Receipt; or the fields of Pushed: the vector is in its slot, not joined; or None: nothing was done.
    def push(
        self,
        client: object,
        version: object,
        update: object,
        gradient: object,
        model: object,
        num_examples: object,
        loss: object,
        /,
    ) -> Any: ...
    # For a step whose round reads the arrays where they are: the fields of Pushed; None: it is left to Python. With a
    # conversion (afflux.ops.Conversion) it reads a model.
    def lend(
        self,
        client: object,
        version: object,
        update: object,
        gradient: object,
        model: object,
        num_examples: object,
        loss: object,
        conversion: object,
        /,
    ) -> Any: ...
    # Decides about an arrival that joins, and completes no round. A Receipt; None if nothing was done. `decided` gets
    # (status, staleness, join, None, None).
    def join(
        self, pushed: tuple[Any, ...], staged_row: object, task: str | None, decided: list[Any] | None, /
    ) -> Any: ...
    # (status, staleness); the status is None if the version was not made.
    def decide(self, client: object, version: int, /) -> tuple[Any, int]: ...
    # `round`, that which the arrival completes, is (round, stepped, version, scalars, norms, report, clients that get
    # their first row). `task` is closed. `decided` gets the decision, and then the arrival that this one replaces.
    def record_decision(
        self,
        status: str,
        arrival: tuple[Any, ...],
        round: tuple[Any, ...] | None,
        task: str | None,
        decision: object,
        decided: list[Any] | None,
        /,
    ) -> None: ...
    # A push without a decision about an arrival; the status "refused": it raised an error. `task` is closed; `decided`
    # gets the receipt.
    def count_push(
        self, status: str, task: str | None, fault: object, receipt: object, decided: list[Any] | None, /
    ) -> None: ...
    # `ends_pass`: also if clients of the pass have not entered.
    def cut_buffer(self, round: tuple[Any, ...] | None, entry: object, ends_pass: bool, /) -> list[Any]: ...
    def adopt(self, draft: Ledger, /) -> None: ...
    def commit_round(
        self,
        current: object,
        version: int,
        rule_vectors: object,
        scalars: object,
        norms: object,
        report: object,
        row_clients: int,
        /,
    ) -> None: ...
    def abandon_round(self, why: str, /) -> None: ...
    def load_state(
        self,
        versions: tuple[object, int],  # the newest version and its number
        rules: tuple[object, int, object, int],  # the rule, its buffer_size, the next rule or None, its buffer_size
        rows: tuple[object, dict[Any, Any], int, int, bool] | None,  # rows, slots, clients, num_clients, reads_ahead
        waiting: list[Any],
        counted: tuple[int, dict[str, int]],  # the number of the next decision, and the counts
        log: list[Any] | None,
        vectors: tuple[object, object, object, object],  # rule_vectors, handed, scalars, norms
        passed: tuple[int, list[Any]] | None,  # N, and the clients that have entered in this pass
        /,
    ) -> list[Any]: ...  # the arrivals that waited before
    def set_rule_vectors(self, rule_vectors: object, handed: object, entry: object, /) -> None: ...
    def set_version(self, current: object, version: int, entry: object, /) -> None: ...
    def set_rule(self, rule: object, buffer_size: int, entry: object, /) -> bool: ...
    def next_report(self) -> Any: ...
    def attach(self, commit_every: int | None, /) -> None: ...
    # The first version from this one on that a round commits; None without a store, or if only checkpoints commit.
    def durable_version(self, version: int, /) -> int | None: ...
    # (kind, size, num_threads, max_abs, max_norm, the largest sum of squares, pools)
    def take_vectors(self, intake: tuple[Any, ...], /) -> None: ...
    def use_slots(self, pools: tuple[Any, ...], /) -> None: ...
    def set_replay(self, replaying: bool, by_flush: bool, /) -> None: ...
    def close(self) -> None: ...
    def open_task(
        self, opened: object, task: str, version: int, hold: bool, deadline: float, base: object, /
    ) -> None: ...
    def restore_task(
        self, opened: object, task: str, version: int, hold: bool, deadline: float, base: object, /
    ) -> None: ...
    def close_task(self, task: str, why: str, /) -> bool: ...
    def compact_task_events(self) -> None: ...
    def is_open(self, task: str, /) -> bool: ...
    def opened(self, task: str, /) -> Any: ...
    def opened_tasks(self) -> list[Any]: ...
    def next_overdue(self) -> str | None: ...
    def base(self, version: int, /) -> Any: ...
    def base_of(self, task: str, /) -> Any: ...
    def bases(self) -> dict[int, Any]: ...
    def take_base(self, version: int, /) -> Any: ...
    def put_back_base(self, version: int, base: object, /) -> None: ...
    def arrivals(self) -> list[Any]: ...
    def has_entered(self, client: object, /) -> bool: ...  # in this pass
    def fills(self, status: str, /) -> bool: ...
    @property
    def state(self) -> Any: ...  # a ServerState
    @property
    def decided_state(self) -> Any: ...  # the ServerState when `round` was decided, with a store; else None
    @property
    def has_room(self) -> bool: ...  # in the pass; and for a row, even if all waiting clients are new
    @property
    def mutex(self) -> Mutex: ...
    @property
    def current(self) -> Any: ...
    @property
    def version(self) -> int: ...
    @property
    def decided_version(self) -> int: ...  # that of the decided round, if there is one
    @property
    def rule(self) -> Any: ...
    @property
    def next_rule(self) -> Any: ...
    @property
    def rows(self) -> Any: ...
    @property
    def filled(self) -> int: ...
    @property
    def last_slot(self) -> Any: ...  # of the arrivals in the buffer
    @property
    def round(self) -> Any: ...
    @property
    def number(self) -> int: ...
    @property
    def counts(self) -> dict[str, int]: ...
    @property
    def counts_since_round(self) -> dict[str, int]: ...
    @property
    def rounds_counted(self) -> int: ...  # how often counts_since_round began anew
    @property
    def growing_log(self) -> list[Any] | None: ...
    @property
    def rule_vectors(self) -> Any: ...
    @property
    def handed(self) -> frozenset[str]: ...
    @property
    def scalars(self) -> Any: ...
    @property
    def norms(self) -> tuple[float, ...]: ...
    @property
    def in_passes(self) -> bool: ...  # whether the rule takes every client once per pass
    @property
    def left_in_pass(self) -> int: ...  # clients that have not entered yet
    @property
    def pass_clients(self) -> int | None: ...  # N, for such a rule
    @property
    def entered(self) -> list[Any]: ...  # the clients that have entered in the pass
    @property
    def late(self) -> bool: ...  # whether the buffer has held arrivals for longer than flush_after
    @property
    def replaying(self) -> bool: ...
    @property
    def by_flush(self) -> bool: ...
    @property
    def max_staleness(self) -> int | None: ...
    @property
    def unreported(self) -> bool: ...
    @property
    def faults(self) -> tuple[Any, ...]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def task_count(self) -> int: ...
    @property
    def next_deadline(self) -> float: ...
    @property
    def has_overdue_task(self) -> bool: ...

def clock() -> float: ...  # seconds, by the monotonic clock
def set_clock(seconds: float | None) -> None: ...  # stops the clock, for tests; None: it goes on
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
    beside: RowCheck | None = None,
) -> tuple[int, float, float, float]: ...
def unflatten(
    vectors: list[tuple[object, list[object], tuple[tuple[int, ...], ...], bytes]], num_threads: int, dry: bool
) -> None: ...
def shared_memory(lists: list[list[Any]]) -> tuple[int, int, int, int] | None: ...

@final
class ArrayTable:
    def __init__(
        self,
        names: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        known: frozenset[str] | None,
        places: list[int],
        longest: int,
        in_order: bool,
    ) -> None: ...
    def find(self, tree: object) -> list[Any] | None: ...
    def is_bare(self, tree: object) -> bool: ...

def all_own(values: Iterable[object]) -> bool: ...
def has_float64(arrays: list[Any]) -> bool: ...
def structure(tree: object) -> tuple[Any, ...] | None: ...
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
    def __init__(
        self,
        arrays: list[Any] | tuple[Any, ...],
        borders: Int64,
        conversion: object | None = None,  # afflux.ops.Conversion
        dtype: str | None = None,
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
uncopied: memoryview  # [0]: `CopiedInChildren` without a copy here, for want of memory: who reads them is ended

def close_in_children(descriptor: int) -> None: ...  # in each child that is forked from now on
def close_descriptor(descriptor: int) -> None: ...  # of `close_in_children`, in the process that called that only

class CopiedInChildren:  # a child that is forked has a copy of this memory, as long as the object exists at the fork
    def __init__(self, memory: object) -> None: ...

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
