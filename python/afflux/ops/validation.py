"""Checks of arguments, for options, hyper-parameters and calls.

A `Check` takes the operation or class that has the argument, the name of the argument, and the value. It returns the
value as a plain Python object, also from NumPy's scalars, or raises `[operation] name is VALUE, must be ...`.
"""

import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from math import inf, nan
from numbers import Real
from operator import index
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NoReturn, ParamSpec, TypeGuard, TypeVar

import numpy as np

from afflux.ops.errors import AffluxError, ConfigError, UnavailableError

T = TypeVar("T")
P = ParamSpec("P")
Check = Callable[[str, str, object], T]
#: The name of a dtype, or the dtype itself: NumPy's, torch's, JAX's or ml_dtypes'; or the type of its scalars.
Dtype = Any

_INTS = (int, np.integer)
#: Types of numbers that are arguments, Python's and NumPy's; bool is an int.
NUMBERS = (float, int, np.integer, np.floating)


def check_fields(part: object, check: Check[object], *names: str, op: str | None = None) -> None:
    """Replace these fields of a frozen dataclass by the results of the check; for its __post_init__.

    `op` is the operation that messages name, by default the class.
    """
    for name in names:
        object.__setattr__(part, name, check(op or type(part).__name__, name, getattr(part, name)))


def _number(words: str, fits: Callable[[float], bool]) -> Check[float]:
    def check(part: str, name: str, argument: object) -> float:
        value = zero_dim(argument)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise AffluxError(f"[{part}] {name} is {brief(argument)}, must be a number, {words}")
        number = as_float(value)
        if number is None or not fits(number):
            raise AffluxError(f"[{part}] {name} is {brief(argument)}, must be {words}")
        return number

    return check


any_number = _number("one that float64 holds", lambda x: True)
finite = _number("finite", lambda x: -inf < x < inf)
not_negative = _number("finite and not negative", lambda x: 0 <= x < inf)
positive = _number("finite and positive", lambda x: 0 < x < inf)
positive_or_inf = _number("positive", lambda x: x > 0)
one_or_more = _number("at least 1 and finite", lambda x: 1 <= x < inf)
less_than_one = _number("at least 0 and less than 1", lambda x: 0 <= x < 1)
one_or_less = _number("between 0 and 1", lambda x: 0 <= x <= 1)


def at_most(most: float) -> Check[float]:
    """Return a check for a positive number of at most `most`."""
    return _number(f"positive and at most {most:g}", lambda x: 0 < x <= most)


def integer(least: int, most: int | None = None) -> Check[int]:
    """Return a check for an int, as `as_int` reads it, of at least `least` and, if `most` is given, at most `most`."""

    def check(part: str, name: str, value: object) -> int:
        number = as_int(value)
        if number is None or number < least:
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be an int of at least {least}")
        if most is not None and number > most:
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be at most {most}")
        return number

    return check


#: The largest count of arrivals, of versions and so on: float64 can represent all ints up to it.
MOST_COUNT = 2**53
#: The most characters of the first line and of the end of a message that is longer than their sum.
_FIRST_LINE, _END = 100, 400
#: The largest number of elements of a vector: its bytes must be countable in 64 bits.
MOST_ELEMENTS = 2**59


def count_of(least: int) -> Check[int]:
    """Return a check for an int from `least` to `MOST_COUNT`."""
    return integer(least, MOST_COUNT)


#: A number of threads: the engine counts them in 32 bits.
a_thread_count = integer(1, 2**31 - 1)


def flag(part: str, name: str, value: object) -> bool:
    """Check that the value is True or False, also of NumPy; return a bool of Python."""
    if not isinstance(value, bool | np.bool_):
        raise AffluxError(f"[{part}] {name} is {brief(value)}, must be True or False")
    return bool(value)


def one_of(*choices: str | None) -> Check[str | None]:
    """Return a check for one of several words, at least two; None may be one of them."""

    def check(part: str, name: str, value: object) -> str | None:
        text = as_text(value)
        if not (value is None or text is not None) or text not in choices:
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be {_either(choices)}")
        return text

    return check


def instance(kind: type[T], words: str) -> Check[T]:
    """Return a check for an object of a class, which `words` describe, as "a Rule such as afflux.rules.fedbuff()"."""

    def check(part: str, name: str, value: object) -> T:
        if not isinstance(value, kind):
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be {words}")
        return value

    return check


def keyword_arguments(op: str, names: Iterable[str], options: Collection[str]) -> None:
    """Raise an AffluxError if the name of an option is unknown."""
    for name in names:
        if name not in options:
            raise AffluxError(f"[{op}] {brief(name)} is no option; {known_names(name, options)}")


def one_dtype_of(*choices: str) -> Check[str]:
    """Return a check for one of several dtypes, at least two. The argument may be any `Dtype`; the result is a name."""

    def check(part: str, name: str, value: object) -> str:
        dtype = dtype_name(value)
        if dtype not in choices or (isinstance(value, np.dtype) and not value.isnative):
            raise AffluxError(f"[{part}] {name} is {brief(value)}, must be {_either(choices)}")
        return dtype

    return check


