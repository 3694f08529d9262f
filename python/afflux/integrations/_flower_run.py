"""Messages to and from the nodes of Flower's Grid, and the records in them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING
from time import monotonic, sleep
from typing import Any

import msgspec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from afflux import Pulled, Task
from afflux.integrations._core import Metrics, Trained, TrainingRun
from afflux.integrations._loop import Reply, Transport
from afflux.integrations._npy import array_of, bytes_of
from afflux.ops.errors import AffluxError
from afflux.rules.rule import ClientId

_NUMPY = "numpy.ndarray"  # what Flower calls bytes in NumPy's file format

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_MetricsByStep = dict[int, dict[str, int | float | list[int | float]]]
#: What a checkpoint keeps of a `Result`.
_HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint stores of a run of Flower."""

    train_metrics_clientapp: _MetricsByStep = {}
    evaluate_metrics_clientapp: _MetricsByStep = {}
    evaluate_metrics_serverapp: _MetricsByStep = {}
    client_key: str | None = None  #: in words; None: not known


@dataclass(slots=True)
class _Evaluation:
    """Of one step, by nodes."""

    keys: set[str]  #: of replies that have not come
    deadline: float  #: by time.monotonic()
    replies: list[Message] = field(default_factory=list)


class FlowerTransport(Transport):
    """The nodes of a Grid.

    Args:
        strategy: an AsyncStrategy, whose module imports this one.
        grid: of the run.
        training: likewise.
        initial: the model.
        train_config: sent to the nodes that train.
        evaluate_config: sent to the nodes that evaluate.
        evaluate_fn: evaluates a version here.
    """

    logger = FLOWER_LOGGER
    #: A new run of Flower has a new id, and the replies to messages of another run cannot be pulled.
    replies_come = False
    schema = _Notes

    def __init__(
        self,
        strategy: Any,
        grid: Grid,
        training: TrainingRun,
        initial: ArrayRecord,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self._strategy, self._grid, self._training = strategy, grid, training
        self._train_config = ConfigRecord() if train_config is None else train_config
        self._evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._evaluate_fn = evaluate_fn
        self._record = (-1, initial)  # of the version that was sent last
        self._evaluations: dict[int, _Evaluation] = {}
        self.history = Result()

    def clients(self) -> Iterable[ClientId]:
        """The ids of the nodes."""
        return sorted(self._grid.get_node_ids())

    # Training

    def send(self, address: ClientId, task: Task) -> str | None:
        """Pushes a message."""
        step, strategy = task.version + 1, self._strategy
        config = ConfigRecord({**self._train_config, "server-round": step})
        content = RecordDict({strategy.arrayrecord_key: self.arrays(task.pulled), strategy.configrecord_key: config})
        ttl = self._training.timeout
        message = Message(content, address, MessageType.TRAIN, group_id=str(step), ttl=ttl)
        keys = list(self._grid.push_messages([message]))
        return keys[0] if keys and keys[0] else None  # none, None or "" for a node that has gone

    def arrays(self, version: Pulled) -> ArrayRecord:
        """The arrays of a version, made once for all nodes that it is sent to."""
        if self._record[0] != version.version:
            self._record = version.version, record_of(self._training.versions.of(version))
        return self._record[1]

    def replies(self, keys: list[str]) -> Iterable[Reply]:
        """Those of nodes that train; those of nodes that evaluate are kept here."""
        evaluating = {key: each for each in self._evaluations.values() for key in each.keys}
        found = []
        for key, message in self._pulled([*keys, *evaluating]):
            if key not in evaluating:
                found.append(self._reply(key, message))
                continue
            evaluating[key].keys.discard(key)
            if isinstance(message, Message):
                evaluating[key].replies.append(message)
        self._end_evaluations()
        return found

    def _pulled(self, keys: list[str]) -> list[tuple[str, "Message | Exception"]]:
        """The messages that have come, by the key of what they reply to, or the error of a message that cannot be read.

        What a message is about says the key, not its type: an error of Flower's own is of the type "system".
        """
        if not keys:
            return []
        try:
            messages = list(self._grid.pull_messages(keys))
        except Exception:
            list(self._grid.get_node_ids())  # raises, too, if it is not about a message
            found = [pulled for key in keys for pulled in self._pulled_alone(key)]
            if len(keys) > 1 and len(found) == len(keys) and all(isinstance(each, Exception) for _, each in found):
                raise
            return found
        return [(message.metadata.reply_to_message_id, message) for message in messages]

    def _pulled_alone(self, key: str) -> list[tuple[str, "Message | Exception"]]:
        try:
            return [(key, message) for message in self._grid.pull_messages([key])]
        except Exception as error:
            return [(key, error)]

    def _reply(self, key: str, message: "Message | Exception") -> Reply:
        if isinstance(message, Exception):
            return Reply(key, _nothing, f"its message cannot be read: {type(message).__name__}: {message}")
        error = f"error {message.error.code}: {message.error.reason}" if message.has_error() else None
        return Reply(key, partial(self._trained, message), error)

    def _trained(self, message: Message) -> Trained:
        strategy, records = self._strategy, list(message.content.values())  # its own lists by kind take 10 us each
        arrays = [record for record in records if isinstance(record, ArrayRecord)]
        metrics = [record for record in records if isinstance(record, MetricRecord)]
        if len(arrays) != 1 or len(metrics) > 1:
            raise ValueError(
                f"the reply holds {len(arrays)} ArrayRecords and {len(metrics)} MetricRecords: must be one of each"
            )
        said = metrics[0] if metrics else MetricRecord()
        return Trained(
            model_of(arrays[0]),
            said.get(strategy.weighted_by_key),
            said.get(strategy.loss_key),
            said.get("client-lr"),
            said.get("local-steps"),
            said if metrics else None,
            strategy.client_said(records),
        )

    def step_done(self, step: int, metrics: list[Metrics]) -> None:
        """Aggregates the metrics."""
        records = [
            RecordDict({"metrics": own if isinstance(own, MetricRecord) else MetricRecord(own)}) for own in metrics
        ]
        if records:
            self._aggregate("Metrics", step, lambda: self._mean(records), self.history.train_metrics_clientapp)
        report, said = self._training.report, self.history.train_metrics_clientapp.get(step, "")
        if report is None or report.version != step:  # `flush_after` made the step beside a call
            log(INFO, "[STEP %d] %s", step, said)
        else:
            mean, largest = report.staleness.mean(), report.staleness.max()
            log(INFO, "[STEP %d] %s staleness: mean %.1f, largest %d", step, said, mean, largest)

    def _mean(self, records: list[RecordDict]) -> MetricRecord | None:
        found: MetricRecord | None = self._strategy.train_metrics_aggr_fn(records, self._strategy.weighted_by_key)
        return found

    def _aggregate(
        self, what: str, step: int, mean: Callable[[], MetricRecord | None], into: dict[int, MetricRecord]
    ) -> None:
        """Notes a mean, if there is one: what nodes say need not go together."""
        try:
            found = mean()
        except Exception as error:
            log(WARNING, "%s of step %d cannot be aggregated: %r", what, step, error)
            return
        if found is not None:
            into[step] = found

    def notes(self) -> Mapping[str, Any]:
        """The history, and how clients are told apart."""
        history = {
            name: {str(step): dict(own) for step, own in getattr(self.history, name).items()} for name in _HISTORY
        }
        return {**history, "client_key": self._key_in_words()}

    def restore(self, notes: _Notes) -> None:
        """Takes over a history.

        Raises:
            AffluxError: replies name clients by another key than those that the store keeps something for.
        """
        key, now = self._strategy.client_key, self._key_in_words()
        if isinstance(key, str) and notes.client_key not in (None, now) and self._training.clients.known:
            raise AffluxError(
                f"[resume] the store keeps something for each client under {notes.client_key}, and now "
                f"client_key={key!r}. Give the client_key of the first start, or begin with a new store"
            )
        for name in _HISTORY:
            kept = getattr(notes, name)
            getattr(self.history, name).update({step: MetricRecord(own) for step, own in kept.items()})

    def _key_in_words(self) -> str:
        key = self._strategy.client_key
        if key is None:
            return "the id of its node (client_key=None)"
        return f"client_key={key!r}" if isinstance(key, str) else "a function of the id of its node"

    # Evaluation

    def evaluate(self, step: int) -> None:
        """Evaluates here, and asks nodes to, beside their training."""
        version = self._training.server.pull()
        metrics = None if self._evaluate_fn is None else self._evaluate_fn(step, self.arrays(version))
        if metrics is not None:
            log(INFO, "Global evaluation of step %d: %s", step, metrics)
            self.history.evaluate_metrics_serverapp[step] = metrics
        if step > 0:
            self._ask_nodes(step, version)

    def _ask_nodes(self, step: int, version: Pulled) -> None:
        strategy, there = self._strategy, len(list(self._grid.get_node_ids()))
        least = max(strategy.min_available_nodes, strategy.min_evaluate_nodes)
        if strategy.fraction_evaluate and there < least:  # FedAvg would wait for them, and training with it
            log(WARNING, "Step %d is not evaluated by nodes: %d are there, of %d", step, there, least)
            return
        config = ConfigRecord(self._evaluate_config)
        messages = list(strategy.configure_evaluate(step, self.arrays(version), config, self._grid))
        keys = {key for key in self._grid.push_messages(messages) if key} if messages else set()
        if keys:
            self._evaluations[step] = _Evaluation(keys, monotonic() + self._training.timeout)

    def _end_evaluations(self) -> None:
        for step, each in [*self._evaluations.items()]:
            if not each.keys or monotonic() > each.deadline:
                del self._evaluations[step]
                mean = partial(self._strategy.aggregate_evaluate, step, each.replies)
                into: dict[int, MetricRecord] = {}
                self._aggregate("Evaluation", step, mean, into)
                self.history.evaluate_metrics_clientapp.update(into)
                if into:
                    log(INFO, "Evaluation of step %d by nodes: %s", step, into[step])

    def finish(self) -> None:
        """Waits for the evaluations that go on."""
        while self._evaluations:
            self.replies([])
            if self._evaluations:
                sleep(self._training.settings.poll_interval)


def wait_for_nodes(grid: Grid, least: int) -> int:
    """Waits until so many nodes are there, at least one; returns how many are."""
    while (there := len(list(grid.get_node_ids()))) < max(1, least):
        log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", there, least)
        sleep(1)
    return there


def _nothing() -> Trained:
    raise ValueError("there is no message")


def model_of(record: ArrayRecord) -> dict[str, Any]:
    """The arrays of a record by name, read-only views of its bytes."""
    return {name: array_of(array.data, array.dtype) for name, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """A record of these arrays, copied once."""
    return ArrayRecord({name: Array(str(a.dtype), a.shape, _NUMPY, bytes_of(a)) for name, a in arrays.items()})
