"""The metrics of nodes: those that are kept until their step, and their mean without replies whose form differs."""

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log

from afflux.integrations._core import Metrics
from afflux.integrations._reading import bounded, finite_number
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief

#: A function from replies to their mean, a MetricRecord.
Mean = Callable[[list[Any]], Mapping[str, Any] | None]
#: The most characters, bytes and other values in the ConfigRecords of one reply that are kept.
_MOST_CONFIG = 10_000


class ReplyRecords(Mapping[str, Any]):
    """The MetricRecords of a reply, bounded, and its ConfigRecords: as a mapping JSON-able, for a checkpoint.

    ConfigRecords that are larger together than the limit are left out, from the first of them on.

    Attributes:
        content: the records, under their names: those of the argument, which is changed.
    """

    def __init__(self, content: RecordDict, weight: str) -> None:
        self.content, room = content, _MOST_CONFIG
        for name, record in [*content.items()]:
            if isinstance(record, MetricRecord):
                metrics = bounded(record, weight)
                if len(metrics) < len(record):
                    content[name] = MetricRecord(metrics)
            else:
                room -= len(name) + sum(len(key) + _size_of(value) for key, value in record.items())
                if room < 0:
                    del content[name]

    def __getitem__(self, kind: str) -> dict[str, dict[str, Any]]:
        records: Any = {"metrics": self.content.metric_records, "configs": self.content.config_records}[kind]
        return {name: {key: _encoded(value) for key, value in record.items()} for name, record in records.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(("metrics", "configs"))

    def __len__(self) -> int:
        return 2


def content_of(metrics: Metrics) -> RecordDict:
    """Return the records of `ReplyRecords`, also after a checkpoint."""
    if isinstance(metrics, ReplyRecords):
        return metrics.content
    content = RecordDict({name: MetricRecord(record) for name, record in metrics.get("metrics", {}).items()})
    for name, record in metrics.get("configs", {}).items():
        content[name] = ConfigRecord({key: _decoded(value) for key, value in record.items()})
    return content


def mean_of(
    what: str, replies: list[Any], contents: Iterable[RecordDict], weight: str, mean: Mean, *, needs_weight: bool = True
) -> MetricRecord | None:
    """Return the mean over the largest group of replies of the same form.

    The form of a reply is the name of its one MetricRecord, and the names and lengths of its metrics. If some replies
    have the weight, those without one are left out.

    Args:
        what: the subject of the lines of the log.
        replies: the arguments of `mean`.
        contents: the records of each reply.
        weight: the name of the metric that is the weight of the others.
        mean: called once, with the replies of the group; its errors are raised.
        needs_weight: do not call `mean` if no reply has a weight. It is never called if all weights are 0.

    Returns:
        The mean; None if there is none.
    """
    if not replies:
        return None
    alike, total = _most_alike(replies, contents, weight)
    if not alike or total == 0 or (needs_weight and total is None):
        log(WARNING, "%s cannot be aggregated: no reply has one MetricRecord with a positive %r", what, weight)
        return None
    if len(alike) < len(replies):
        log(WARNING, "%s: %d replies differ from the others and are left out", what, len(replies) - len(alike))
    record = mean(alike)
    if not (record is None or isinstance(record, Mapping)):
        raise AffluxError(f"[start] {what} is aggregated to {brief(record)}, must be a MetricRecord or None")
    return record if record is None or isinstance(record, MetricRecord) else MetricRecord(record)


def _most_alike(replies: list[Any], contents: Iterable[RecordDict], weight: str) -> tuple[list[Any], float | None]:
    """Return the replies of the most frequent form, and the sum of their weights; None if they have none."""
    groups: dict[Any, list[tuple[Any, float]]] = defaultdict(list)
    for reply, content in zip(replies, contents, strict=True):
        records = [(key, record) for key, record in content.items() if isinstance(record, MetricRecord)]
        if len(records) == 1:
            ((key, record),) = records
            number = finite_number(record.get(weight))
            form = frozenset((name, len(value) if isinstance(value, list) else None) for name, value in record.items())
            groups[number is not None and number >= 0, key, form].append((reply, number or 0.0))
    if not groups:
        return [], None
    # Of two equally frequent forms, the one with fewer numbers.
    best = max(groups, key=lambda group: (group[0], len(groups[group]), -sum(length or 1 for _, length in group[2])))
    return [reply for reply, _ in groups[best]], sum(number for _, number in groups[best]) if best[0] else None


def _size_of(value: Any) -> int:
    return sum(map(_size_of, value)) if isinstance(value, list) else len(value) if isinstance(value, str | bytes) else 1


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    return {"base64": b64encode(value).decode()} if isinstance(value, bytes) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return b64decode(value["base64"]) if isinstance(value, dict) else value
