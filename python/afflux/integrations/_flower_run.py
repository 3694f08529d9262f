"""Messages to and from the nodes of Flower's Grid, and the records in them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
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
from afflux.integrations._flower_evaluations import Evaluations
from afflux.integrations._flower_metrics import mean_of, trim
from afflux.integrations._loop import Reply, Transport
from afflux.integrations._npy import array_of, bytes_of
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.rule import ClientId

_NUMPY = "numpy.ndarray"  # what Flower calls bytes in NumPy's file format

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_MetricsByStep = dict[int, dict[str, int | float | list[int | float]]]
#: What a checkpoint keeps of a `Result`.
_HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
#: Of each of them the newest steps, so that the cost of a checkpoint does not grow with the run.
_STEPS_KEPT = 1000
#: Seconds that the end of a run waits for evaluations, at least; or 3 times as long as its slowest reply took, since a
#: node may have to train and then to evaluate two versions.
_LEAST_WAIT = 10.0


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint stores of a run of Flower."""

    train_metrics_clientapp: _MetricsByStep = {}
    evaluate_metrics_clientapp: _MetricsByStep = {}
    evaluate_metrics_serverapp: _MetricsByStep = {}
    client_key: str | None = None  #: in words; None: not known


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
        last: the step that ends the run.
    """

    name = "flower"
    logger = FLOWER_LOGGER
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
        last: int,
    ) -> None:
        self._strategy, self._grid, self._training = strategy, grid, training
        self._train_config = ConfigRecord() if train_config is None else train_config
        self._evaluate_fn = evaluate_fn
        self._record = (-1, initial)  # of the version that was sent last
        self.history = Result()
        self._evaluations = Evaluations(
            strategy, grid, evaluate_config, training.timeout, last, self.history.evaluate_metrics_clientapp
        )
        self._sent: dict[str, float] = {}  # when a node got its message, by time.monotonic(), by the key of the reply
        self._slowest = 0.0  # seconds that a trained model took at most

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
        for key in self._grid.push_messages([message]):
            if key:
                self._sent[key] = monotonic()
                return str(key)
        return None  # none, None or "" for a node that has gone

    def arrays(self, version: Pulled) -> ArrayRecord:
        """The arrays of a version, made once for all nodes that it is sent to."""
        if self._record[0] != version.version:
            self._record = version.version, record_of(self._training.versions.of(version))
        return self._record[1]

    def replies(self, keys: list[str]) -> Iterable[Reply]:
        """Those of nodes that train; those of nodes that evaluate are kept here."""
        found, evaluations = [], self._evaluations
        for key, message in self._pulled([*keys, *evaluations.keys]):
            if key in evaluations.keys:
                evaluations.take(key, message if isinstance(message, Message) else None)
                continue
            now = monotonic()
            self._slowest = max(self._slowest, now - self._sent.pop(key, now))
            found.append(self._reply(key, message))
        if len(self._sent) > 2 * len(keys) + 100:  # many messages will have no reply
            self._sent = {key: self._sent[key] for key in keys if key in self._sent}
        evaluations.end()
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
        client = strategy.client_said(records)  # before `said` is trimmed
        return Trained(
            model_of(arrays[0]),
            said.get(strategy.weighted_by_key),
            said.get(strategy.loss_key),
            said.get("client-lr"),
            said.get("local-steps"),
            metrics=trim(said, strategy.weighted_by_key) if metrics else None,
            client=client,
        )

    def step_done(self, step: int, metrics: list[Metrics]) -> None:
        """Aggregates the metrics."""
        records = [
            RecordDict({"metrics": own if isinstance(own, MetricRecord) else MetricRecord(own)}) for own in metrics
        ]
        if records:
            self._note_metrics(step, records)
        report, said = self._training.report, self.history.train_metrics_clientapp.get(step, "")
        if report is None or report.version != step:  # `flush_after` made the step beside a call
            log(INFO, "[STEP %d] %s", step, said)
        else:
            mean, largest = report.staleness.mean(), report.staleness.max()
            log(INFO, "[STEP %d] %s staleness: mean %.1f, largest %d", step, said, mean, largest)

    def _note_metrics(self, step: int, records: list[RecordDict]) -> None:
        strategy = self._strategy
        key = strategy.weighted_by_key
        try:
            mean, left_out = mean_of(
                records, lambda own: own, key, lambda some: strategy.train_metrics_aggr_fn(some, key)
            )
        except Exception as error:  # what nodes say need not go together
            log(WARNING, "Metrics of step %d cannot be aggregated: %r", step, error)
            return
        if left_out:
            log(WARNING, "Metrics of step %d: %d records differ from the others and are left out", step, left_out)
        if mean is not None:
            self.history.train_metrics_clientapp[step] = mean

    def notes(self) -> Mapping[str, Any]:
        """Notes for a checkpoint: the history of the newest steps, and the source of the clients' ids."""
        history = {
            name: {str(step): dict(own) for step, own in _newest(getattr(self.history, name))} for name in _HISTORY
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
            getattr(self.history, name).update({step: MetricRecord(own) for step, own in sorted(kept.items())})

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
        if not (metrics is None or isinstance(metrics, MetricRecord)):
            raise AffluxError(
                f"[start] the result of evaluate_fn for step {step} is {brief(metrics)}, must be a MetricRecord or None"
            )
        if metrics is not None:
            log(INFO, "Global evaluation of step %d: %s", step, metrics)
            self.history.evaluate_metrics_serverapp[step] = metrics
        if step > 0:
            self._evaluations.ask(step, self.arrays(version))

    def finish(self) -> None:
        """Waits for the evaluations that go on, but not long for nodes that do not reply."""
        slowest = max(self._slowest, self._evaluations.slowest)
        self._evaluations.hasten(min(self._training.timeout, max(_LEAST_WAIT, 3 * slowest)))
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


def _newest(history: dict[int, MetricRecord]) -> list[tuple[int, MetricRecord]]:
    """The steps that a checkpoint keeps, in their order."""
    return [*islice(reversed(history.items()), _STEPS_KEPT)][::-1]


def _nothing() -> Trained:
    raise ValueError("there is no message")


def model_of(record: ArrayRecord) -> dict[str, Any]:
    """The arrays of a record by name, read-only views of its bytes."""
    return {name: array_of(array.data, array.dtype) for name, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """A record of these arrays, copied once."""
    return ArrayRecord({name: Array(str(a.dtype), a.shape, _NUMPY, bytes_of(a)) for name, a in arrays.items()})
