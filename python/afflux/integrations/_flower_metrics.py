"""Metrics of nodes: bounded in size, and averaged without the records that do not go with the others."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from flwr.app import MetricRecord, RecordDict

from afflux.ops.validation import as_float

T = TypeVar("T")

#: Of one record: the names that are kept, the characters of each, and the numbers under all of them.
_MOST_NAMES, _MOST_CHARACTERS, _MOST_NUMBERS = 100, 100, 1000
#: The name of a record, and of each of its values, with the length of a list.
_Form = tuple[str, frozenset[tuple[str, int | None]]]


def trim(record: MetricRecord, weight: str) -> MetricRecord:
    """Takes out of a record what exceeds the limits, and numbers that float64 does not hold; `weight` stays."""
    names, numbers = 0, 0
    for name, value in [*record.items()]:
        if name == weight:
            continue
        own = value if isinstance(value, list) else [value]
        fits = len(name) <= _MOST_CHARACTERS and names < _MOST_NAMES and numbers + len(own) <= _MOST_NUMBERS
        if fits and all(as_float(number) is not None for number in own):
            names, numbers = names + 1, numbers + len(own)
        else:
            del record[name]
    return record


def mean_of(
    replies: Sequence[T],
    content_of: Callable[[T], RecordDict | None],
    weight: str,
    mean: Callable[[list[T]], MetricRecord | None],
) -> tuple[MetricRecord | None, int]:
    """The mean over these replies. If there is none, that over the largest number of them that have the same form.

    Args:
        replies: at least one.
        content_of: a reply's records; None: it is an error.
        weight: the name that each record needs.
        mean: raises if the replies do not go together.

    Returns:
        The mean, and how many replies it leaves out.
    """
    try:
        return mean([*replies]), 0
    except Exception:
        forms = [_form_of(content_of(each), weight) for each in replies]
        counts = Counter(form for form in forms if form is not None)
        if not counts:
            raise
        # Of two forms that are as frequent, the one of fewer numbers.
        most = max(counts, key=lambda form: (counts[form], -sum(length or 1 for _, length in form[1])))
        alike = [each for each, form in zip(replies, forms, strict=True) if form == most]
        if len(alike) == len(replies):
            raise
        return mean(alike), len(replies) - len(alike)


def _form_of(content: RecordDict | None, weight: str) -> _Form | None:
    """None: the content is not one MetricRecord with the weight."""
    found = [(key, record) for key, record in (content or {}).items() if isinstance(record, MetricRecord)]
    if len(found) != 1:
        return None
    ((key, record),) = found
    form = frozenset((name, len(value) if isinstance(value, list) else None) for name, value in record.items())
    return (key, form) if (weight, None) in form else None
