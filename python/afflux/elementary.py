"""exp, log and pow whose bits are the same on every CPU: for weights and learning rates, where `math` is not allowed.

They use + - * / and integer work only, in numbers of 106 bits inside. The error is below 0.51 ulp (measured, see
tests/test_elementary.py), below 1 ulp where the result is subnormal. Special values are those of C99's functions;
nothing raises: what has no value is NaN, what is too large is infinite. A microsecond or two a call.
"""

from afflux import _engine


def exp(x: float) -> float:
    """e**x.

    >>> exp(1.0)
    2.718281828459045
    >>> exp(float("-inf"))
    0.0
    """
    return _engine.exp(x)


def log(x: float) -> float:
    """The natural logarithm; -inf at 0, NaN below.

    >>> log(10.0)
    2.302585092994046
    >>> log(0.0)
    -inf
    """
    return _engine.log(x)


def pow(x: float, y: float) -> float:
    """x**y: 1 where y is 0 or x is 1, even beside NaN; NaN for a negative x and a y that is no integer.

    >>> pow(2.0, 0.5)
    1.4142135623730951
    >>> pow(0.0, -1.0)
    inf
    """
    return _engine.pow(x, y)
