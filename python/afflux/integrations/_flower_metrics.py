"""The mean of the metrics of nodes, without replies whose form differs from the others."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log


def mean_of(
    what: str,
    replies: list[Any],
    contents: Iterable[RecordDict],
    weight: str,
    mean: Callable[[list[Any]], MetricRecord | None],
) -> MetricRecord | None:
    """Return the mean over these replies.

    If `mean` raises, return the mean over the largest group of replies of the same form: one MetricRecord with
    `weight`, and with the same names and lengths.

    Returns:
        The mean. None, with a reason in the log, if there is none.
    """
    try:
        return mean(replies) if replies else None
    except Exception:  # the contents of nodes may differ in form
        alike = _most_alike(replies, contents, weight)
    try:
        found = mean(alike)
    except Exception as error:
        log(WARNING, "%s cannot be aggregated: %r", what, error)
        return None
    log(WARNING, "%s: %d replies differ from the others and are left out", what, len(replies) - len(alike))
    return found


def _most_alike(replies: list[Any], contents: Iterable[RecordDict], weight: str) -> list[Any]:
    """Return the replies of the most frequent form; all replies, if none has a form."""
    alike = defaultdict(list)
    for reply, content in zip(replies, contents, strict=True):
        found = [(key, record) for key, record in content.items() if isinstance(record, MetricRecord)]
        values = [pair for _, record in found for pair in record.items()]
        form = frozenset((name, len(value) if isinstance(value, list) else None) for name, value in values)
        if len(found) == 1 and (weight, None) in form:
            alike[found[0][0], form].append(reply)
    # Of two equally frequent forms, the one with fewer numbers.
    sizes = {key: (len(alike[key]), -sum(length or 1 for _, length in key[1])) for key in alike}
    return alike[max(sizes, key=sizes.__getitem__)] if alike else replies
