"""The columns of the tables: a heading, and the text of each line under it."""

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
    """Return a column with a figure times `scale`; empty if a line has no such figure."""
    return Column(head, lambda line: "" if line.get(key) is None else format(scale * line[key], form))


def text(head: str, key: str) -> Column:
    return Column(head, lambda line: str(line.get(key) or ""))


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three digits, also for short times."""
    return f"{1e3 * seconds:.1f}" if seconds >= 1e-2 else f"{1e3 * seconds:.3g}"


def of_output(line: Line, key: str, form: str) -> str:
    """Format the error of the row's main output; empty for a contender without this output."""
    error = line["error"]
    return format(error[key], form) if error else ""


def relative_error(head: str) -> Column:
    """Return a column with the error of the row's main output divided by the largest sum of its terms' magnitudes."""
    return Column(head, lambda line: f"{line['error']['abs'] / line['error']['terms']:.1e}" if line["error"] else "")


ROLE = text("as", "role")
BY_D, BY_M, BY_N = number("d", "d", "_d"), number("M", "m", "_d"), number("N", "clients", "_d")
SPEED = (number("GB/s", "gbps", ".1f"), number("% of limit", "percent_of_limit", ".0f"))
SPAN = (
    Column("median ms", lambda line: milliseconds(line["median"])),
    Column("min .. max", lambda line: f"{milliseconds(line['min'])} .. {milliseconds(line['max'])}"),
)
#: On a GPU: the time of the kernels alone, and the share of the limit in it.
ALONE = (
    Column("kernels ms", lambda line: milliseconds(line["alone"]) if line.get("alone") else ""),
    number("their % of limit", "percent_alone", ".0f"),
)
TIME = (*SPAN, *SPEED, *ALONE)
TIMES_OURS = number("x afflux's time", "times_ours", ".2f")
COMPILING = number("compile s", "compile_seconds", ".1f")
ERROR = Column("error", lambda line: of_output(line, "abs", ".1e"))
ULP = Column("ulp", lambda line: of_output(line, "ulp", ".3g"))
TIMED = (ROLE, *TIME, TIMES_OURS, COMPILING, ERROR, ULP)
#: The columns of rows that time one update with its share of the round.
UPDATE = (
    number("us an update", "us", ".1f"),
    Column("min .. max", lambda line: " .. ".join(f"{1e6 * line[end] / line['m']:.1f}" for end in ("min", "max"))),
)
PROBE = (*SPAN, number("GB/s", "gbps", ".1f"), text("kind", "kind"), text("how", "how"))
KINDS = ("read", "read and write", "in place", "mixed")
LIMIT = (
    number("threads", "threads", "d"),
    number("limit GB/s", "gbps", ".1f"),
    text("set by", "by"),
    *(number(f"best {kind}", kind, ".1f") for kind in KINDS),
    text("how", "how"),
)
#: The columns of the summary: one line for each operation, afflux's own.
SUMMARY = (
    BY_D,
    BY_M,
    BY_N,
    text("dtype", "dtype"),
    number("threads", "threads", "d"),
    text("ISA", "isa"),
    number("MB", "bytes", ".4g", 1e-6),
    *SPAN,
    number("GB/s", "gbps", ".1f"),
    number("limit", "limit", ".1f"),
    number("% of limit", "percent_of_limit", ".0f"),
    *ALONE,
    number("x plain", "times_plain", ".2f"),
    number("x best", "times_best", ".2f"),
    ERROR,
)
