"""The columns of the tables: a head, and the text that a line has under it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: the figures of one contender in one case, or of one probe
Line = dict[str, Any]


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[Line], str]


def number(head: str, key: str, form: str, scale: float = 1) -> Column:
    """A figure times `scale`, empty where there is none."""
    return Column(head, lambda line: "" if line.get(key) is None else format(scale * line[key], form))


def of_params(line: Line, key: str, form: str) -> str:
    """The error of the new params, empty for who makes none."""
    error = line["errors"].get("params")
    return format(error[key], form) if error else ""


SPEED = (number("GB/s", "gbps", ".1f"), number("% of limit", "percent_of_limit", ".0f"))
TIME = (
    number("median ms", "median", ".1f", 1e3),
    Column("min .. max", lambda line: f"{1e3 * line['min']:.1f} .. {1e3 * line['max']:.1f}"),
    *SPEED,
)
TIMES_PLAIN = number("x plain", "times_plain", ".2f")
ERROR = Column("error", lambda line: of_params(line, "abs", ".1e"))
ULP = Column("ulp", lambda line: of_params(line, "ulp", ".3g"))
TIMED = (*TIME, TIMES_PLAIN, ERROR, ULP)
PROBE = (*TIME, Column("kind", lambda line: line["kind"]))
LIMIT = (
    number("threads", "threads", "d"),
    number("limit GB/s", "gbps", ".1f"),
    *(number(kind, kind, ".1f") for kind in ("read", "write", "both", "in place")),
    Column("set by", lambda line: line["by"]),
)