def dtype_name(value: Dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"; for any other object some text. No library is imported.

    >>> dtype_name(np.float32), dtype_name(np.dtype("<f8")), dtype_name("bfloat16")
    ('float32', 'float64', 'bfloat16')
    """
    if isinstance(value, type):
        return value.__name__
    try:
        return str(getattr(value, "name", value)).removeprefix("torch.")  # str(torch.float32) is torch.float32
    except Exception as error:
        raise_if_from_signal(error)
        return f"of type {type(value).__name__}"


def _either(choices: Sequence[str | None]) -> str:
    *most, last = map(repr, choices)
    return f"{', '.join(most)} or {last}"


def optional(check: Check[T]) -> Check[T | None]:
    """Return a check for None or a value that passes `check`."""
    return lambda part, name, value: None if value is None else check(part, name, value)


def is_function(value: object) -> bool:
    """Return whether the value can be called and is not a class."""
    return callable(value) and not isinstance(value, type)


def is_int(value: object) -> TypeGuard[int]:
    """Return whether the value is an int of Python or NumPy, but no bool. For saved data; arguments need `as_int`."""
    return type(value) is int or (isinstance(value, _INTS) and not isinstance(value, bool))


def as_int(value: object) -> int | None:
    """Return the int of an argument: an int, an object with `__index__`, or a float without a fraction, also one in an
    array without dimensions; else None.

    >>> as_int(np.int8(3)), as_int(3.0), as_int(3.5), as_int(True), as_int("3")
    (3, 3, None, None, None)
    """
    if value is None:  # an argument that was left out, in the path of each push
        return None
    number = _index(value)
    if number is None:
        single = zero_dim(value)
        if isinstance(single, float | np.floating):
            number = result_or_none(lambda: int(single) if single.is_integer() else None)
    return number


def zero_dim(value: object) -> object:
    """Return the number in an array without dimensions, such as a loss of torch; any other object unchanged."""
    if isinstance(value, float | int):
        return value
    single = result_or_none(lambda: (value.item(),) if getattr(value, "shape", None) == () else None)  # type: ignore[attr-defined]
    return value if single is None else single[0]


def as_float(value: object) -> float | None:
    """Return an argument as a float if it is a number of Python or NumPy; None for other objects, and for an int that
    is too large.
    """
    if value is None or type(value) is float:
        return value
    if type(value) is int and -MOST_COUNT < value < MOST_COUNT:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = result_or_none(lambda: float(value))
    return None if number is None else float.__float__(number)


def as_text(value: object) -> str | None:
    """Return a str, also for an object of a subclass of str; None for other objects."""
    return str.__str__(value) if isinstance(value, str) else None


def _index(value: object) -> int | None:
    """Return the int of an int or an object with `__index__`; None for other objects and for bools of any library."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None

    def of_index() -> int | None:
        return None if dtype_name(getattr(value, "dtype", None)).startswith("bool") else int(index(value))  # type: ignore[arg-type]

    return result_or_none(of_index)


def result_or_none(convert: Callable[[], T | None]) -> T | None:
    """Return the result of a call of a foreign object's method; None if the method raises."""
    try:
        return convert()
    except Exception as error:
        raise_if_from_signal(error)
        return None


def loss_of(op: str, client_id: int | str | None, value: object) -> float:
    """Return a client's loss, also from an array without dimensions. None means unknown and gives NaN.

    Raises:
        AffluxError: the value is not a finite number, is a bool, or is an int whose magnitude is beyond 2**63.
    """
    if value is None:
        return nan
    single = zero_dim(value)
    number = as_float(single) if isinstance(single, NUMBERS) else None
    if number is None or not -inf < number < inf or (isinstance(single, int) and abs(number) > 2**63):
        raise AffluxError(
            f"[{op}] client {brief(client_id)}'s loss is {brief(value)}, must be a finite number, or None if unknown"
        )
    return number


def brief(value: object) -> str:
    """Return the value as one printable line for an error message: the beginning of a long text, and the type of any
    other value whose text is long.
    """
    if type(value) is str and len(value) <= 80 and len(text := repr(value)) <= 80:
        return text  # ids of clients
    if isinstance(value, str | bytes | bytearray) and len(value) > 80:
        return f"{value[:60]!r:.70}..."
    if isinstance(value, list | tuple | dict | set) and len(value) > 80:
        return f"of type {type(value).__name__}"
    # None: nested too deeply, an int of too many digits, or an object whose __repr__ raises
    printed = result_or_none(lambda: repr(value))
    return f"of type {type(value).__name__}" if printed is None or len(printed) > 80 or "\n" in printed else printed


def shortened(reason: str) -> str:
    """Return an error's message, or of a long one the first line and the end: traces of other processes have the cause
    at the end.
    """
    reason = reason.strip()
    if len(reason) <= _FIRST_LINE + _END:
        return reason
    return f"{reason.splitlines()[0][:_FIRST_LINE]} ... {reason[-_END:]}"


def printable(text: str) -> str:
    r"""Return a text with escapes for all characters that are not printable, such as line ends and control sequences.

    >>> printable("b\x1b[2Jö")
    'b\\x1b[2Jö'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_from_signal(error: BaseException | None, trace: TracebackType | None = None) -> bool:
    """Return whether an exception, or one during whose handling it was raised, comes from the program's own handler of
    a signal, such as a timeout's. The handler runs amid any code, and its exception says nothing about this code.

    Args:
        error: the exception.
        trace: its traceback, if the exception does not have it yet.
    """
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while error is not None and codes:
        trace = trace or error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                return True
            trace = trace.tb_next
        error = error.__context__
    return False


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a signal's handler: a function, a method, a partial or a callable object; None of another."""
    if not callable(handler):
        return None
    function = getattr(handler, "func", handler)
    codes = (getattr(callee, "__code__", None) for callee in (function, type(function).__call__))
    return next((code for code in codes if isinstance(code, CodeType)), None)


def raise_if_from_signal(error: Exception) -> None:
    """Raise an exception again that comes from a handler of a signal; do nothing with any other."""
    try:
        if is_from_signal(error):
            raise error
    finally:
        del error  # it would be in a cycle with this frame


def unreadable(subject: str, error: Exception) -> NoReturn:
    """Raise an AffluxError for a caller's object that raised when it was read. Errors of afflux, of memory and of a
    signal handler are raised unchanged.

    Args:
        subject: the operation and the argument, as "[push] client 7's update".
        error: the exception that it raised.
    """
    try:
        if isinstance(error, AffluxError | UnavailableError | MemoryError) or is_from_signal(error):
            raise error
        reason = shortened(result_or_none(partial(str, error)) or "")
        raise AffluxError(f"{subject} cannot be read: {type(error).__name__}: {reason}") from error
    finally:
        del error  # it would be in a cycle with this frame


def reads(subject: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for functions that read callers' objects of any library. Any exception of these objects
    becomes an AffluxError about `subject`, as "[layout] tree".
    """

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def reading(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                unreadable(subject, error)

        return reading

    return mark


def known_names(name: object, options: Iterable[str]) -> str:
    """Return the known names, for an error about an unknown name; those with the most similar spelling come first."""
    names, text = list(options), as_text(name)
    close = get_close_matches(text, names) if text is not None and len(text) <= 80 else []
    nearest = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{nearest}known: {', '.join(names)}"


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Raise ConfigError, listing the nearest and all known names, unless `name` is one of them."""
    choices = sorted(names)
    if name not in choices:
        raise ConfigError(f"unknown {what} {brief(name)}; {known_names(name, choices)}")


def path_of(op: str, name: str, value: object) -> Path:
    """Return the Path of a caller's argument; raise AffluxError if the argument is no path."""
    try:
        path = Path(value)  # type: ignore[arg-type]
        if b"\0" not in os.fsencode(path):
            return path
    except Exception as error:  # not a path, not encodable for the file system, or an object whose __fspath__ raises
        raise_if_from_signal(error)
    raise AffluxError(f"[{op}] {name} is {brief(value)}, must be a folder's path: a str or a Path")


#: The most bytes of a client's id in UTF-8. csrc/values.hpp has the same number.
MOST_ID_BYTES = 1024


def plain_id(client_id: object, op: str = "push") -> int | str:
    """Return the client id as Python's int or str.

    Args:
        client_id: an int from -2**63 to 2**64 - 1, another object with `__index__` in this range, or a str.
        op: the operation that messages name.

    Raises:
        AffluxError: another type (bool and float included), an int outside of the range, or a str that is too long or
            that UTF-8 cannot encode: one with a lone surrogate.
    """
    number = client_id if type(client_id) is int else None
    if number is None and isinstance(client_id, str):
        text = str.__str__(client_id)  # not str(): for a member of an Enum that is the name
        size = len(text)
        if not text.isascii() and size <= MOST_ID_BYTES:
            try:
                size = len(text.encode())
            except UnicodeEncodeError as error:
                raise AffluxError(f"[{op}] client_id {brief(text)} is no Unicode text: {error.reason}") from None
        if size > MOST_ID_BYTES:
            raise AffluxError(f"[{op}] client_id is {brief(text)}, must have at most {MOST_ID_BYTES} bytes of UTF-8")
        return text
    if number is None:
        number = _index(client_id)
    if number is None:
        raise AffluxError(f"[{op}] client_id is {brief(client_id)}, must be an int or a str")
    if not -(2**63) <= number < 2**64:
        raise AffluxError(f"[{op}] client_id is {brief(client_id)}, which does not fit into 64 bits")
    return number
