"""A row of the benchmark: an operation, its sizes, the contenders that compute it, and the columns of its table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.spec.columns import TIMED, Column, Line
from bench.spec.contender import Arrays, Contender
from bench.spec.inputs import Case, Float64
from bench.spec.streams import Traffic

#: name of an output -> (exact value, sum of the magnitudes of its terms)
Exact = dict[str, tuple[Float64, Float64]]


@dataclass(frozen=True)
class Asked:
    """The options of the command line that determine the cases; None: the row chooses."""

    d: int | None
    m: int | None
    threads: int
    quick: bool
    sets: int


D, QUICK_D = 25_000_000, 200_000


def one_case(asked: Asked, d: int = D, quick_d: int = QUICK_D, m: int = 10, **fields: Any) -> list[Case]:
    """Return one case, of these sizes if the command line has no others, with further fields of `Case`."""
    return [Case(asked.d or (quick_d if asked.quick else d), asked.m or m, asked.threads, sets=asked.sets, **fields)]


@dataclass(frozen=True)
class Row:
    """One operation, and the contenders that compute it."""

    name: str
    formula: str
    counted: str  #: a description of the bytes that `bytes` counts
    traffic: Callable[[int], Traffic]  #: the vectors that are read and written, a function of M
    contenders: list[Contender]
    cases: Callable[[Asked], list[Case]] = one_case
    reference: Callable[[Arrays], Exact] = lambda before: {}  #: the definition in float64; {}: without outputs
    output: str = "params"  #: the output whose error the tables show
    dtype: str = "float32"  #: dtype of the updates
    along: str = ""  #: d, m or clients: the size in which the cases differ, if the row shows how the time grows
    columns: tuple[Column, ...] = TIMED
    #: adds the row's own figures to the lines of all its cases
    compare: Callable[[list[Line]], None] = lambda lines: None


def planned(rows: Iterable[Row], cases: Callable[[Row], list[Case]]) -> dict[Case, list[Row]]:
    """Return the cases of these rows, and the rows that share each case."""
    plan: dict[Case, list[Row]] = {}
    for row in rows:
        for case in cases(row):
            plan.setdefault(case, []).append(row)
    return plan
