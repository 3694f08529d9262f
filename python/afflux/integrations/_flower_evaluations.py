"""Evaluations by the nodes of Flower's Grid, beside their training."""

from collections.abc import Iterable
from dataclasses import dataclass
from logging import INFO, WARNING
from time import monotonic
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from afflux.integrations._flower_metrics import mean_of, trim

#: Steps whose evaluations go on at the same time.
_MOST_STEPS = 100


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message that has no reply."""

    step: int
    node: int | None  #: None: the Grid gives messages other ids
    start: float  #: by time.monotonic()
    deadline: float  #: likewise


class Evaluations:
    """What the nodes were asked to evaluate.

    A node that has not replied is not asked again until its time is over, except for the last step. So at most two
    messages of each node are open, however many steps are made.

    Args:
        strategy: an AsyncStrategy.
        grid: of the run.
        config: sent to the nodes.
        timeout: seconds for a reply.
        last: the step that ends the run.
        means: by step; added to.

    Attributes:
        slowest: seconds that a reply took at most.
    """

    def __init__(
        self,
        strategy: Any,
        grid: Grid,
        config: ConfigRecord | None,
        timeout: float,
        last: int,
        means: dict[int, MetricRecord],
    ) -> None:
        self._strategy, self._grid, self._timeout, self._last = strategy, grid, timeout, last
        self._config = ConfigRecord() if config is None else config
        self._means = means
        self._open: dict[str, _Asked] = {}
        self._replies: dict[int, list[Message]] = {}  # of the steps that have not ended
        self.slowest = 0.0

    def __len__(self) -> int:
        """How many steps have not ended."""
        return len(self._replies)

    @property
    def keys(self) -> Iterable[str]:
        """Of the replies that have not come."""
        return self._open.keys()

    def ask(self, step: int, arrays: ArrayRecord) -> None:
        """Sends a version to the nodes that `configure_evaluate` chooses, and that are free to evaluate it."""
        strategy, there = self._strategy, len(list(self._grid.get_node_ids()))
        least = max(strategy.min_available_nodes, strategy.min_evaluate_nodes)
        if strategy.fraction_evaluate and there < least:  # FedAvg would wait for them, and training with it
            log(WARNING, "Step %d is not evaluated by nodes: %d are there, of %d", step, there, least)
            return
        if len(self) >= _MOST_STEPS and step < self._last and not self._make_room():
            log(INFO, "Step %d is not evaluated by nodes: evaluations of %d steps go on", step, len(self))
            return
        config = ConfigRecord(self._config)
        messages = list(strategy.configure_evaluate(step, arrays, config, self._grid))
        if step < self._last:
            busy = {asked.node for asked in self._open.values()}
            free = [message for message in messages if message.metadata.dst_node_id not in busy]
            if len(free) < min(len(messages), strategy.min_evaluate_nodes):
                log(
                    INFO,
                    "Step %d is not evaluated by nodes: %d of %d have not replied to an earlier evaluation",
                    *(step, len(messages) - len(free), len(messages)),
                )
                return
            messages = free
        if not messages:
            return
        now, keys = monotonic(), [key for key in self._grid.push_messages(messages) if key]
        # The Grid has set the ids of the messages, and need not return one for each of them.
        node_of = {each.metadata.message_id: each.metadata.dst_node_id for each in messages}
        for key in keys:
            self._open[key] = _Asked(step, node_of.get(key), now, now + self._timeout)
            self._replies.setdefault(step, [])

    def _make_room(self) -> bool:
        """Ends the oldest step, if as many nodes have replied as an evaluation needs."""
        oldest = next(iter(self._replies))
        if len(self._replies[oldest]) < max(1, self._strategy.min_evaluate_nodes):
            return False
        self._end(oldest)
        return True

    def take(self, key: str, message: Message | None) -> None:
        """Takes a reply; None: it cannot be read."""
        asked = self._open.pop(key)
        self.slowest = max(self.slowest, monotonic() - asked.start)
        if message is None or asked.step not in self._replies:
            return
        for record in _content_of(message).values():
            if isinstance(record, MetricRecord):
                trim(record, self._strategy.weighted_by_key)
        self._replies[asked.step].append(message)

    def end(self) -> None:
        """Ends the steps that wait for no reply any more."""
        now = monotonic()
        for key in [key for key, asked in self._open.items() if now > asked.deadline]:
            asked = self._open.pop(key)
            log(WARNING, "No evaluation of step %d by node %s within %.1f s", asked.step, asked.node, now - asked.start)
        awaited = {asked.step for asked in self._open.values()}
        for step in [step for step in self._replies if step not in awaited]:
            self._end(step)

    def hasten(self, seconds: float) -> None:
        """Waits for no reply longer than this."""
        latest = monotonic() + seconds
        for key, asked in self._open.items():
            self._open[key] = _Asked(asked.step, asked.node, asked.start, min(asked.deadline, latest))

    def _end(self, step: int) -> None:
        replies = self._replies.pop(step)
        if not replies:
            return
        try:
            mean, left_out = mean_of(
                replies,
                _content_of,
                self._strategy.weighted_by_key,
                lambda some: self._strategy.aggregate_evaluate(step, some),
            )
        except Exception as error:  # what nodes say need not go together
            log(WARNING, "Evaluation of step %d cannot be aggregated: %r", step, error)
            return
        if left_out:
            log(WARNING, "Evaluation of step %d: %d replies differ from the others and are left out", step, left_out)
        if mean is not None:
            self._means[step] = mean
            log(INFO, "Evaluation of step %d by nodes: %s", step, mean)


def _content_of(message: Message) -> RecordDict:
    return RecordDict() if message.has_error() else message.content
