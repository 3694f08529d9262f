"""Clients' messages, prepared for the server's `push`: an error while reading them never looks like a server error.

Also reads the numbers that clients report.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, NoReturn

from afflux._engine import all_own
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_float, brief, zero_dim

#: Types for `isinstance`, which recognizes a dict faster.
MAPPINGS = (dict, Mapping)
#: The limits of one reply: kept metrics, characters of each name, and numbers in all metrics.
_MOST_NAMES, _MOST_CHARACTERS, _MOST_NUMBERS = 100, 100, 1000


def own_dict(arrays: Any) -> dict[str, Any]:
    """Return the arrays of a reply in a new dict, after reading their shapes and dtypes, which may raise an error."""
    if not isinstance(arrays, MAPPINGS):
        raise ValueError(f"the model of the reply is {brief(arrays)}, must be arrays by name")
    found = dict(arrays)
    if not all_own(found.values()):
        for name, array in found.items():
            if hasattr(array, "materialize"):  # NVFlare has left it on disk
                found[name] = array = array.materialize()
            getattr(array, "shape", None), getattr(array, "dtype", None)
    return found


def bounded(metrics: Mapping[Any, Any], weight: str | None = None) -> dict[str, Any]:
    """Return the first metrics of a reply, within the limits above: numbers in float64's range, and lists of them.

    The metric `weight` is always kept.
    """
    record = {weight: metrics[weight]} if weight is not None and weight in metrics else {}
    most_names, room = _MOST_NAMES + len(record), _MOST_NUMBERS
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else (value,)
        fits = isinstance(name, str) and len(name) <= _MOST_CHARACTERS and len(numbers) <= room and name not in record
        if not fits or len(record) >= most_names:
            continue
        if None not in map(as_float, numbers):
            record[name] = value
            room -= len(numbers)
    return record


def finite_number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if value is None:
        return None
    number = as_float(value)
    return number if number is not None and isfinite(number) else None


def fraction_of(value: object) -> float | None:
    """Return a positive number with a fraction, also of an array without dimensions; None for anything else."""
    number = finite_number(zero_dim(value))
    return None if number is None or number <= 0 or number.is_integer() else number


def means_of(reports: Iterable[Mapping[str, Any]], weight: str | None = None) -> dict[str, float]:
    """Return the mean of each metric over the clients that report it.

    Args:
        reports: one mapping for each client: numbers by name.
        weight: the name of the metric that is the weight of the others; None: equal weights.

    Returns:
        The means that are finite, by name.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for report in reports:
        for name, value in report.items():
            if name != weight:
                values.setdefault(name, []).append((value, 1 if weight is None else report[weight]))
    means = {name: sum(x * w for x, w in own) / sum(w for _, w in own) for name, own in values.items()}
    return {name: mean for name, mean in means.items() if isfinite(mean)}


class Unreadable(Mapping[str, Any]):
    """A replacement for the model of a reply that cannot be read: the server counts the error and keeps the reason."""

    def __init__(self, error: Exception) -> None:
        # This is an AffluxError, because the layout passes it on unchanged. It is never a MemoryError or an OSError,
        # because `push` treats these as errors of the server.
        kind = type(error).__name__
        self._reason = f"{kind}, which cannot be printed"
        with suppress(Exception):
            self._reason = str(error) if isinstance(error, ValueError) else f"{kind}: {error}"

    def _refuse(self, name: str = "") -> NoReturn:
        raise AffluxError(self._reason)

    __getitem__ = __iter__ = __len__ = _refuse
