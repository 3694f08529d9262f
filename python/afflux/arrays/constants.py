"""The constants and local arrays of a server's model: kept once for all versions, compared with clients' arrays."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.arrays.fields import OBJECT, Field, Overwrite
from afflux.arrays.interop import Array, as_torch, check_shape, immutable_copy, label, raw_bytes, require_writable
from afflux.arrays.likeness import Like
from afflux.ops.errors import AffluxError

Bytes = npt.NDArray[np.uint8]


class Constants:
    """The values of the fields in `Layout.others` that are constants or local.

    A local object that is no array is kept as it is; it is neither in a store nor in a saved state.
    """

    def __init__(self, fields: Sequence[Field] = (), leaves: Mapping[str, Any] | None = None) -> None:
        """Copy the values of `fields` from `leaves`, the arrays of the server's first params by name."""
        self._fields = tuple(fields)
        self._likes: dict[str, Like] = {}
        self._objects: dict[str, Any] = {}
        self._bytes: dict[str, Bytes] = {}
        if leaves is None:
            return
        for field in self._fields:
            array = leaves[field.name]
            if field.dtype == OBJECT:
                self._objects[field.name] = deepcopy(array)
            else:
                self._bytes[field.name] = immutable_copy(raw_bytes(field.name, array))
                self._likes[field.name] = Like.of(field.name, array)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(field.nbytes for field in self._fields)

    def check(self, leaves: Mapping[str, Any]) -> None:
        """Compare a client's arrays with the constants, bit for bit. Absent ones are not compared.

        Raises:
            AffluxError: a constant of the client differs; the message names it.
        """
        for field in self._fields:
            if field.role == "constant" and field.name in leaves:
                self._compare(field, leaves[field.name])

    def _compare(self, field: Field, array: Array) -> None:
        name, own = field.name, self._bytes[field.name]
        check_shape(name, array, field.shape)
        other = raw_bytes(name, array)
        if other.ctypes.data == own.ctypes.data or np.array_equal(other, own):
            return
        if other.size != own.size:  # a model that the client holds in another precision
            rounded = raw_bytes(name, Like.of(name, array).made_of(name, self._array(field, own.copy())))
            if np.array_equal(other, rounded):
                return
        raise AffluxError(
            f"[layout] {label(name)} differs from the server's, and is a constant: a client must not change it. "
            f'Layout.of(model, roles={{"{name}": "local"}}) lets each client have its own, "copied" and "statistic" '
            "take the clients' values"
        )

    def items(self, *, writable: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the name of each constant and local array, and its value in the library of the server's first params.

        Unless `writable`, NumPy's and torch's arrays are the server's own memory.
        """
        for field in self._fields:
            if field.name in self._objects:
                yield field.name, deepcopy(self._objects[field.name])
            elif field.name in self._bytes:
                yield field.name, self._value(field, writable=writable)

    def writes(self, leaves: Mapping[str, Any]) -> list[Overwrite]:
        """Return the constants of a target whose bytes differ from the server's, each with its value.

        Raises:
            AffluxError: such an array has another shape, or cannot be written.
        """
        overwrites = []
        for field in self._fields:
            array = leaves.get(field.name) if field.role == "constant" else None
            if array is None:
                continue
            try:
                self._compare(field, array)
            except AffluxError:
                require_writable(field.name, array, field.shape)
                overwrites.append(Overwrite(field.name, array, self._value(field, writable=True)))
        return overwrites

    def _value(self, field: Field, *, writable: bool) -> Any:
        raw = self._bytes[field.name]
        raw = raw.copy() if writable else raw
        like = self._likes.get(field.name)
        if like is not None and like.library == "torch":
            return as_torch(raw).view(like.dtype).reshape(field.shape).to(like.device)
        values = self._array(field, raw)
        return values if like is None else like.made_of(field.name, values)

    def _array(self, field: Field, raw: Bytes) -> npt.NDArray[Any]:
        """Return the values as a NumPy array; of a dtype that NumPy lacks, as bytes."""
        like = self._likes.get(field.name)
        dtype = np_dtype(str(field.dtype) if like is None or like.library == "torch" else str(like.dtype))
        return raw.view(dtype).reshape(field.shape) if dtype is not None else raw

    def to_bytes(self) -> Bytes:
        """Return the bytes of all arrays, one after the other."""
        parts = [self._bytes.get(field.name, np.zeros(field.nbytes, np.uint8)) for field in self._fields]
        return np.concatenate([*parts, np.zeros(0, np.uint8)])

    def load(self, data: Bytes) -> None:
        """Replace all arrays by those that `to_bytes` has returned, `nbytes` bytes."""
        fields = [field for field in self._fields if field.dtype != OBJECT]
        self._bytes = {field.name: immutable_copy(data[field.start : field.stop]) for field in fields}

    def replace(self, other: "Constants") -> None:
        """Take the values of the arrays that another object has under the same name and with the same shape."""
        places = {(field.name, field.shape, field.nbytes) for field in self._fields}
        names = {field.name for field in other._fields if (field.name, field.shape, field.nbytes) in places}
        self._bytes = self._bytes | {name: raw for name, raw in other._bytes.items() if name in names}


def np_dtype(name: str) -> np.dtype[Any] | None:
    """Return NumPy's dtype of this name; None if NumPy has no such dtype."""
    try:
        return np.dtype(name.removeprefix("torch."))
    except TypeError:
        return None
