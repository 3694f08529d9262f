"""The engine's operations over arrays of any library: NumPy, torch, CuPy, JAX (buffer protocol or DLPack).

Nothing is copied: the engine works on the caller's memory. Every vector is flat and contiguous, and float32, float64 or
bfloat16 (from torch or JAX, or an `_engine.Buffer`: NumPy has none); float64 is used inside. Results are the same bit
for bit on any number of threads and any instruction set.

All vectors of a call lie on one device, the CPU or a GPU (torch, CuPy), and it runs there: on a GPU on the current
stream of the library that the first of them comes from, which is waited for where something is returned. Weights,
coefficients and the products of `gram` lie on the CPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux import _engine, codecs
from afflux.codecs import Codec
from afflux.errors import AffluxError

Array = object  # anything with the buffer protocol or __dlpack__; the engine checks it
Float64 = npt.NDArray[np.float64]


class Ingested(NamedTuple):
    """What one sweep over an update found."""

    first_nonfinite: int | None  #: index of the first NaN or infinity; None if all values are finite
    sum_of_squares: float  #: of the values written, in float64; a float64 slot's may overflow to +inf
    min: float  #: over all values that are not NaN; +inf when there is none
    max: float  #: likewise; -inf when there is none

    @property
    def norm(self) -> float:
        """The Euclidean norm (IEEE square root, hence the same bits everywhere)."""
        return sqrt(self.sum_of_squares)


@dataclass(frozen=True, slots=True)
class Combine:
    """Stage 1: v = params_weight * params + sum_i weights[i] * updates[i].

    The sum runs in the given order in float64. An update whose weight is 0 is not read.
    """

    updates: Sequence[Array]  #: M vectors (d,), all float32, all float64 or all bfloat16
    weights: Float64  #: (M,) float64
    params_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Up to 4 vectors that the server keeps: their part in stage 1, and what becomes of them in the same sweep.

    v = params_weight * params + sum_s weights[s] * vectors[s] + sum_i combine.weights[i] * updates[i], in this order.
    Then, with the old values on the right, vectors[s] = sum_t next[s, t] * vectors[t] + sum_i next[s, R+i] *
    updates[i], rounded once; the updates are the raw ones whatever the calibration. A vector whose coefficient in a
    sum is 0 is not read for it. A vector whose row of `next` is 1 at itself and 0 elsewhere is not written.
    """

    vectors: Sequence[Array]  #: R vectors (d,) of the type of params, overwritten
    weights: Float64  #: (R,) float64
    next: Float64 | None = None  #: (R, R+M) float64, C-contiguous; None: the vectors stay
    #: R vectors that take the new values, if `next` is given; each is vectors[s] itself or lies apart. Empty: in place
    outs: Sequence[Array] = ()


class RowFacts(NamedTuple):
    """What a vector is encoded with."""

    key: int = 0  #: of the random bits, 64 of them: another one for every row that is ever stored
    low: float = 0.0  #: the least element, for affine(scope="vector")
    high: float = 0.0  #: the largest


_NO_FACTS = RowFacts()


@dataclass(frozen=True, slots=True)
class _Cached:
    """The clients' cached rows and their sum."""

    sum: Array  #: (d,) float64, overwritten
    num_clients: int
    #: M rows, encoded: as (d,) of the codec's type if it has one, or their bytes as uint8; None: all zeros, not read
    rows: Sequence[Array | None]
    new_rows: Sequence[Array | None]  #: M rows, overwritten; None: the row is kept. May be rows[i] itself
    codec: Codec | None = None  #: of all rows; None: float64 where the updates are float64, else float32
    facts: "Sequence[RowFacts]" = ()  #: M, for codecs that are keyed: what each new row is encoded with
    quantize_direction: bool = False  #: v uses the new row decoded in the place of the update
    sum_out: Array | None = None  #: (d,) float64, takes the new sum, while `sum` is only read; None: in place


@dataclass(frozen=True, slots=True)
class CachedDifference(_Cached):
    """Stage 2 of CA2FL (Algorithm 2): v += sum/num_clients + sum_i weights[i] * (updates[i] - rows[i]).

    Replaces the weighted sum of stage 1; rows[i] is meant decoded. For each i with a new row: new_rows[i] = updates[i]
    encoded, sum += new_rows[i] - rows[i], both decoded. `sum` is the float64 sum of all clients' rows, kept exact to
    rounding; `sum` (or `sum_out`) and `new_rows` are overwritten.
    """


