"""Values that no caller should hand in: numbers at the edge, other types, and objects that lie or raise.

Every entry of `SCALARS` is a function that makes a new object, because a call may change what it is given.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial

import numpy as np
import torch

D = 6


class Raises:
    """Raises at each look at it; `what` is the exception."""

    def __init__(self, what=TypeError):
        object.__setattr__(self, "what", what)

    def _fail(self, *args, **kwargs):
        raise object.__getattribute__(self, "what")("hostile")

    __index__ = __float__ = __int__ = __bool__ = __len__ = __getitem__ = __iter__ = __call__ = __repr__ = __str__ = (
        _fail
    )
    __array__ = __eq__ = __hash__ = __lt__ = __gt__ = __le__ = __ge__ = __fspath__ = __complex__ = __contains__ = _fail
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __neg__ = __abs__ = __format__ = _fail

    def __getattr__(self, name):
        raise object.__getattribute__(self, "what")("hostile attribute")


class Ambiguous:
    """Comparisons give arrays, which are neither true nor false."""

    def __eq__(self, other):
        return np.array([True, False])

    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __eq__
    __hash__ = object.__hash__


class Index:
    """An integer that is none."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        if isinstance(self.value, type):
            raise self.value("hostile index")
        return self.value


class Float(float):
    """A float whose methods raise."""

    def __float__(self):
        raise RuntimeError("hostile float")

    def __lt__(self, other):
        raise RuntimeError("hostile comparison")

    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    __hash__ = float.__hash__


class Int(int):
    """An int whose methods raise."""

    def __index__(self):
        raise RuntimeError("hostile index")

    def __lt__(self, other):
        raise RuntimeError("hostile comparison")

    __gt__ = __le__ = __ge__ = __eq__ = __int__ = __lt__
    __hash__ = int.__hash__


class Text(str):
    """A str whose methods raise."""

    def __eq__(self, other):
        raise RuntimeError("hostile comparison")

    def __hash__(self):
        raise RuntimeError("hostile hash")

    def encode(self, *args):
        raise RuntimeError("hostile encode")


class Lying(Sequence):
    """A sequence that reports a wrong length; or one without a length."""

    def __init__(self, length, items):
        self.length, self.items = length, items

    def __len__(self):
        if isinstance(self.length, type):
            raise self.length("hostile length")
        return self.length

    def __getitem__(self, place):
        if isinstance(self.items, type):
            raise self.items("hostile item")
        if not -10 < place < 10:
            raise IndexError(place)
        return self.items


class Map(Mapping):
    """A mapping that raises, or has keys that it does not find."""

    def __init__(self, keys, what=KeyError):
        self.keys_, self.what = keys, what

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(self.keys_)

    def __getitem__(self, key):
        raise self.what("hostile item")


class Module:
    """Has the method of a torch module, which gives or raises whatever."""

    def __init__(self, what):
        self.what = what

    def named_parameters(self):
        return or_raise(self.what)

    def named_buffers(self):
        return []


class Colour(Enum):
    RED = "red"


def or_raise(value):
    if isinstance(value, type) and issubclass(value, BaseException):
        raise value("hostile")
    return value


def nested(wrap, depth=20_000):
    value = 0.5
    for _ in range(depth):
        value = wrap(value)
    return value


def itself(kind):
    if kind is list:
        own = []
        own.append(own)
        return own
    own = {}
    own["own"] = own
    return own


ERRORS = [TypeError, ValueError, RuntimeError, AttributeError, OSError, KeyError, RecursionError, OverflowError]
ERRORS += [BufferError, AssertionError, StopIteration, ZeroDivisionError, UnicodeError, NotImplementedError, Exception]

NUMBERS = [0, 1, 2, 3, -1, 7, 127, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)]
NUMBERS += [-(2**63) - 1, 10**400, -(10**5000), 0.5, -0.0, 1e-320, 1e38, 3e38, 1e150, 1e308, float("nan"), float("inf")]
NUMBERS += [float("-inf"), 2.0**63, -0.5, 1.0, True, False, None, 1j, Fraction(1, 3), Fraction(10**400, 3)]
NUMBERS += [Decimal("1"), Decimal("NaN"), np.int8(-1), np.uint64(2**64 - 1), np.float16("inf"), np.float32(0.5)]
NUMBERS += [np.longdouble("1e400"), np.bool_(True), np.complex64(1), np.datetime64("NaT"), np.timedelta64(1)]
TEXTS = [np.str_("a"), np.bytes_(b"a"), "", "x", "update", "model", "gradient", "float32", "bfloat16"]
TEXTS += ["affine-4", "sgd"]
TEXTS += ["\0", "\ud800", "ä" * 9, "a" * 100_000, "../..", "latest", "trainable", "w", "0", "paper", "nvflare", b"x"]
TEXTS += [bytearray(b"w"), "inf"]


def each(make, *values):
    """For each of the values a function that calls `make` with it."""
    return [partial(make, value) for value in values]


SCALARS = [*each(lambda value: value, *NUMBERS, *TEXTS), list, dict, tuple, set, object, frozenset, Ambiguous]
SCALARS += [*each(itself, list, dict), *each(nested, lambda inner: [inner], lambda inner: {"a": inner})]
SCALARS += each(nested, lambda inner: {"part": inner}, lambda inner: (inner,))
SCALARS += each(deepcopy, [1, "a", None], {"a": 1}, {1: 2}, {None: 1}, {(1,): 2}, (1, 2, 3), [[[]]], [None])
SCALARS += each(deepcopy, [float("nan")], {"part": "sgd", "lr": "x"}, {"own": 1}, range(3), slice(0, 3))
SCALARS += [lambda: iter([1]), lambda: (x for x in [1]), lambda: memoryview(b"abc")]
SCALARS += each(lambda value: value, int, dict, np.float32, torch.float32, np.dtype("V3"), torch, lambda *a, **k: None)
SCALARS += each(lambda value: value, lambda *a, **k: 1 / 0, Colour.RED, Exception("x"), ..., NotImplemented)
SCALARS += [lambda: UserDict(a=1), *each(Text, "w"), *each(Int, 3), *each(Float, 0.5), *each(Raises, *ERRORS)]
SCALARS += each(Index, 2**70, -1, "x", 1.5, RuntimeError, TypeError, ValueError)
SCALARS += each(lambda length: Lying(length, 1.0), 0, 3, -1, 2**62, 2**70, TypeError, RuntimeError)
SCALARS += each(lambda error: Lying(3, error), *ERRORS)
SCALARS += [*each(lambda error: Map(["a", 1], error), *ERRORS), lambda: Map([None, []])]
SCALARS += each(Module, *ERRORS, None, 3, [1], [("a", 1)], [(1, np.ones(2))], "ab")
