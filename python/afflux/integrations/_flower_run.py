"""Messages to and from the nodes of Flower's Grid, and the records in them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from logging import INFO, WARNING
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from afflux import Task
from afflux.aggregation.reports import Pulled
from afflux.integrations._core import Metrics, Trained, TrainingRun
from afflux.integrations._flower_metrics import ReplyRecords, content_of, mean_of
from afflux.integrations._loop import Reply, Transport
from afflux.integrations._npy import bytes_of, reads_files, view_of
from afflux.integrations._reading import bounded
from afflux.integrations._versions import OncePerVersion
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
TrainConfig: TypeAlias = ConfigRecord | Callable[[int], ConfigRecord]
NodeConfig = Callable[[int, int], Mapping[str, Any]]
Choose = Callable[[list[int], int, int], Iterable[int]]
#: The fields of a `Result` that a checkpoint keeps, and for how many steps: its cost then stays constant.
_History = Literal["train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"]
_STEPS_KEPT = 1000
_Notes = dict[_History, dict[int, dict[str, int | float | list[int | float]]]]
#: The most steps whose evaluations by nodes run at the same time.
_MOST_STEPS = 100
#: At its end, a run waits for evaluations this number of seconds, or 3 times the duration of its slowest reply if that
#: is longer, but not longer than the timeout: a node may have to train, and then to evaluate two versions.
_LEAST_WAIT = 10.0
#: Seconds from the timeout to the end of a message's life. At its end the SuperLink deletes a reply that the server has
#: not pulled, for example because evaluate_fn takes long, and answers for the node.
_TTL_MARGIN = 3600.0


class _Asked(NamedTuple):
    step: int
    node: int | None  #: None: the Grid gives messages other ids
    start: float  #: its start, by `TrainingRun.now`


@dataclass(eq=False)
class FlowerTransport(Transport):
    """The nodes of a Grid, which train and evaluate; the metrics go to `strategy.result`.

    A node that has not replied to an evaluation gets no other one before its timeout, except for that of the last step.
    So each node has at most two open evaluations, for any number of steps.
    """

    strategy: Any  #: an AsyncStrategy, whose module imports this one
    grid: Grid
    training: TrainingRun
    train_config: TrainConfig  #: configuration for the nodes that train, or a function of the step
    evaluate_config: ConfigRecord  #: configuration for the nodes that evaluate
    evaluate_fn: EvaluateFn | None  #: evaluates a version on the server
    last: int  #: the step that ends the run
    asked: dict[str, _Asked] = field(default_factory=dict)  #: evaluations without a reply, by the key of the reply
    evaluated: dict[int, list[Message]] = field(default_factory=dict)  #: replies by step, of steps that have not ended
    evaluated_arrays: dict[int, ArrayRecord] = field(default_factory=dict)  #: of these steps, if the user may read them

    name = "flower"
    logger = FLOWER_LOGGER
    schema = _Notes

    def __post_init__(self) -> None:
        #: The arrays of a version.
        self.arrays = OncePerVersion(lambda version: record_of(self.training.versions.of(version)))
        #: Whether FedAvg's own method aggregates evaluations.
        self.is_default = getattr(self.strategy.aggregate_evaluate, "__func__", None) is FedAvg.aggregate_evaluate
        if (choose := self.strategy.choose) is not None:
            self.training.clients.select = lambda nodes, count: choose(nodes, count, self.training.server.version + 1)

    # Messages

    def clients(self) -> Iterable[ClientId]:
        """Return the ids of the nodes."""
        return sorted(self.grid.get_node_ids())

    def send(self, address: ClientId, task: Task) -> str | None:
        """Push a message; return its id, or None."""
        strategy, step = self.strategy, task.version + 1
        config, of_node = self.train_config, strategy.node_config
        with self.training.untimed():
            if callable(config):
                config = _checked(config(step), f"train_config for step {step}")
            if of_node is not None:
                what = f"node_config for node {address} and step {step}"
                config = {**config, **_checked(of_node(address, step), what)}
        config = ConfigRecord({**config, "server-round": step})
        content = RecordDict({strategy.arrayrecord_key: self.arrays(task.pulled), strategy.configrecord_key: config})
        ttl = self.training.timeout + _TTL_MARGIN
        message = Message(content, address, MessageType.TRAIN, group_id=str(step), ttl=ttl)
        return next(iter(self.grid.push_messages([message])), None) or None  # none or "" for a node that has left

    def replies(self, keys: list[str]) -> list[tuple[str, Reply]]:
        """Return the replies of nodes that train; store those of nodes that evaluate."""
        found: list[tuple[str, Reply]] = []
        now = self.training.now()
        for key, message, error in self._pulled([*keys, *self.asked]):
            if key in self.asked:
                self._take_evaluation(self.asked.pop(key), message, error)
            else:
                found.append((key, error or partial(self._trained, message)))
        self._end_evaluations(now, self.training.timeout)
        return found

    def _pulled(self, keys: list[str]) -> list[tuple[str, Message | None, str | None]]:
        """Pull the messages that have arrived, each with the key of the message that it answers, and its error, if any.

        The key identifies the answered message, not the type: Flower's own errors have the type "system".
        """
        try:
            messages = list(self.grid.pull_messages(keys)) if keys else []
        except Exception as failure:
            list(self.grid.get_node_ids())  # also raises if the error does not concern a message
            if len(keys) == 1:
                return [(keys[0], None, f"its message cannot be read: {failure!r}")]
            found = [pulled for key in keys for pulled in self._pulled([key])]
            if len(found) == len(keys) and all(message is None for _, message, _ in found):
                raise
            return found
        return [(each.metadata.reply_to_message_id, each, _error_of(each)) for each in messages]

    # Training

    def _trained(self, message: Message) -> Trained:
        strategy, records = self.strategy, message.content.copy()  # its properties by kind take 10 us each
        arrays = {name: record for name, record in records.items() if isinstance(record, ArrayRecord)}
        for name in arrays:
            del records[name]
        metrics = [record for record in records.values() if isinstance(record, MetricRecord)]
        if len(arrays) != 1 or len(metrics) > 1:
            counts = f"{len(arrays)} ArrayRecords and {len(metrics)} MetricRecords"
            raise ValueError(f"the reply holds {counts}: must be one of each")
        weight, key, client = strategy.weighted_by_key, strategy.client_key, None
        numbers = dict(metrics[0].items()) if metrics else {}
        if isinstance(key, str):
            client = next((record[key] for record in records.values() if key in record), None)
        reports = ReplyRecords(records, weight) if metrics else None
        count, loss, rate, steps = map(numbers.get, (weight, strategy.loss_key, "client-lr", "local-steps"))
        return Trained(model_of(*arrays.values()), count, loss, rate, steps, reports, client, numbers)

    def step_done(self, step: int, metrics: list[Metrics]) -> object:
        """Aggregate the metrics."""
        key, aggregate = self.strategy.weighted_by_key, self.strategy.train_metrics_aggr_fn
        contents, is_default = [content_of(each) for each in metrics], aggregate is aggregate_metricrecords
        what = f"Metrics of step {step}"
        mean = mean_of(what, contents, contents, key, lambda some: aggregate(some, key), needs_weight=is_default)
        if mean is not None:
            self.strategy.result.train_metrics_clientapp[step] = mean
        return "" if mean is None else mean

    # Evaluation

    def evaluate(self, newest: Pulled) -> None:
        """Evaluate on the server, and send evaluations to nodes, in parallel with training."""
        step, arrays = newest.version, self.arrays(newest)
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(step, arrays)
        if not (metrics is None or isinstance(metrics, MetricRecord)):
            what = f"evaluate_fn for step {step} is {brief(metrics)}"
            raise AffluxError(f"[start] the result of {what}, must be a MetricRecord or None")
        if metrics is not None:
            log(INFO, "Global evaluation of step %d: %s", step, metrics)
            self.strategy.result.evaluate_metrics_serverapp[step] = metrics
        messages = self._evaluations_of(step, arrays) if step > 0 else []
        if isinstance(messages, str):
            log(INFO, "Step %d is not evaluated by nodes: %s", step, messages)
        elif messages:
            now, keys = self.training.now(), self.grid.push_messages(messages)
            # The Grid has set the ids of the messages, and need not return one for each of them.
            node_of = {each.metadata.message_id: each.metadata.dst_node_id for each in messages}
            for key in filter(None, keys):
                self.asked[key] = _Asked(step, node_of.get(key), now)
                self.evaluated.setdefault(step, [])
            is_own = not self.is_default or self.strategy.evaluate_metrics_aggr_fn is not aggregate_metricrecords
            if step in self.evaluated and is_own:  # functions of the user may read the arrays
                self.evaluated_arrays[step] = arrays

    def _evaluations_of(self, step: int, arrays: ArrayRecord) -> list[Message] | str:
        """Return messages to the free nodes that `configure_evaluate` chooses; or the reason why no node evaluates."""
        strategy, is_last = self.strategy, step >= self.last
        there, least = len([*self.grid.get_node_ids()]), max(strategy.min_available_nodes, strategy.min_evaluate_nodes)
        if strategy.fraction_evaluate and there < least:  # FedAvg would wait for these nodes, and block training
            return f"{there} are there, of {least}"
        if len(self.evaluated) >= _MOST_STEPS and not is_last:
            oldest = next(iter(self.evaluated))
            if len(self.evaluated[oldest]) < max(1, strategy.min_evaluate_nodes):
                return f"evaluations of {len(self.evaluated)} steps go on"
            self._end_evaluation(oldest)
        messages = [*strategy.configure_evaluate(step, arrays, ConfigRecord({**self.evaluate_config}), self.grid)]
        busy = set() if is_last else {asked.node for asked in self.asked.values()}
        free = [message for message in messages if message.metadata.dst_node_id not in busy]
        if len(free) < min(len(messages), strategy.min_evaluate_nodes):
            return f"{len(messages) - len(free)} of {len(messages)} have not replied to an earlier evaluation"
        return free

    def _take_evaluation(self, asked: _Asked, message: Message, error: str | None) -> None:
        self.training.note_duration(asked.start)
        if error is not None:
            log(WARNING, "No evaluation of step %d by node %s: %s", asked.step, asked.node, error)
        elif asked.step in self.evaluated:
            for name, record in message.content.metric_records.items():
                message.content[name] = MetricRecord(bounded(record, self.strategy.weighted_by_key))
            self.evaluated[asked.step].append(message)

    def _end_evaluations(self, now: float, seconds: float) -> None:
        """End the evaluations that have waited for `seconds` at the time `now`, and the steps without open ones."""
        for key in [key for key, asked in self.asked.items() if now - asked.start >= seconds]:
            step, node, start = self.asked.pop(key)
            log(WARNING, "No evaluation of step %d by node %s within %.1f s", step, node, now - start)
        for step in sorted(self.evaluated.keys() - {asked.step for asked in self.asked.values()}):
            self._end_evaluation(step)

    def _end_evaluation(self, step: int) -> None:
        strategy, what, replies = self.strategy, f"Evaluation of step {step}", self.evaluated.pop(step)
        contents, aggregate = (each.content for each in replies), partial(strategy.aggregate_evaluate, step)
        strategy.evaluated_arrays = self.evaluated_arrays.pop(step, None)
        with self.training.untimed():
            mean = mean_of(what, replies, contents, strategy.weighted_by_key, aggregate, needs_weight=self.is_default)
        strategy.evaluated_arrays = None
        if mean is not None:
            history = strategy.result.evaluate_metrics_clientapp
            is_newest = step > next(reversed(history), 0)
            later = {} if is_newest else {each: history.pop(each) for each in sorted(history) if each > step}
            history.update({step: mean, **later})
            log(INFO, "%s by nodes: %s", what, mean)

    def finish(self) -> None:
        """Wait for the open evaluations, but only a limited time for nodes that do not reply."""
        training = self.training
        until = training.now() + min(training.timeout, max(_LEAST_WAIT, 3 * training.slowest))
        self.replies([])
        while self.evaluated and training.now() < until:
            self.wait(training.settings.poll_interval)
            self.replies([])
        self._end_evaluations(training.now(), 0.0)

    # Checkpoints

    def notes(self) -> Mapping[str, Any]:
        """Return the history of the newest steps."""
        history = {name: reversed(getattr(self.strategy.result, name).items()) for name in get_args(_History)}
        return {name: {step: dict(own) for step, own in islice(each, _STEPS_KEPT)} for name, each in history.items()}

    def restore(self, notes: _Notes) -> None:
        """Restore a history."""
        for name, kept in notes.items():
            getattr(self.strategy.result, name).update({step: MetricRecord(kept[step]) for step in sorted(kept)})


def _checked(config: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise AffluxError(f"[start] the result of {what} is {brief(config)}, must be a ConfigRecord")
    return config


def _error_of(message: Message) -> str | None:
    return f"error {message.error.code}: {message.error.reason}" if message.has_error() else None


@reads_files
def model_of(record: ArrayRecord) -> dict[str, Any]:
    """Return the arrays of a record by name, as read-only views of its bytes."""
    return {name: view_of(array.data, array.dtype) for name, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a record of these arrays, copied once."""
    kind = "numpy.ndarray"  # Flower's name for bytes in NumPy's file format
    return ArrayRecord({name: Array(str(a.dtype), a.shape, kind, bytes_of(a)) for name, a in arrays.items()})


def roles_of(config: Any) -> dict[str, Any]:
    """Return the roles of a ConfigRecord's list, such as ["bn.*=local"], by patterns."""
    texts = config if isinstance(config, list) else [config]
    if not all(isinstance(text, str) and "=" in text for text in texts):
        raise AffluxError(f'[AsyncStrategy] roles is {brief(config)}, must be a list such as ["bn.*=local"]')
    return dict(text.rpartition("=")[::2] for text in texts)
