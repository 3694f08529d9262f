"""Checks of arguments, for options, hyper-parameters and calls.

A `Check` takes the operation or class that has the argument, the name of the argument, and the value. It returns the
value as a plain Python object, also from NumPy's scalars, or raises `[operation] name is VALUE, must be ...`.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from math import inf, nan
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from afflux.ops.errors import AffluxError

T = TypeVar("T")
Check = Callable[[str, str, object], T]
#: The name of a dtype, or the dtype itself: NumPy's, torch's, JAX's or ml_dtypes'; or the type of its scalars.
Dtype = Any

_INTS = (int, np.integer)
#: Types of numbers that are arguments, Python's and NumPy's; bool is an int.
NUMBERS = (float, int, np.integer, np.floating)


def check_fields(part: object, check: Check[object], *names: str, op: str | None = None) -> None:
    """In the __post_init__ of a frozen dataclass: replaces these fields by what the check returns.

    `op` is the operation that messages name, by default the class.
    """
    for name in names:
        object.__setattr__(part, name, check(op or type(part).__name__, name, getattr(part, name)))


def _number(words: str, fits: Callable[[float], bool]) -> Check[float]:
    def check(part: str, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise AffluxError(f"[{part}] {name} is {value!r}, must be a number, {words}")
        try:
            number = float(value)
        except OverflowError:
            number = nan  # which fits nowhere
        if not fits(number):
            raise AffluxError(f"[{part}] {name} is {value!r}, must be {words}")
        return number

    return check


finite = _number("finite", lambda x: -inf < x < inf)
not_negative = _number("finite and not negative", lambda x: 0 <= x < inf)
positive = _number("finite and positive", lambda x: 0 < x < inf)
positive_or_inf = _number("positive", lambda x: x > 0)
one_or_more = _number("at least 1 and finite", lambda x: 1 <= x < inf)
less_than_one = _number("at least 0 and less than 1", lambda x: 0 <= x < 1)
one_or_less = _number("between 0 and 1", lambda x: 0 <= x <= 1)


def at_most(most: float) -> Check[float]:
    """A positive number of at most `most`."""
    return _number(f"positive and at most {most:g}", lambda x: 0 < x <= most)


def integer(least: int) -> Check[int]:
    """An int of at least `least`, as `as_int` reads it."""

    def check(part: str, name: str, value: object) -> int:
        number = as_int(value)
        if number is None or number < least:
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be an int of at least {least}")
        return number

    return check


def flag(part: str, name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise AffluxError(f"[{part}] {name} is {value!r}, must be True or False")
    return bool(value)


def one_of(*known: str | None) -> Check[str | None]:
    """One of several words, at least two; None may be among them."""

    def check(part: str, name: str, value: object) -> str | None:
        if not (value is None or isinstance(value, str)) or value not in known:
            raise AffluxError(f"[{part}] {name} is {value!r}, must be {_either(known)}")
        return value

    return check


def one_dtype_of(*known: str) -> Check[str]:
    """The name of one of several dtypes, at least two; the argument may be any `Dtype`."""

    def check(part: str, name: str, value: object) -> str:
        found = dtype_name(value)
        if found not in known or (isinstance(value, np.dtype) and not value.isnative):
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be {_either(known)}")
        return found

    return check


def dtype_name(value: Dtype) -> str:
    """The name of a dtype, such as "bfloat16"; of anything else some text. Imports no library.

    >>> dtype_name(np.float32), dtype_name(np.dtype("<f8")), dtype_name("bfloat16")
    ('float32', 'float64', 'bfloat16')
    """
    if isinstance(value, type):
        return value.__name__
    return str(getattr(value, "name", value)).removeprefix("torch.")  # str(torch.float32) is torch.float32


def _either(known: Sequence[str | None]) -> str:
    *most, last = map(repr, known)
    return f"{', '.join(most)} or {last}"


def optional(check: Check[T]) -> Check[T | None]:
    """None, or what the check allows."""
    return lambda part, name, value: None if value is None else check(part, name, value)


def is_function(value: object) -> bool:
    """Something to call with facts: an object that can be called, and not the class of such objects."""
    return callable(value) and not isinstance(value, type)


def is_int(value: object) -> TypeGuard[int]:
    """Python's or NumPy's, and no bool. For data that was saved; `as_int` is for arguments."""
    return type(value) is int or (isinstance(value, _INTS) and not isinstance(value, bool))


def as_int(value: object) -> int | None:
    """The int that an argument stands for: an int, what has `__index__`, or a float without a fraction; else None.

    >>> as_int(np.int8(3)), as_int(3.0), as_int(3.5), as_int(True), as_int("3")
    (3, 3, None, None, None)
    """
    number = _index(value)
    if number is None and isinstance(value, float | np.floating) and value.is_integer():
        return int(value)
    return number


def _index(value: object) -> int | None:
    """The int of an int or of what has `__index__`; None of anything else, and of bools of any library."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or dtype_name(getattr(value, "dtype", None)).startswith("bool"):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def loss_of(op: str, value: object) -> float:
    """A client's loss; None means unknown, which is NaN.

    Raises:
        AffluxError: no number, a bool, or an int that is far outside of 64 bits.
    """
    if value is None:
        return nan
    if not isinstance(value, NUMBERS) or isinstance(value, bool) or (isinstance(value, int) and abs(value) > 2**63):
        raise AffluxError(f"[{op}] loss is {brief(value)}, must be a number, or None if unknown")
    return float(value)


def brief(value: object) -> str:
    """For an error: the value, or its type where that would take lines."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an int of too many digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 80 and "\n" not in text else f"of type {type(value).__name__}"


def known_names(name: object, known: Iterable[str]) -> str:
    """For an error about an unknown name: the known ones, and before them those that are spelled most like it."""
    names = list(known)
    close = get_close_matches(name, names) if isinstance(name, str) and len(name) <= 80 else []
    nearest = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{nearest}known: {', '.join(names)}"


def path_of(op: str, name: str, value: object) -> Path:
    """A path that a caller gave."""
    try:
        path = Path(value)  # type: ignore[arg-type]
        if b"\0" not in os.fsencode(path):
            return path
    except (TypeError, UnicodeEncodeError):
        pass
    raise AffluxError(f"[{op}] {name} is {brief(value)}, must be a folder's path: a str or a Path")


def plain_id(client_id: object, op: str = "push") -> int | str:
    """The client id as Python's int or str.

    Args:
        client_id: an int from -2**63 to 2**64 - 1, anything else with `__index__` in this range, or a str.
        op: the operation that messages name.

    Raises:
        AffluxError: another type (bool and float included), an int outside of the range, or a str that UTF-8 cannot
            encode: one with a lone surrogate.
    """
    number = client_id if type(client_id) is int else None
    if number is None and isinstance(client_id, str):
        text = str.__str__(client_id)  # not str(): of an Enum's member that is the name
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise AffluxError(f"[{op}] client_id {text!r} is no Unicode text: {error.reason}") from None
        return text
    if number is None:
        number = _index(client_id)
    if number is None:
        raise AffluxError(f"[{op}] client_id is {brief(client_id)}, must be an int or a str")
    if not -(2**63) <= number < 2**64:
        raise AffluxError(f"[{op}] client_id is {brief(client_id)}, which does not fit into 64 bits")
    return number