@dataclass(frozen=True, slots=True)
class CachedMean(_Cached):
    """Stage 2 of AFA-CS: first rows and sum as in CachedDifference, then v += sum/num_clients.

    Replaces the weighted sum of stage 1, whose weights play no role; an update without a new row is not read. `sum`
    and `new_rows` are overwritten.
    """


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stage 3: out = params + lr * v, rounded once to the type of out."""

    lr: float = 1.0


@dataclass(frozen=True, slots=True)
class Momentum:
    """Stage 3: m = beta * m + v, out = params + lr * m. One state: m.

    The step uses the float64 m, which is then rounded once to its type.
    """

    lr: float
    beta: float = 0.9


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Stage 3: m = beta1 * m + (1-beta1) * d, out = params + lr * m / (sqrt(V) * root_scale + epsilon), d = direction.

    | kind      | second moment                                    | V     | states      |
    |-----------|--------------------------------------------------|-------|-------------|
    | "adam"    | v = beta2 * v + (1-beta2) * d * d                | v     | m, v        |
    | "amsgrad" | as adam; v_hat = max(v_hat, v)                   | v_hat | m, v, v_hat |
    | "adagrad" | v = v + d * d                                    | v     | m, v        |
    | "yogi"    | v = v - (1-beta2) * d * d * sign(v - d * d)      | v     | m, v        |

    All in float64, from the states as they are stored; the step uses the unrounded m and V, then each is rounded once.
    """

    kind: Literal["adam", "amsgrad", "adagrad", "yogi"]
    lr: float
    beta1: float  #: 0 <= beta1 < 1
    beta2: float  #: likewise; of no use to adagrad
    epsilon: float  #: at least 0
    root_scale: float = 1.0


Step = Sgd | Momentum | Adaptive


@dataclass(frozen=True, slots=True)
class Pass:
    """One server round as data. `out` may be `params` itself; other overlaps with what is written are refused."""

    params: Array  #: (d,) float32 or float64, read
    out: Array  #: (d,) of the same type, overwritten
    combine: Combine
    calibrate: CachedDifference | CachedMean | None = None
    step: Step = field(default_factory=Sgd)
    states: Sequence[Array] = ()  #: the step's vectors (d,) of the type of params, overwritten
    memory: Memory | None = None
    #: as many vectors that take the new states; each is states[i] itself or lies apart. Empty: in place
    states_out: Sequence[Array] = ()


