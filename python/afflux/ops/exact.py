"""Arithmetic with the same bits on every CPU: exp, log, pow, and small sums.

`exp`, `log` and `pow` replace those of `math`. They use + - * / and integer operations only, on numbers of 106 bits.
The error is below 0.51 ulp (measured in test_elementary.py), below 1 ulp where the result is subnormal. Special
values are those of C99's functions: an undefined value is NaN, a value that is too large is infinite. Only an argument
that is not a number raises an AffluxError. A call takes one or two microseconds.

`ordered_sum` adds from the first element to the last. np.sum, np.dot and @ add in an order that differs between CPUs.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from afflux import _engine
from afflux.ops.validation import any_number

Float64 = npt.NDArray[np.float64]


def exp(x: float) -> float:
    """Return e**x.

    >>> exp(1.0)
    2.718281828459045
    >>> exp(float("-inf"))
    0.0
    """
    return _engine.exp(x if type(x) is float else any_number("exp", "x", x))


def log(x: float) -> float:
    """Return the natural logarithm of x: -inf at 0, NaN below 0.

    >>> log(10.0)
    2.302585092994046
    >>> log(0.0)
    -inf
    """
    return _engine.log(x if type(x) is float else any_number("log", "x", x))


def pow(x: float, y: float) -> float:
    """Return x**y.

    The result is 1 if y is 0 or x is 1, even if the other argument is NaN. The result is NaN if x is finite and
    negative, and y is finite and not an integer.

    >>> pow(2.0, 0.5)
    1.4142135623730951
    >>> pow(0.0, -1.0)
    inf
    """
    if type(x) is not float or type(y) is not float:
        x, y = any_number("pow", "x", x), any_number("pow", "y", y)
    return _engine.pow(x, y)


def ordered_sum(values: Iterable[float]) -> float:
    """Return the sum, added in the given order.

    >>> ordered_sum([0.1, 0.2, 0.3])
    0.6000000000000001
    """
    total = 0.0
    for value in values:
        total = total + float(value)
    return total
