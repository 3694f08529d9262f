"""Small sums and products over the arrivals of a round, in one fixed order: the same bits on every CPU.

np.sum, np.dot and @ add in an order of their own that differs between CPUs; these add from the first to the last. All
are over float64 arrays, elementwise products and sums being fixed by IEEE 754.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def ordered_sum(values: Iterable[float]) -> float:
    """The sum in the given order.

    >>> ordered_sum([0.1, 0.2, 0.3])
    0.6000000000000001
    """
    total = 0.0
    for value in values:
        total = total + float(value)
    return total


def inner(a: Float64, b: Float64) -> float:
    """<a, b> of two vectors (M,).

    >>> inner(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    11.0
    """
    return ordered_sum(a * b)


def times(matrix: Float64, vector: Float64) -> Float64:
    """The product of a matrix (K, M) and a vector (M,), each entry summed from the first column to the last.

    >>> times(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([10.0, 1.0])).tolist()
    [12.0, 34.0]
    """
    total = np.zeros(len(matrix))
    for column, factor in zip(matrix.T, vector, strict=True):
        total = total + column * factor
    return total


def quadratic(matrix: Float64, vector: Float64) -> float:
    """<v, G v>: with a Gram matrix G, the squared norm of a linear combination; at least 0, whatever rounding does.

    >>> quadratic(np.array([[2.0, 0.0], [0.0, 3.0]]), np.array([1.0, 2.0]))
    14.0
    """
    return max(inner(vector, times(matrix, vector)), 0.0)