#: CRC-32C of what a sweep has written, of each superblock as by `crc32c`: out, sum, each row (of its head first; empty:
#: it was kept), the step's states, memories (none where they stay).
Checksums = tuple[bytes, bytes, list[bytes], list[bytes], list[bytes]]


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the operations."""

    name: str  #: "avx512", "avx2", "baseline", "neon" or "cuda"
    device: str  #: "cpu" or "cuda"
    compiled: bool
    runs: bool
    chosen: bool
    why_not: str  #: empty if it runs


def default_threads() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(num_threads: int | None) -> int:
    """`num_threads`, Python's int or NumPy's, or all CPUs for None."""
    if type(num_threads) is int:
        return num_threads
    if num_threads is None:
        return default_threads()
    if isinstance(num_threads, bool) or not isinstance(num_threads, int | np.integer):
        raise AffluxError(f"num_threads is {num_threads!r}, must be an int of at least 1")
    return int(num_threads)


def ingest(update: Array | Sequence[Array], slot: Array, *, num_threads: int = 1) -> Ingested:
    """Slot = update; finds the first non-finite value, the sum of squares, min and max in the same sweep.

    The parts of a list are laid one after the other, without a copy between, and the result is that of one long vector.
    The slot is written even when values are not finite: whether to use it is the caller's decision. A value beyond the
    slot's range counts as non-finite. bfloat16 is rounded from float32, and float64 to float32 before.

    Args:
        update: (d,), or a list or tuple of C-contiguous arrays of any shapes with d elements in all; float32, float64,
            float16 or bfloat16, mixed as you like.
        slot: (d,) float32, float64 or bfloat16, overwritten.
        num_threads: at least 1; one by default, because many pushes may run at once.

    Raises:
        AffluxError: wrong shape, dtype or layout, read-only slot, or overlapping memory; nothing was written.
        UnavailableError: an array on a device that this build does not serve.

    Cost: each byte of the update read once, each of the slot written once.

    >>> slot = np.empty(3, np.float32)
    >>> ingest(np.array([3.0, -4.0, 0.0]), slot).norm
    5.0
    >>> ingest([np.array([[1, 2]], np.float16), np.array(7.0)], slot).max
    7.0
    >>> slot.tolist()
    [1.0, 2.0, 7.0]
    """
    first, squares, low, high = _engine.ingest(update, slot, threads(num_threads))
    return Ingested(None if first < 0 else first, squares, low, high)


def gram(vectors: Sequence[Array], *, num_threads: int | None = None) -> Float64:
    """G[i, j] = <vectors[i], vectors[j]> in float64: all that cosines, norms and clips need.

    Args:
        vectors: K vectors (d,), each float32, float64 or bfloat16; fastest where equal types are neighbours.
        num_threads: at most so many; all CPUs of this process by default.

    Returns:
        (K, K) float64, symmetric.

    Raises:
        AffluxError: wrong shape, dtype or layout.

    Cost: each vector is read once for K <= 64; larger K are done in panels of 64.

    >>> gram([np.array([1, 2], np.float32), np.array([3, 4], np.float32)]).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    out = np.empty(len(vectors) ** 2, np.float64)
    _engine.gram(vectors, out, threads(num_threads))
    return out.reshape(len(vectors), len(vectors))


def apply(
    round: Pass,
    *,
    num_threads: int | None = None,
    done: list[bool] | None = None,
    checksums: list[Checksums] | None = None,
) -> None:
    """One server round in one sweep: combine -> calibrate -> step, tile by tile.

    Everything is checked before anything is written.

    Args:
        round: what to do.
        num_threads: at most so many; all CPUs of this process by default.
        done: once the sweep was made, it is appended whether the direction was finite, which it is not where an update
            that was read holds an infinity or a NaN, or where the sum overflows. A KeyboardInterrupt may be raised
            between the sweep and the return of this function; the list then tells whether `out` was written.
        checksums: likewise those of what was written are appended, taken in the same sweep.

    Raises:
        AffluxError: arguments that do not fit together, named in the message; nothing was written.
        UnavailableError: an array on a device that this build does not serve.

    Cost: reads M + 1 vectors and writes one. A cache adds M row reads, M row writes, and 8 d bytes read and written for
    the sum; each state of the step and each memory adds one read and one write.

    >>> params = np.zeros(2, np.float32)
    >>> updates = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
    >>> apply(Pass(params, params, Combine(updates, np.array([0.5, 0.5]))))
    >>> params.tolist()
    [2.0, 3.0]
    """
    _apply(round, threads(num_threads), done, checksums, dry=False)


def check(round: Pass) -> None:
    """Raises what `apply` would raise for this round; writes nothing.

    >>> check(Pass(np.zeros(2), np.zeros(3), Combine([], np.array([]))))
    Traceback (most recent call last):
    afflux._engine.AffluxError: [apply] out has 3 elements, expected 2
    """
    _apply(round, 1, None, None, dry=True)


def _apply(
    round: Pass, num_threads: int, done: list[bool] | None, checksums: list[Checksums] | None, *, dry: bool
) -> None:
    combine = round.combine
    _engine.apply(
        round.params,
        round.out,
        (combine.updates, combine.weights, combine.params_weight),
        None if round.calibrate is None else _calibrate(round.calibrate),
        _step(round.step, round.states, round.states_out),
        None if round.memory is None else _memory(round.memory, len(combine.updates)),
        num_threads,
        done,
        checksums,
        dry,
    )


