"""The engine's calls: ingest, gram, inner, apply, encode, decode and checksums."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np

from afflux import _engine
from afflux._engine import PreparedPass
from afflux.ops import codecs
from afflux.ops.backends import threads
from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.stages import Array, Checksums, Float64, Pass, RowFacts
from afflux.ops.validation import any_number, brief, integer, unreadable

#: The kind of vector that a client pushes, or that a rule takes. An update is a difference of models, local minus
#: global; a gradient points uphill.
Kind = Literal["update", "gradient", "model"]


class Ingested(NamedTuple):
    """The result of one sweep over an update."""

    first_nonfinite: int | None  #: index of the first NaN or infinity; None if all values are finite
    sum_of_squares: float  #: of the written values, in float64; for a float64 slot it may overflow to +inf
    min: float  #: over all values that are not NaN; +inf when there is none
    max: float  #: over all values that are not NaN; -inf when there is none

    @property
    def norm(self) -> float:
        """The Euclidean norm (IEEE square root, hence the same bits everywhere)."""
        return sqrt(self.sum_of_squares)


class Conversion(NamedTuple):
    """A conversion of the vector that a client sends into the kind that a rule takes: update, gradient or model.

        update = model - base,       model = base + update
        gradient = -update / scale,  update = -gradient scale

    Between a gradient and a model, both conversions are made one after the other. All of it is computed in float64,
    whatever the dtypes, and rounded once, to the dtype of the slot. Before the base is subtracted, it is rounded to the
    dtype of each array of the model, if that is narrower: this is the base that the client received.
    """

    given: Kind
    wanted: Kind
    base: Array | None = None  #: (d,) float32 or float64, the client's initial params; from or to a model
    scale: float = 1.0  #: client learning rate times local steps, positive; for conversions from or to a gradient


class InnerProducts(NamedTuple):
    """The result of `inner`, in float64."""

    squares: Float64  #: (K,) <x_k, x_k>
    products: Float64 | None = None  #: (K,) <x_k, e>; None without weights
    square: float = 0.0  #: <e, e>; 0 without weights


_NO_FACTS = RowFacts()
_LIST = (list, type(None))
#: The largest number of vectors of `gram`, whose result has as many rows and columns, and of `inner`.
_MOST_VECTORS = 1 << 15


def ingest(
    update: Array | Sequence[Array], slot: Array, *, num_threads: int = 1, conversion: Conversion | None = None
) -> Ingested:
    """Write the update into the slot. Find the first non-finite value, sum of squares, min and max in the same sweep.

    The parts of a list are written one after the other, without an intermediate copy; the result is that of one long
    vector. The slot is written even when values are not finite; the caller decides whether to use it. A value beyond
    the slot's range counts as non-finite. For a bfloat16 slot, float64 values are first rounded to float32.

    Args:
        update: (d,), or a list or tuple of C-contiguous arrays of any shapes with d elements in all; float32, float64,
            float16 or bfloat16, in any mixture. It may be on the host, and the slot and the base on a GPU, which
            reads pinned memory itself.
        slot: (d,) float32, float64 or bfloat16, overwritten.
        num_threads: at least 1; one by default, because many pushes may run at once.
        conversion: converts the update while it is copied into the slot; None: a plain copy.

    Raises:
        AffluxError: wrong shape, dtype or layout, read-only slot, or overlapping memory; a conversion without the base
            or with a scale that is not positive; nothing was written.
        UnavailableError: an array is on a device that this build does not support.

    Cost: each byte of the update, and of the conversion's base, is read once; each byte of the slot is written
    once.

    >>> slot = np.empty(3, np.float32)
    >>> ingest(np.array([3.0, -4.0, 0.0]), slot).norm
    5.0
    >>> ingest([np.array([[1, 2]], np.float16), np.array(7.0)], slot).max
    7.0
    >>> slot.tolist()
    [1.0, 2.0, 7.0]
    >>> base = np.ones(3, np.float32)
    >>> ingest(np.array([3.0, 2.0, 1.0]), slot, conversion=Conversion("model", "update", base)).min
    0.0
    >>> slot.tolist()
    [2.0, 1.0, 0.0]
    """
    first, squares, low, high = _engine.ingest(update, slot, threads(num_threads, "ingest"), conversion)
    return Ingested(None if first < 0 else first, squares, low, high)


def gram(vectors: Sequence[Array], *, num_threads: int | None = None) -> Float64:
    """Return G[i, j] = <vectors[i], vectors[j]> in float64. Cosines, norms and clips can be computed from it.

    Args:
        vectors: K vectors (d,), each float32, float64 or bfloat16, flat or in Parts; fastest if vectors of one type are
            adjacent.
        num_threads: the largest number of threads; by default `default_threads()`.

    Returns:
        (K, K) float64, symmetric.

    Raises:
        AffluxError: wrong shape, dtype or layout, or more than 32,768 vectors.

    Cost: each vector is read once for K <= 64; larger K are done in panels of 64.

    >>> gram([np.array([1, 2], np.float32), np.array([3, 4], np.float32)]).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    arrays = _listed("[gram] vectors", vectors)
    out = np.empty(len(arrays) ** 2, np.float64)
    _engine.gram(arrays, out, threads(num_threads, "gram"))
    return out.reshape(len(arrays), len(arrays))


