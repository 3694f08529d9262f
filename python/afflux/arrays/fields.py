"""The places of a model's arrays: in the flat vector of parameters, in that of buffers, or among the constants."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from afflux._engine import all_own, unflatten, unready
from afflux.arrays.interop import (
    FLOATS,
    REAL,
    Array,
    count_writes,
    fill,
    first_overflow,
    kind_of,
    label,
    may_overlap,
    prepare,
    private_copy,
    put,
    raw_bytes,
    ready,
    require_apart,
    require_writable,
    type_of,
    types_of,
    widened,
)
from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import MOST_ELEMENTS, brief

#: The use of one array of a model:
#:
#:     trained    an element of the flat vector, to which the rule is applied
#:     statistic  averaged over the accepted arrivals, such as a running mean, a variance or a counter
#:     copied     taken whole from the accepted arrival of the largest weight: it changes, and a mean has no meaning
#:     constant   never changes; a client whose array differs is refused
#:     local      each client has its own; the server gives out its first value, and reads no client's
#:     alias      a further name of another array, as of tied weights
Role = Literal["trained", "statistic", "copied", "constant", "local", "alias"]
ROLES: tuple[Role, ...] = get_args(Role)

#: Bytes of a word of a copied array: the vector of buffers holds each word as a float64, which is exact.
WORD = 4
#: The dtype of a local object that is no array.
OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Field:
    """The place of one array: in the flat vector of the parameters, in that of the buffers, or among the constants."""

    name: str  #: dotted path, as "encoder.0.weight"; empty if the tree is a single array
    shape: tuple[int, ...]
    start: int  #: an element of its vector; for a constant or a local array a byte
    dtype: str | None = None  #: None for parameters
    role: Role = "trained"
    nbytes: int = 0  #: of a constant, a local or a copied array; 0 for a local object that is no array

    @property
    def stop(self) -> int:
        """One past the last element."""
        if self.role == "copied":
            return self.start + -(-self.nbytes // WORD)
        return self.start + (prod(self.shape) if self.role in ("trained", "statistic") else self.nbytes)


class Places:
    """Fields that follow each other in one vector, with what the engine checks of their arrays."""

    __slots__ = ("_slices", "checks", "fields", "shapes")

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        self.shapes = tuple(field.shape for field in self.fields)
        # 1 for each array that is one of integers or bools in the layout; others are never rounded to integers
        self.checks = self.shapes, bytes(field.dtype not in (None, *FLOATS) for field in self.fields)
        start = self.fields[0].start if self.fields else 0
        self._slices = [slice(field.start - start, field.stop - start) for field in self.fields]

    def pieces(self, vector: Any) -> Iterator[tuple[Field, Any]]:
        """Yield each field, with a view of its values in a vector that begins with the first field."""
        for field, place, shape in zip(self.fields, self._slices, self.shapes, strict=True):
            yield field, vector[place].reshape(shape)


class Write(NamedTuple):
    """Arrays, and the vector whose elements they get, one array after the other."""

    places: Places
    vector: Any
    arrays: list[Array]


class Overwrite(NamedTuple):
    """An array of any dtype that `require_writable` has checked, and its values, which need no rounding."""

    name: str
    array: Array
    values: Array


#: Name, shape, dtype, role and bytes of an array.
FieldFacts = tuple[str, Iterable[int], str | None, Role, int]


@dataclass(frozen=True, slots=True)
class Alias:
    """A further name of an array."""

    name: str
    of: str  #: the array's name in the layout
    carried: bool = True  #: whether trees that go out have it; else it is only a name that pushed trees may use


def placed(arrays: Iterable[FieldFacts], start: int = 0) -> tuple[Field, ...]:
    """Return the fields of arrays that lie one after the other in their vector.

    Raises:
        AffluxError: it would be too long.
    """
    fields = []
    for name, shape, dtype, role, nbytes in arrays:
        fields.append(Field(name, tuple(shape), start, dtype, role, nbytes))
        start = fields[-1].stop
        if start > MOST_ELEMENTS:
            raise AffluxError(f"[layout] {label(name)} of shape {brief(shape)} makes the model's vector too long")
    return tuple(fields)


def fields_of(arrays: Mapping[str, Array], roles: Mapping[str, Role]) -> tuple[tuple[Field, ...], ...]:
    """Return the fields of the parameters, statistics, copied arrays, constants and local arrays.

    Raises:
        AffluxError: a parameter or buffer has a dtype that is no real number, or a shape is invalid or too large.
    """
    rows: dict[Role, list[FieldFacts]] = {role: [] for role in ROLES}
    for name, array in arrays.items():
        role = roles[name]
        apart = role in ("constant", "local")
        if role == "local" and not has_bytes(array):
            rows[role].append((name, (), OBJECT, role, 0))
            continue
        kind, shape = (type_of if apart else kind_of)(name, array), tuple(map(int, array.shape))
        if any(n < 0 for n in shape):
            raise AffluxError(f"[layout] {label(name)} has shape {shape}, which is not a valid shape")
        nbytes = raw_bytes(name, array).size if apart or role == "copied" else 0
        rows[role].append((name, shape, None if role == "trained" else kind, role, nbytes))
    statistics, constants = placed(rows["statistic"]), placed(rows["constant"])
    copied = placed(rows["copied"], statistics[-1].stop if statistics else 0)
    local = placed(rows["local"], constants[-1].stop if constants else 0)
    return placed(rows["trained"]), statistics, copied, constants, local


def to_words(field: Field, array: Array) -> npt.NDArray[np.float64]:
    """Return the bytes of a copied array as 32-bit words in float64; the last word is padded with zeros.

    Floats of another precision are rounded to that of the field.
    """
    kind = kind_of(field.name, array)
    if kind != field.dtype:
        if not {kind, field.dtype} <= FLOATS or field.dtype == "bfloat16":
            raise AffluxError(f"[layout] {label(field.name)} is {kind}, expected {field.dtype}: it is copied whole")
        values = np.empty(prod(field.shape), np.float64)
        fill(values, [field.name], [ready(field.name, array)])
        array = values.astype(str(field.dtype))
    raw = raw_bytes(field.name, array)
    words = np.zeros(field.stop - field.start, np.uint32)
    words.view(np.uint8)[: raw.size] = raw
    return words.astype(np.float64)


def from_words(field: Field, buffers: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """Return the copied array in a vector of buffers; bfloat16 as float32, which holds the same values."""
    raw = buffers[field.start : field.stop].astype(np.uint32).view(np.uint8)[: field.nbytes]
    if field.dtype == "bfloat16":
        return widened(raw.view(np.uint16)).reshape(field.shape)
    return raw.view(str(field.dtype)).reshape(field.shape)


def check_copied(subject: str, fields: Iterable[Field], buffers: npt.NDArray[np.float64]) -> None:
    """Check the copied arrays in a vector of buffers; `subject` names it in messages.

    Raises:
        AffluxError: an array is not in words, or has a NaN.
    """
    for field in fields:
        words = buffers[field.start : field.stop]
        if not ((words >= 0) & (words < 2.0**32) & (words == np.rint(words))).all():
            raise AffluxError(f"{subject} has no 32-bit words in {field.name}, which is copied whole")
        values = from_words(field, buffers)
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise AffluxError(f"{subject} has a NaN in {field.name}")


def write_of(field: Field, array: Array, vector: Any) -> Write | Overwrite:
    """Return the write of one array's values in its vector, which for a copied array is that of the buffers.

    Raises:
        AffluxError: a copied array of integers or bools has another shape, or cannot be written.
    """
    if field.role != "copied":
        return Write(Places([field]), vector[field.start : field.stop], [array])
    values = from_words(field, vector)
    if field.dtype not in FLOATS:
        require_writable(field.name, array, field.shape)
        return Overwrite(field.name, array, values)
    wide = values.astype(np.float64 if field.dtype == "float64" else np.float32).reshape(-1)
    return Write(Places([replace(field, role="statistic", start=0)]), wide, [array])


def write_all(
    writes: Sequence[Write | Overwrite], *, num_threads: int = 1, check: bool = False, finite: bool = False
) -> None:
    """Write into all arrays, or into none if one cannot be written, or with `check`.

    Arrays of numbers on the host that lie in one piece are checked and written by one call of the engine, the others
    one by one.

    Raises:
        AffluxError: see `interop.prepare`; or two arrays overlap; or, with `finite`, a finite value would be rounded to
            an infinite one.
    """
    overwrites = [write for write in writes if isinstance(write, Overwrite)]
    parts = [write for write in writes if isinstance(write, Write) and write.arrays]
    if finite:
        for part in parts:
            _require_range(part)
        for target in overwrites:
            _require_fit(target.name, target.array, target.values)
    dense, unready_parts = parts, list[Write]()
    if not _written_by_engine(parts, num_threads, check=check or bool(overwrites)):
        dense, unready_parts = _dense_and_others(parts)
        if not dense or not _written_by_engine(dense, num_threads, check=True):
            dense, unready_parts = [], parts
    assignments = []
    for part in unready_parts:
        for (field, values), array in zip(part.places.pieces(part.vector), part.arrays, strict=True):
            integers = field.dtype not in (None, *FLOATS)
            assignments.append((array, prepare(field.name, array, values, integers=integers)))
    if overwrites or unready_parts:
        pairs = chain(*(zip(part.places.fields, part.arrays, strict=True) for part in parts))
        targets = [(field.name, array) for field, array in pairs]
        spans = require_apart([*targets, *((target.name, target.array) for target in overwrites)])
        if not check and any(may_overlap(part.vector, spans) for part in parts):
            assignments = [(array, private_copy(values)) for array, values in assignments]
        if not check and dense and not _written_by_engine(dense, num_threads, check=False):
            raise AffluxError("[layout] an array has changed while others were checked")
    assignments += [(target.array, target.values) for target in overwrites]
    for array, values in () if check else assignments:
        put(array, values)


def _require_range(write: Write) -> None:
    """Raise AffluxError if a finite value would be rounded to an infinite one in the dtype of its array."""
    if types_of(write.arrays) == {type_of("", write.vector)}:
        return
    for (field, values), array in zip(write.places.pieces(write.vector), write.arrays, strict=True):
        _require_fit(field.name, array, values)


def _require_fit(name: str, array: Array, values: Array) -> None:
    value = first_overflow(values, type_of(name, array))
    if value is not None:
        raise AffluxError(f"[layout] {label(name)} is {type_of('', array)}, which cannot hold {value:g}")


def _dense_and_others(writes: Iterable[Write]) -> tuple[list[Write], list[Write]]:
    """Divide writes into those of arrays that the engine may take, and the others."""
    parts: tuple[list[Write], list[Write]] = [], []
    for write in writes:
        fields, begin = write.places.fields, 0
        unready_indices = {*unready(write.arrays, write.places.shapes)}
        for is_unready, run in groupby(range(len(fields)), unready_indices.__contains__):
            end = begin + len([*run])
            places = fields[begin:end]
            vector = write.vector[places[0].start - fields[0].start : places[-1].stop - fields[0].start]
            parts[is_unready].append(Write(Places(places), vector, write.arrays[begin:end]))
            begin = end
    return parts


def _written_by_engine(writes: Sequence[Write], num_threads: int, *, check: bool) -> bool:
    """Write by one call of the engine. Return False if it does not take one of the arrays; nothing is written then."""
    arrays = [array for write in writes for array in write.arrays]
    if not all_own(arrays) or not all(type(write.vector) is np.ndarray for write in writes):
        return False
    try:
        unflatten([(write.vector, write.arrays, *write.places.checks) for write in writes], num_threads, check)
    except (AffluxError, UnavailableError):  # the caller finds the reason
        return False
    if not check:
        count_writes(arrays)
    return True


#: The fields of parameters, of statistics, of copied arrays, of constants and local arrays; and the aliases.
LayoutParts = tuple[tuple[Field, ...], tuple[Field, ...], tuple[Field, ...], tuple[Field, ...], tuple[Alias, ...]]


def from_json(data: Mapping[str, Any], leaves: list[str]) -> LayoutParts:
    """Return the parts of the layout that `Layout.to_json` has converted. `leaves` are the names of its nesting.

    Raises:
        Exception: `data` does not come from `Layout.to_json`.
    """
    fields = placed((name, shape, None, "trained", 0) for name, shape in data["fields"])
    buffers = placed((*field, "statistic", 0) for field in data["buffers"])
    other_fields = list(data["others"])
    copied = placed((entry for entry in other_fields if entry[3] == "copied"), buffers[-1].stop if buffers else 0)
    apart = placed(entry for entry in other_fields if entry[3] != "copied")
    aliases = tuple(Alias(*entry) for entry in list(data["tied"]))
    all_fields = (*fields, *buffers, *copied, *apart)
    names = {field.name for field in all_fields}
    sound = (
        all(type(n) is int and n >= 0 for field in all_fields for n in (*field.shape, field.nbytes))
        and all(field.dtype in REAL for field in (*buffers, *copied))
        and all(type(field.dtype) is str and field.role in ("constant", "local") for field in apart)
        and len(names) == len(all_fields)
        and all(type(a.name) is str and a.name not in names and type(a.carried) is bool for a in aliases)
        and all(a.of in names for a in aliases)
        and len({a.name for a in aliases}) == len(aliases)
        and type(data["tied"]) is list
    )
    carried = {alias.name for alias in aliases if alias.carried}
    if not sound or len(set(leaves)) != len(leaves) or not names <= set(leaves) <= names | carried:
        raise ValueError("a shape, dtype, role or name is wrong")
    return fields, buffers, copied, apart, aliases


def has_bytes(value: object) -> bool:
    """Return whether a local value is an array whose bytes can be kept."""
    dtype = getattr(value, "dtype", None)
    return hasattr(value, "shape") and dtype is not None and not str(dtype).startswith(("key<", OBJECT))
