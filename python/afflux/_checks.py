"""What a hyper-parameter may be.

A check takes the name of a part, the name of one of its parameters, and the value. It returns the value as a plain
Python one, whether it was Python's or NumPy's, or raises `[Part] name is VALUE, must be ...`.
"""

from collections.abc import Callable
from math import inf, nan
from numbers import Integral, Real
from typing import TypeVar

import numpy as np

from afflux.errors import AffluxError

T = TypeVar("T")
Check = Callable[[str, str, object], T]


def settle(part: object, check: Check[object], *names: str) -> None:
    """In the __post_init__ of a frozen part: these fields become what the check returns."""
    for name in names:
        object.__setattr__(part, name, check(type(part).__name__, name, getattr(part, name)))


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


def integer(least: int) -> Check[int]:
    """An int of at least `least`."""

    def check(part: str, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise AffluxError(f"[{part}] {name} is {value!r}, must be an int of at least {least}")
        return int(value)

    return check


def flag(part: str, name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise AffluxError(f"[{part}] {name} is {value!r}, must be True or False")
    return bool(value)


def one_of(*known: str | None) -> Check[str | None]:
    """One of several words, at least two; None may be among them."""
    *most, last = map(repr, known)

    def check(part: str, name: str, value: object) -> str | None:
        if not (value is None or isinstance(value, str)) or value not in known:
            raise AffluxError(f"[{part}] {name} is {value!r}, must be {', '.join(most)} or {last}")
        return value

    return check


def optional(check: Check[T]) -> Check[T | None]:
    """None, or what the check allows."""
    return lambda part, name, value: None if value is None else check(part, name, value)


def is_function(value: object) -> bool:
    """Something to call with facts: an object that can be called, and not the class of such objects."""
    return callable(value) and not isinstance(value, type)
