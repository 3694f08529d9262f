"""A reader of the pickles in which CIFAR's python version is published: a dict of an array and of lists of numbers.

A pickle is a program. Before it runs, its opcodes are compared with an allow-list: none imports or calls anything but
the names below, and those are replaced by classes of this module, which only store their arguments. The dict is read
as a list of keys and values, because hashing the keys of a forged dict can take quadratic or exponential time.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from afflux.ops.validation import brief
from afflux.sim.data.formats.errors import bad_file, readable
from afflux.sim.data.formats.files import read_bytes

#: As Python 2 and 3 write such a dict, in protocol 2 (Python 2 only), 3 or 4. All of them take time and memory in
#: proportion to the file, if the numbers of `MEMO` do.
NAMES_OF_OPCODES = (
    "PROTO FRAME STOP EMPTY_DICT SETITEMS MARK EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES SHORT_BINUNICODE "
    "BINUNICODE GLOBAL STACK_GLOBAL REDUCE BUILD BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes if op.name in NAMES_OF_OPCODES.split()}
#: The unpickler allocates a table of as many entries as the largest of these numbers.
MEMO = ("BINPUT", "LONG_BINPUT")


class _Array:
    """An array: `_reconstruct` is called with the class, and the state has all else."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Array):
    """A dtype. Its state has the byte order, which is none of uint8's."""

    def __init__(self, code: Any = None, *rest: Any) -> None:
        super().__init__()
        self.code = code


class _ArrayClass:
    """numpy.ndarray, the first argument of `_reconstruct`."""


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _ArrayClass,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in NAMES:
            raise ValueError(f"it refers to {brief(f'{module}.{name}')}")
        return NAMES[module, name]


def read_pickle(path: Path, names: tuple[str, ...]) -> list[Any]:
    """Read values of a pickled dict, each an array of uint8 or a list of whole numbers. Other values are ignored.

    Args:
        path: the file.
        names: the keys; a file of Python 2 has them as bytes.

    Returns:
        Arrays (read-only) and lists, in the order of `names`.

    Raises:
        ConfigError: the file cannot be read, is no such pickle, names anything but NumPy's array constructors, or has
            no such value.
    """
    expected = f"a pickle (protocol 2, 3 or 4) of a dict with {' and '.join(map(repr, names))}, an array of uint8 or a "
    expected += "list of whole numbers"
    content = bytearray(read_bytes(path, expected))
    with readable(path, expected):
        _replace_dict(content)
        items = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(items, list) or len(items) % 2:
            raise ValueError("it holds no dict")
        values = {_text(key): value for key, value in zip(items[::2], items[1::2], strict=True)}
        absent = [name for name in names if name not in values]
        if not absent:
            return [_plain(name, values[name]) for name in names]
    raise bad_file(path, f"has no key {', '.join(map(repr, absent))}", expected)


def _replace_dict(content: bytearray) -> None:
    """Check the opcodes of a pickle, and make its dict a list: change EMPTY_DICT and SETITEMS to the opcodes of a list.

    Raises:
        ValueError: an opcode is not allowed, or there is another dict than one that is filled at the end.
    """
    file = io.BytesIO(content)
    dicts, fills = [], []
    while (name := _read_opcode(file, len(content))) != "STOP":
        if name == "EMPTY_DICT":
            dicts.append(file.tell() - 1)
        elif name == "SETITEMS":
            fills.append(file.tell() - 1)
    if len(dicts) != 1 or len(fills) != 1:
        raise ValueError(f"it holds {len(dicts)} dicts, filled {len(fills)} times")
    content[dicts[0]] = ord(pickle.EMPTY_LIST)
    content[fills[0]] = ord(pickle.APPENDS)


def _read_opcode(file: io.BytesIO, size: int) -> str:
    """Read an opcode and its argument. Return the opcode's name."""
    code = file.read(1)
    opcode = OPCODES.get(code)
    if opcode is None:
        raise ValueError(f"it holds the opcode {code!r}" if code else "it has no end")
    if opcode.name == "GLOBAL":
        file.readline(), file.readline()  # the disassembler would interpret escapes, and warn of unknown ones
    elif opcode.arg is not None:
        argument = opcode.arg.reader(file)
        if opcode.name in MEMO and argument >= size:
            raise ValueError(f"it stores object {argument} of {size} bytes")
    return opcode.name


def _text(key: object) -> str:
    if not isinstance(key, str | bytes):
        raise ValueError(f"it has a {type(key).__name__} as a key")
    return key.decode("ascii") if isinstance(key, bytes) else key


def _plain(name: str, value: Any) -> Any:
    """Return an array or a list of numbers. Nothing else is returned."""
    if type(value) is _Array:
        return _array(name, value)
    if type(value) is list and all(type(number) is int for number in value):
        return value
    raise ValueError(f"its {name!r} is neither an array nor a list of whole numbers")


def _array(name: str, value: _Array) -> np.ndarray:
    _, shape, dtype, column_major, content = value.state
    if type(dtype) is not _Dtype or dtype.code not in ("u1", b"u1"):
        raise ValueError(f"its {name!r} is an array of another dtype than uint8")
    if type(content) is not bytes or type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its {name!r} is an array without bytes or shape")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if column_major is True else "C")