def inner(
    vectors: Sequence[Array],
    weights: Float64 | None = None,
    *,
    memory: Array | None = None,
    shift: float = 0.0,
    memory_weight: float = 0.0,
    num_threads: int | None = None,
) -> InnerProducts:
    """Return squares of vectors, and their inner products with a weighted sum of them, from one sweep.

        x_k = vectors[k] + shift * memory,  e = memory_weight * memory + sum_k weights[k] x_k

    Both are computed in float64, element by element, and each product is rounded before it is added. So no precision is
    lost if vectors nearly cancel. Combinations of the products of `gram` would lose it.

    Args:
        vectors: K vectors (d,), each float32, float64 or bfloat16, flat or in Parts; so is the memory.
        weights: (K,) float64; None: only squares are computed. A vector of weight 0 is not a part of e.
        memory: (d,) float32, float64 or bfloat16. It is read only if `shift` or `memory_weight` is not 0.
        shift: the factor of `memory` that is added to every vector.
        memory_weight: the factor of `memory` that is added to e, in addition to the memory in the x_k. There must be at
            least one vector.
        num_threads: the largest number of threads; by default `default_threads()`.

    Returns:
        In float64: `squares` (K,) of the x_k; `products` (K,) of the x_k with e, and `square` of e. Without weights
        products are None and the square is 0. Non-finite values of vectors give non-finite results.

    Raises:
        AffluxError: wrong shape, dtype or layout, a weight or factor that is not finite, a missing memory whose factor
            is not 0, or more than 32,768 vectors.

    Cost: each vector and the memory are read once. Scratch memory: at most 3 KB a vector and thread.

    >>> u = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
    >>> squares, products, square = inner(u, np.array([0.5, 0.5]))
    >>> squares.tolist(), products.tolist(), square
    ([5.0, 25.0], [8.0, 18.0], 13.0)
    """
    arrays = _listed("[inner] vectors", vectors)
    count = len(arrays)
    shift = any_number("inner", "shift", shift)
    memory_weight = any_number("inner", "memory_weight", memory_weight)
    out = np.empty(count if weights is None else 2 * count + 1, np.float64)
    _engine.inner(arrays, weights, memory, shift, memory_weight, out, threads(num_threads, "inner"))
    if weights is None:
        return InnerProducts(out)
    return InnerProducts(out[:count], out[count + 1 :], float(out[count]))


def _listed(subject: str, vectors: Sequence[Array]) -> list[Array]:
    """Return the vectors as a list. Raises AffluxError if there are too many; a sequence may report a wrong length."""
    try:
        count = len(vectors)
        arrays = [vectors[i] for i in range(min(count, _MOST_VECTORS + 1))]
    except Exception as error:
        unreadable(subject, error)
    if len(arrays) > _MOST_VECTORS:
        raise AffluxError(f"{subject} has {count} entries, at most {_MOST_VECTORS} are served")
    return arrays


def apply(
    round: Pass,
    *,
    num_threads: int | None = None,
    done: list[bool] | None = None,
    checksums: list[Checksums] | None = None,
    checked: PreparedPass | None = None,
) -> None:
    """Run one server round in one sweep: combine -> calibrate -> step.

    Everything is checked before anything is written.

    Args:
        round: the round, as data.
        num_threads: the largest number of threads; by default `default_threads()`.
        done: a list. After the sweep, one bool is appended: whether every new value of out, states and rule
            vectors is finite and within round.most, and every element of the updates that are read within
            round.combine.most. A KeyboardInterrupt may be raised between the sweep and the return of this function;
            the list then shows whether `out` was written.
        checksums: a list, to which the checksums of the written memory are appended; the same sweep computes them.
        checked: the result of `check` for this round, whose arguments are then not read again. The round must be on
            the CPU, and unchanged since.

    Raises:
        AffluxError: arguments that do not fit together, named in the message; nothing was written.
        UnavailableError: an array is on a device that this build does not support.

    Cost: reads M + 1 vectors and writes one. A cache adds M row reads, M row writes, and 8 d bytes read and written for
    the sum; each state of the step and each rule vector adds one read and one write.

    >>> from afflux.ops import Combine
    >>> params = np.zeros(2, np.float32)
    >>> updates = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
    >>> apply(Pass(params, params, Combine(updates, np.array([0.5, 0.5]))))
    >>> params.tolist()
    [2.0, 3.0]

    A model in parts, updated where it is:

    >>> from afflux.ops import Parts
    >>> weight, bias, borders = np.zeros((2, 2), np.float32), np.zeros(1, np.float32), np.array([0, 4, 5])
    >>> model, update = Parts([weight, bias], borders), Parts([weight + 1, bias + 2], borders)
    >>> apply(Pass(model, model, Combine([update], np.array([0.5]))))
    >>> weight.tolist(), bias.tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [1.0])
    """
    if not (isinstance(done, _LIST) and isinstance(checksums, _LIST)):
        name, into = ("checksums", checksums) if isinstance(done, _LIST) else ("done", done)
        raise AffluxError(f"[apply] {name} is {brief(into)}, must be a list")
    count = threads(num_threads, "apply")
    if checked is None:
        _engine.apply(round, count, done, checksums)
        return
    if type(checked) is not PreparedPass:
        raise AffluxError(f"[apply] checked is {brief(checked)}, must be the result of check")
    checked.apply(round, count, done, checksums)


