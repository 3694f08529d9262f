"""A reader of pickles that hold plain data only. It imports nothing and calls nothing that a file names.

CIFAR's "python version" is published as pickles. Python's unpickler executes code that a pickle names; this reader
does not use it. The few opcodes that build numbers, strings, lists, dicts and NumPy arrays are interpreted here; their
arguments are read by the standard library's disassembler. Every other opcode is an error, and so is every name except
those of NumPy's array constructors.
"""

import math
import pickletools
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from afflux.ops.validation import brief
from afflux.sim.data.formats.errors import bad_file, readable

EXPECTED = "a pickle (protocol 2 to 5) of a dict that holds arrays, lists, strings and numbers only"

_RECONSTRUCT, _NDARRAY, _DTYPE, _FROMBUFFER, _ENCODE = "reconstruct", "ndarray", "dtype", "frombuffer", "encode"
#: The names that a pickle of an array contains, in all versions of NumPy. They are labels here, never imported.
NAMES = {
    "numpy.core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy ndarray": _NDARRAY,
    "numpy dtype": _DTYPE,
    "numpy.core.numeric _frombuffer": _FROMBUFFER,
    "numpy._core.numeric _frombuffer": _FROMBUFFER,
    "_codecs encode": _ENCODE,
}
KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
MOST_DIMENSIONS = 8
OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}


class _RefusedError(Exception):
    """Raised for content that is not plain data; the text completes "FILE ..."."""


class _Mark:
    """The mark on the stack below the items of a tuple, list or dict."""


class _Name:
    """One of NAMES on the stack."""

    def __init__(self, role: str) -> None:
        self.role = role


class _Dtype:
    """A dtype whose byte order may follow."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


class _Array:
    """An array whose content may follow."""

    def __init__(self, array: np.ndarray | None = None) -> None:
        self.array = array


def read_plain_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dict of plain data.

    Args:
        path: the file.

    Returns:
        The dict. Keys that are bytes, as the strings of Python 2, are decoded as ASCII; values are arrays (read-only),
        lists, tuples, dicts, str, bytes, int, float, bool or None.

    Raises:
        ConfigError: the file cannot be read, is no such pickle, or names anything but NumPy's array constructors.
    """
    with readable(path, EXPECTED):
        content = path.read_bytes()
        try:
            value = _finished(_Reader().read(content))
        except _RefusedError as refused:
            raise bad_file(path, str(refused), EXPECTED) from None
        except (IndexError, KeyError, RecursionError) as error:
            raise bad_file(path, f"is no complete pickle ({type(error).__name__})", EXPECTED) from None
    return value