def _calibrate(
    cache: CachedDifference | CachedMean,
) -> tuple[
    str,
    Array,
    Array | None,
    int,
    Sequence[Array | None],
    Sequence[Array | None],
    str | None,
    Sequence[tuple[int, float, float]],
    bool,
]:
    kind = "cached_mean" if isinstance(cache, CachedMean) else "cached_difference"
    codec = None if cache.codec is None else cache.codec.name
    places, rows = (cache.sum, cache.sum_out), (cache.rows, cache.new_rows)
    return kind, *places, cache.num_clients, *rows, codec, cache.facts, cache.quantize_direction


def _step(
    step: Step, states: Sequence[Array], outs: Sequence[Array]
) -> tuple[str, float, float, float, float, float, Sequence[Array], Sequence[Array]]:
    match step:
        case Sgd(lr):
            return "sgd", lr, 0.0, 0.0, 0.0, 1.0, states, outs
        case Momentum(lr, beta):
            return "momentum", lr, beta, 0.0, 0.0, 1.0, states, outs
        case Adaptive(kind, lr, beta1, beta2, epsilon, root_scale):
            return kind, lr, beta1, beta2, epsilon, root_scale, states, outs


def _memory(memory: Memory, count: int) -> tuple[Sequence[Array], Sequence[Array], Float64, Float64 | None]:
    expected = len(memory.vectors), len(memory.vectors) + count
    if memory.next is not None and memory.next.shape != expected:
        raise AffluxError(f"[apply] memory.next has shape {memory.next.shape}, expected {expected}")
    return memory.vectors, memory.outs, memory.weights, memory.next


def row_bytes(size: int, *, codec: Codec | codecs.Name = codecs.float32) -> int:
    """Bytes of one encoded row of `size` elements."""
    return codecs.named(codec).row_bytes(size)


def encode(
    vector: Array,
    row: Array,
    *,
    codec: Codec | codecs.Name = codecs.float32,
    facts: RowFacts = _NO_FACTS,
    num_threads: int = 1,
) -> None:
    """Row = vector, encoded; every byte of the row is written.

    Args:
        vector: (d,) float32, or float64 for codecs.float64; finite.
        row: (row_bytes(d),) uint8, at an address that is a multiple of 8, or (d,) of the codec's type; overwritten.
        codec: one of `afflux.codecs`.
        facts: key, and for affine(scope="vector") the least and the largest element, such as `ingest` finds; what lies
            beyond them becomes them.
        num_threads: at least 1.

    >>> vector, row = np.linspace(-1, 1, 5, dtype=np.float32), np.empty(row_bytes(5, codec=codecs.affine(8)), np.uint8)
    >>> encode(vector, row, codec=codecs.affine(8), facts=RowFacts(key=7))
    >>> decode(row, vector, codec=codecs.affine(8))
    >>> bool(np.all(np.abs(vector - np.linspace(-1, 1, 5)) < 2 / 255))
    True
    """
    _engine.encode(codecs.named(codec).name, vector, row, *facts, threads(num_threads))


def decode(row: Array, vector: Array, *, codec: Codec | codecs.Name = codecs.float32, num_threads: int = 1) -> None:
    """Vector = row, decoded. The vector, of the type that `encode` takes, is overwritten.

    Raises:
        AffluxError: also for a row whose head says another codec or size.
    """
    _engine.decode(codecs.named(codec).name, row, vector, threads(num_threads))


def crc32c(data: Array, block: int, *, head: int = 0, num_threads: int = 1) -> bytes:
    """The CRC-32C of each block of `block` bytes, the last one perhaps shorter: uint32 in native order.

    Args:
        data: any C-contiguous array with the buffer protocol.
        block: bytes, at least 1.
        head: bytes that come before the first block, as a block of their own, if there are some.
        num_threads: at least 1.

    Cost: each byte read once.

    >>> crc32c(b"123456789", 9).hex(), len(crc32c(np.zeros(5, np.float32), 16))
    ('839206e3', 8)
    """
    return _engine.crc32c(data, block, head, threads(num_threads))


def backends() -> list[Backend]:
    """What was compiled, what runs on this machine, and what is chosen; best first."""
    return [Backend(*entry) for entry in _engine.backends()]


def choose_isa(name: str) -> None:
    """Use this instruction set in all later calls of this process (the environment's AFFLUX_ISA does so at the start).

    Raises:
        UnavailableError: the name is unknown, or this CPU cannot run it.
    """
    _engine.choose_isa(name)
