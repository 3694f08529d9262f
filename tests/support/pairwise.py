"""Rows of a product of parameters: those that hold every pair of values run always, all others in `make soak`."""

from itertools import chain, combinations, product

import pytest

#: Whether this session runs the tests of `make soak`; tests/conftest.py sets it before test files are imported.
soaking = False


def soak(*row):
    """A list of this row of parameters in `make soak`, and of none in other sessions, which generate no test for it."""
    return [pytest.param(*row, marks=pytest.mark.soak)] if soaking else []


def soak_all(rows):
    """The list of all these rows in `make soak`, and an empty list in other sessions."""
    return [param for row in rows for param in soak(*row)]


def cover(*axes):
    """Rows of the product in which every pair of values of two axes stands at least once, chosen greedily.

    Deterministic: of rows that add as many new pairs, the first one of the product.
    """
    columns = list(combinations(range(len(axes)), 2))
    numbers = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: {(i, j, row[i], row[j]) for i, j in columns} for row in numbers}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(numbers, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [tuple(axis[k] for axis, k in zip(axes, row, strict=True)) for row in sorted(chosen)]


def pairwise(names, *axes, always=(), indirect=False):
    """A parametrization by the product of the axes: `cover` and the rows of `always` in each run, the rest in soak."""
    now = [*cover(*axes), *always]
    rows = [[row] if row in now else soak(*row) for row in product(*axes)]
    return pytest.mark.parametrize(names, [*chain.from_iterable(rows)], indirect=indirect)