class _Reader:
    """A stack machine for the opcodes of plain data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        """Return the value that the pickle holds."""
        file = BytesIO(content)
        while code := file.read(1):
            opcode = OPCODES.get(code.decode("latin-1"))
            name = opcode.name if opcode else code.hex()
            if name == "STOP":
                return self.stack.pop()
            if opcode is None or (name not in PUSHED and name not in STEPS):
                raise _RefusedError(f"holds the opcode {name}")
            argument: Any = None
            if opcode.arg:
                argument = _two_lines(file) if name == "GLOBAL" else opcode.arg.reader(file)
            if name in PUSHED:
                self.stack.append(PUSHED[name](argument))
            else:
                STEPS[name](self, argument)
        raise _RefusedError("has no end")

    def items(self) -> list[Any]:
        """Remove the items above the last mark, and the mark."""
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise _RefusedError("has no mark for its items")

    def tuple(self, count: int) -> None:
        """Replace the last `count` items by a tuple of them."""
        if len(self.stack) < count:
            raise _RefusedError("has too few items for a tuple")
        items = tuple(self.stack[-count:])
        self.stack[-count:] = [items]

    def memoize(self, place: int | None) -> None:
        """Store the last item under a number; None: the next number."""
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        """Add items to the list below them."""
        if not isinstance(self.stack[-1], list):
            raise _RefusedError("adds items to something that is no list")
        self.stack[-1].extend(items)

    def put(self, items: list[Any]) -> None:
        """Put keys and values into the dict below them."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError("puts items into something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Not tuples: hashing one that is nested a million times would exhaust the C stack.
            if not isinstance(key, str | bytes | int):
                raise _RefusedError(f"has a {type(key).__name__} as the key of a dict")
            target[key] = value

    def name(self, text: str) -> None:
        """Push one of NAMES, as a label."""
        if text not in NAMES:
            raise _RefusedError(f"refers to {brief(text.replace(' ', '.'))}")
        self.stack.append(_Name(NAMES[text]))

    def name_from_stack(self) -> None:
        """Push the name whose module and attribute are on the stack."""
        attribute, module = self.stack.pop(), self.stack.pop()
        if not isinstance(attribute, str) or not isinstance(module, str):
            raise _RefusedError("has a name that is no text")
        self.name(f"{module} {attribute}")

    def reduce(self) -> None:
        """Replace a label and its arguments by the object that NumPy would make from them."""
        arguments, function = self.stack.pop(), self.stack.pop()
        make = MAKERS.get(function.role) if isinstance(function, _Name) else None
        if make is None or not isinstance(arguments, tuple):
            raise _RefusedError("calls something that makes no array")
        self.stack.append(make(*arguments))

    def build(self) -> None:
        """Set the state of an array or a dtype."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(state, tuple):
            raise _RefusedError("has a state that is no tuple")
        if isinstance(target, _Dtype):
            _set_byte_order(target, *state)
        elif isinstance(target, _Array) and target.array is None:
            _set_content(target, *state)
        else:
            raise _RefusedError("gives a state to something that is no new array")


def _finished(value: Any) -> dict[str, Any]:
    """Return the dict with its arrays. No placeholder for a part of an array may remain."""
    if not isinstance(value, dict):
        raise _RefusedError(f"holds a {type(value).__name__}")
    found = {_text(key): item.array if isinstance(item, _Array) else item for key, item in value.items()}
    if any(isinstance(item, _Array) and item.array is None for item in value.values()):
        raise _RefusedError("has an array without content")
    waiting: list[Any] = list(found.values())
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Mark | _Name | _Dtype | _Array):
            raise _RefusedError("has a part of an array, or a whole one, inside a value")
        if isinstance(item, list | tuple | dict) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
    return found


def _two_lines(file: BytesIO) -> str:
    # Module and attribute. The disassembler's reader would interpret escapes, which names do not have.
    module, attribute = file.readline(), file.readline()
    return f"{module[:-1].decode('latin-1')} {attribute[:-1].decode('latin-1')}"


def _text(key: Any) -> str:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else str(key)


def _empty_array(kind: Any = None, shape: Any = None, code: Any = None, *rest: Any) -> _Array:
    if not (isinstance(kind, _Name) and kind.role == _NDARRAY) or rest:
        raise _RefusedError("makes an array of another class than numpy.ndarray")
    return _Array()


def _dtype(code: Any = None, *rest: Any) -> _Dtype:
    text = _text(code) if isinstance(code, str | bytes) else ""
    if text.lstrip("<>|=") not in KINDS or len(text) > 3:
        raise _RefusedError(f"has an array of dtype {brief(code)}")
    return _Dtype(np.dtype(text))


def _set_byte_order(target: _Dtype, version: Any = None, order: Any = None, *rest: Any) -> None:
    # rest: subarray, names and fields, which are None, then sizes and flags.
    mark = _text(order) if isinstance(order, str | bytes) else ""
    if mark not in ("<", ">", "|", "=") or any(part is not None for part in rest[:3]):
        raise _RefusedError("has a dtype that is no plain number")
    target.dtype = target.dtype.newbyteorder(mark)  # type: ignore[arg-type]


def _filled(content: Any, dtype: Any, shape: Any, column_major: bool) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | bytearray):
        raise _RefusedError("has an array whose content is no bytes")
    if not isinstance(shape, tuple) or len(shape) > MOST_DIMENSIONS:
        raise _RefusedError("has an array whose shape is no short tuple")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise _RefusedError("has an array whose shape is not made of numbers")
    if math.prod(shape) * dtype.dtype.itemsize != len(content):
        raise _RefusedError(f"has {len(content)} bytes for an array of shape {shape}")
    flat = np.frombuffer(bytes(content), dtype.dtype)
    return flat.reshape(shape, order="F" if column_major else "C")


def _set_content(
    target: _Array,
    version: Any = None,
    shape: Any = None,
    dtype: Any = None,
    column_major: Any = False,
    content: Any = None,
    *rest: Any,
) -> None:
    target.array = _filled(content, dtype, shape, column_major is True or column_major == 1)


def _from_buffer(content: Any = None, dtype: Any = None, shape: Any = None, order: Any = "C", *rest: Any) -> _Array:
    if order not in ("C", "F"):
        raise _RefusedError("has an array that is neither in C order nor in Fortran's")
    return _Array(_filled(content, dtype, shape, order == "F"))


def _encoded(text: Any = None, encoding: Any = None, *rest: Any) -> bytes:
    # Protocol 2 of Python 3 writes bytes as text in latin-1.
    if not isinstance(text, str) or encoding != "latin1":
        raise _RefusedError("encodes something else than text in latin-1")
    return text.encode("latin-1")


MAKERS: dict[str, Callable[..., Any]] = {
    _RECONSTRUCT: _empty_array,
    _DTYPE: _dtype,
    _FROMBUFFER: _from_buffer,
    _ENCODE: _encoded,
}

PUSHED: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), lambda value: value),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), lambda value: value),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda value: value),
    # Strings of Python 2: the disassembler reads their bytes as latin-1.
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), lambda value: value.encode("latin-1")),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _Mark(),
}
"""The value that an opcode pushes, from its argument."""

STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "POP": lambda reader, _: reader.stack.__delitem__(-1),
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader.items())),
    "TUPLE1": lambda reader, _: reader.tuple(1),
    "TUPLE2": lambda reader, _: reader.tuple(2),
    "TUPLE3": lambda reader, _: reader.tuple(3),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.items()),
    "SETITEM": lambda reader, _: reader.put([reader.stack.pop(-2), reader.stack.pop()]),
    "SETITEMS": lambda reader, _: reader.put(reader.items()),
    "BINPUT": lambda reader, place: reader.memoize(place),
    "LONG_BINPUT": lambda reader, place: reader.memoize(place),
    "MEMOIZE": lambda reader, _: reader.memoize(None),
    "BINGET": lambda reader, place: reader.stack.append(reader.memo[place]),
    "LONG_BINGET": lambda reader, place: reader.stack.append(reader.memo[place]),
    "GLOBAL": lambda reader, name: reader.name(name),
    "STACK_GLOBAL": lambda reader, _: reader.name_from_stack(),
    "REDUCE": lambda reader, _: reader.reduce(),
    "BUILD": lambda reader, _: reader.build(),
}
"""The change of the stack by an opcode."""