def check(round: Pass) -> PreparedPass:
    """Raise the error that `apply` would raise for this round, if any. Nothing is written.

    Returns:
        An object for `apply(checked=...)`. It refers to the arrays until it is deleted, or its `release()` is called.

    >>> from afflux.ops import Combine
    >>> check(Pass(np.zeros(2), np.zeros(3), Combine([], np.array([]))))
    Traceback (most recent call last):
    afflux._engine.AffluxError: [apply] out has 3 elements, expected 2
    """
    return PreparedPass(round)


def row_bytes(size: int, *, codec: Codec | codecs.Name = codecs.float32) -> int:
    """Return the bytes of one encoded row of `size` elements."""
    return _codec(codec).row_bytes(size)


def encode(
    vector: Array,
    row: Array,
    *,
    codec: Codec | codecs.Name = codecs.float32,
    facts: RowFacts = _NO_FACTS,
    num_threads: int = 1,
) -> None:
    """Encode the vector into the row; every byte of the row is written.

    Args:
        vector: (d,) float32, or float64 for codecs.float64; finite.
        row: (row_bytes(d),) uint8, at an address that is a multiple of 8, or (d,) of the codec's type; overwritten.
        codec: one of `afflux.codecs`.
        facts: key, and for affine(scope="vector") the least and the largest element, as `ingest` returns them. Elements
            beyond this range are clipped to it.
        num_threads: at least 1.

    >>> vector, row = np.linspace(-1, 1, 5, dtype=np.float32), np.empty(row_bytes(5, codec=codecs.affine(8)), np.uint8)
    >>> encode(vector, row, codec=codecs.affine(8), facts=RowFacts(key=7))
    >>> decode(row, vector, codec=codecs.affine(8))
    >>> bool(np.all(np.abs(vector - np.linspace(-1, 1, 5)) < 2 / 255))
    True
    """
    try:
        key, low, high = facts
    except Exception as error:
        unreadable("[encode] facts", error)
    key, low, high = _a_key("encode", "key", key), any_number("encode", "low", low), any_number("encode", "high", high)
    _engine.encode(_codec(codec).name, vector, row, key, low, high, threads(num_threads, "encode"))


def decode(row: Array, vector: Array, *, codec: Codec | codecs.Name = codecs.float32, num_threads: int = 1) -> None:
    """Decode the row into the vector, which is of the type that `encode` takes.

    Raises:
        AffluxError: also for a row whose head has another codec or size.
    """
    _engine.decode(_codec(codec).name, row, vector, threads(num_threads, "decode"))


def crc32c(data: Array, block: int, *, head: int = 0, num_threads: int = 1) -> bytes:
    """Return the CRC-32C of each block of `block` bytes, as uint32 in native order. The last block may be shorter.

    Args:
        data: any C-contiguous array with the buffer protocol.
        block: bytes, at least 1; a block that is longer than the data ends with the data.
        head: number of bytes at the beginning that form a separate block; 0: none.
        num_threads: at least 1.

    Cost: each byte is read once.

    >>> crc32c(b"123456789", 9).hex(), len(crc32c(np.zeros(5, np.float32), 16))
    ('839206e3', 8)
    """
    size, first = _a_block("crc32c", "block", block), _a_head("crc32c", "head", head)
    return _engine.crc32c(data, min(size, _MOST), min(first, _MOST), threads(num_threads, "crc32c"))


_MOST = 2**63 - 1
_a_key = integer(0, 2**64 - 1)
_a_block = integer(1)
_a_head = integer(-(2**63))


def _codec(codec: Codec | codecs.Name) -> Codec:
    row_codec = codecs.named(codec)
    if row_codec is None:
        raise AffluxError("[codec] codec is None, must be one of afflux.codecs or the name of one")
    return row_codec
