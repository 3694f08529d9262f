"""What a client has sent, in a form that the server's `push` reads without an error that it takes for its own; and
numbers that clients report.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NoReturn

from afflux.arrays.interop import all_own
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_float

#: Of one reply: the metrics that are kept, the characters of each name, and the numbers of all of them.
_MOST_NAMES, _MOST_CHARACTERS, _MOST_NUMBERS = 100, 100, 1000


def own_dict(arrays: Any) -> Any:
    """The arrays of a reply in a dict, with their shapes and dtypes read: what raises there is the client's fault."""
    if not isinstance(arrays, Mapping):
        return arrays
    found = dict(arrays)
    if not all_own(found.values()):
        for array in found.values():
            getattr(array, "shape", None), getattr(array, "dtype", None)
    return found


def bounded(metrics: Mapping[Any, Any], weight: str | None = None) -> dict[str, Any]:
    """The first metrics of a reply, within the limits above: numbers that float64 holds, and lists of such numbers.

    `weight` is kept in any case.
    """
    kept = {weight: metrics[weight]} if weight is not None and weight in metrics else {}
    found: dict[str, Any] = {}
    room = _MOST_NUMBERS
    for name, value in metrics.items():
        if name in kept:
            continue
        numbers = value if isinstance(value, list) else [value]
        fits = isinstance(name, str) and len(name) <= _MOST_CHARACTERS and len(numbers) <= room
        if fits and len(found) < _MOST_NAMES and all(as_float(number) is not None for number in numbers):
            found[name] = value
            room -= len(numbers)
    return {**kept, **found}


def finite_number(value: object) -> float | None:
    """A finite number; None of anything else."""
    number = as_float(value)
    return number if number is not None and isfinite(number) else None


def means_of(reports: Iterable[Mapping[str, Any]], weight: str | None = None) -> dict[str, float]:
    """The mean of each metric over the clients that report it.

    Args:
        reports: numbers by name, one mapping a client.
        weight: the name of the number that weighs the others, which each client reports; None: all weigh the same.

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
    """The model of a reply that cannot be read. The server that reads it counts the error, and keeps the reason."""

    def __init__(self, error: Exception) -> None:
        # An AffluxError passes through the layout's messages as it is. Never a MemoryError or an OSError, which `push`
        # takes for the server's own.
        kind = type(error).__name__
        try:
            self._reason = str(error) if isinstance(error, ValueError) else f"{kind}: {error}"
        except Exception:
            self._reason = f"{kind}, which cannot be printed"

    def __getitem__(self, name: str) -> NoReturn:
        raise AffluxError(self._reason)

    def __iter__(self) -> NoReturn:
        raise AffluxError(self._reason)

    def __len__(self) -> NoReturn:
        raise AffluxError(self._reason)
