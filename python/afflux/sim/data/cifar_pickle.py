"""A reader of the pickles in which CIFAR's python version is published: a dict of an array and of lists of numbers.

A pickle is a program. Before it runs, its opcodes are compared with an allow-list: none imports or calls anything but
the names below, and those are replaced by a class of this module, which only stores its arguments. The dict is read as
a list of keys and values, because hashing the keys of a forged dict can take quadratic or exponential time.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from afflux.ops.validation import brief
from afflux.sim.data.files import bad_file, read_bytes, readable
from afflux.sim.data.formats import PIXELS

#: As Python 2 and 3 write such a dict, in protocol 2 (Python 2 only), 3 or 4. All of them take time and memory in
#: proportion to the file, if the numbers of BINPUT and LONG_BINPUT do: the unpickler allocates a table of as many
#: entries as the largest of them.
NAMES_OF_OPCODES = (
    "PROTO FRAME STOP EMPTY_DICT SETITEMS MARK EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES SHORT_BINUNICODE "
    "BINUNICODE GLOBAL STACK_GLOBAL REDUCE BUILD BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes if op.name in NAMES_OF_OPCODES.split()}
NAMES = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")


class _Call:
    """A call of one of `NAMES`, which is not made: its arguments, and the state that follows."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in NAMES:
            raise ValueError(f"it refers to {brief(f'{module}.{name}')}")
        return _Call


def read_batch(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and labels of one file.

    Args:
        path: the file, as data_batch_1 of CIFAR-10 or train of CIFAR-100.
        labels: key of the labels: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Returns:
        Images (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises:
        ConfigError: the file cannot be read, is no pickle of such a dict, or names anything but NumPy's array
            constructors.
    """
    expected = f"a pickle (protocol 2, 3 or 4) of a dict with 'data', uint8 of shape (n, {PIXELS}), and {labels!r}, "
    expected += "a list of n whole numbers"
    content = bytearray(read_bytes(path, expected))
    with readable(path, expected):
        _replace_dict(content)
        items = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        # A file of Python 2 has the keys as bytes.
        values = {
            key.decode() if isinstance(key, bytes) else key: value
            for key, value in zip(items[::2], items[1::2], strict=True)
            if isinstance(key, str | bytes)
        }
        absent = [name for name in ("data", labels) if name not in values]
        if not absent:
            return _images(values["data"]), _labels(values[labels])
    raise bad_file(path, f"has no key {', '.join(map(repr, absent))}", expected)


def _replace_dict(content: bytearray) -> None:
    """Check the opcodes of a pickle, and make its dict a list: change EMPTY_DICT and SETITEMS to the opcodes of a list.

    Raises:
        ValueError: an opcode is not allowed, or there is another dict than one that is filled at the end.
    """
    file, name = io.BytesIO(content), ""
    places: dict[str, list[int]] = {"EMPTY_DICT": [], "SETITEMS": []}
    while name != "STOP":
        code = file.read(1)
        if code not in OPCODES:
            raise ValueError(f"it holds the opcode {code!r}" if code else "it has no end")
        name, argument = OPCODES[code].name, OPCODES[code].arg
        if name in places:
            places[name].append(file.tell() - 1)
        elif name == "GLOBAL":
            file.readline(), file.readline()  # the disassembler would interpret escapes, and warn of unknown ones
        elif argument is not None:
            number = argument.reader(file)
            if name in ("BINPUT", "LONG_BINPUT") and number >= len(content):
                raise ValueError(f"it stores object {number} of {len(content)} bytes")
    dicts, fills = places.values()
    if len(dicts) != 1 or len(fills) != 1:
        raise ValueError(f"it holds {len(dicts)} dicts, filled {len(fills)} times")
    content[dicts[0]] = ord(pickle.EMPTY_LIST)
    content[fills[0]] = ord(pickle.APPENDS)


def _images(value: Any) -> np.ndarray:
    if type(value) is not _Call:
        raise ValueError("its 'data' are no array")
    _, shape, dtype, column_major, pixels = value.state
    if type(dtype) is not _Call or dtype.arguments[0] not in ("u1", b"u1"):
        raise ValueError("its 'data' are an array of another dtype than uint8")
    if type(pixels) is not bytes or type(shape) is not tuple or len(shape) != 2 or shape[1] != PIXELS:
        # The text of a forged shape, of tuples in tuples, may be longer than the memory.
        raise ValueError(f"its 'data' are no array of shape (n, {PIXELS})")
    images = np.frombuffer(pixels, np.uint8).reshape(shape, order="F" if column_major is True else "C")
    return images.reshape(-1, 3, 32, 32)


def _labels(value: Any) -> np.ndarray:
    if type(value) is not list or not all(type(label) is int and 0 <= label < 256 for label in value):
        raise ValueError("its labels are no list of whole numbers from 0 to 255")
    return np.array(value, np.int64)
