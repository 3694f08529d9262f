"""One run of Flower's strategy: messages to and from the nodes of a Grid."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from time import monotonic, sleep
from typing import Any, Literal, get_args

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from afflux.aggregation.reports import Pulled
from afflux.integrations._core import TrainingRun, VersionArrays, open_server
from afflux.integrations._npy import array_of, bytes_of

#: Seconds between two looks for nodes that are new.
_NODES_EVERY = 2.0
_NUMPY = "numpy.ndarray"  # what Flower calls bytes in NumPy's file format

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
#: What a checkpoint keeps of a `Result`.
_Metrics = Literal["train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"]
_History = dict[_Metrics, dict[int, dict[str, int | float | list[int | float]]]]


@dataclass(slots=True)
class _Evaluation:
    """Of one step, by nodes."""

    keys: set[str]  #: of replies that have not come
    replies: list[Message]
    deadline: float  #: by time.monotonic()


class FlowerRun:
    """One call of `AsyncStrategy.start`."""

    def __init__(
        self,
        strategy: Any,  # an AsyncStrategy, whose module imports this one
        grid: Grid,
        initial: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self.strategy, self.grid = strategy, grid
        self.timeout = timeout if strategy.timeout is None else strategy.timeout
        self.train_config = ConfigRecord() if train_config is None else train_config
        self.evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self.evaluate_fn = evaluate_fn
        self.nodes = self._wait_for_nodes()
        self.nodes_seen = monotonic()
        arrays, rule, options = model_of(initial), strategy.rule, strategy.server_options
        if "num_clients" not in options and (rule.calibrate.cached or rule.needs.passes):
            options = {**options, "num_clients": len(self.nodes)}
        self.server = strategy.server = open_server(rule, arrays, strategy.store, strategy.num_threads, options)
        concurrency = strategy.concurrency or len(self.nodes)
        self.training = TrainingRun(
            self.server,
            concurrency=concurrency,
            timeout=self.timeout,
            seed=strategy.seed,
            stored=strategy.store is not None,
        )
        strategy.lost = self.training.lost
        self.versions, self.record = VersionArrays(arrays, self.server.layout), (-1, initial)
        self.evaluations: dict[int, _Evaluation] = {}
        self.failures = 0
        self.history = Result()
        for name, kept in self.training.resume(_History).items():
            getattr(self.history, name).update({step: MetricRecord(own) for step, own in kept.items()})
        self.noted = self.server.version  # the newest step that was evaluated and logged

    def _wait_for_nodes(self) -> list[int]:
        least = max(1, self.strategy.min_available_nodes)
        while len(nodes := sorted(self.grid.get_node_ids())) < least:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), least)
            sleep(1)
        return nodes

    def to(self, last: int) -> Result:
        """Goes on until the server has made this many steps and the last evaluation is over."""
        if self.server.version == 0:
            self._evaluate_here(0)
        while self.server.version < last:
            self._send_out()
            self._look_for_replies(last)
        self.training.end()
        while self.evaluations:
            self._look_for_replies(last)
        self.history.arrays = self._arrays(self.server.pull())
        self.training.checkpoint(self._notes())
        counts = {name: count for name, count in {**self.server.counts, **self.training.lost}.items() if count}
        log(INFO, "Made %d steps: %s", self.server.version, counts)
        return self.history

    def close(self) -> None:
        """Closes the store."""
        if self.strategy.store is not None:
            self.server.close()

    # Training

    def _send_out(self) -> None:
        """Sends the newest version to idle nodes, as far as more may train."""
        if not self.training.free:
            return
        if monotonic() - self.nodes_seen > _NODES_EVERY:
            self.nodes, self.nodes_seen = sorted(self.grid.get_node_ids()), monotonic()
        for node in self.training.choose(self.nodes):
            task = self.training.assign(node)
            config = ConfigRecord({**self.train_config, "server-round": task.version + 1})
            content = RecordDict(
                {self.strategy.arrayrecord_key: self._arrays(task.pulled), self.strategy.configrecord_key: config}
            )
            message = Message(content, node, MessageType.TRAIN, group_id=str(task.version + 1), ttl=self.timeout)
            keys = list(self.grid.push_messages([message]))
            if keys:
                self.training.sent(keys[0], task)
            else:  # the node has gone
                task.cancel()

    def _arrays(self, pulled: Pulled) -> ArrayRecord:
        """The arrays of a version, made once for all nodes that it is sent to."""
        if self.record[0] != pulled.version:
            self.record = pulled.version, record_of(self.versions.of(pulled))
        return self.record[1]

    def _look_for_replies(self, last: int) -> None:
        keys = [*self.training.keys, *(key for each in self.evaluations.values() for key in each.keys)]
        replies = list(self.grid.pull_messages(keys)) if keys else []
        for reply in replies:
            if reply.metadata.message_type == MessageType.EVALUATE:
                self._evaluated(reply)
            elif self.server.version < last:
                self._trained(reply)
                self._note_step(last)
        for key in self.training.expire():
            log(WARNING, "No reply to message %s within %g s", key, self.timeout)
        self._end_evaluations()
        if not replies:
            self.server.poll()  # a step that flush_after asks for
            self._note_step(last)
            sleep(self.strategy.poll_interval)

    def _trained(self, reply: Message) -> None:
        key, strategy = reply.metadata.reply_to_message_id, self.strategy
        if reply.has_error():
            log(INFO, "\t> Received error in reply from node %d: %s", reply.metadata.src_node_id, reply.error.reason)
            self.training.fail(key)
            self._failed(f"node {reply.metadata.src_node_id}: {reply.error.reason}")
            return
        found = list(reply.content.metric_records.values())
        metrics = dict(found[0]) if found else {}
        training = {
            "client_lr": metrics.get("client-lr", strategy.training["client_lr"]),
            "local_steps": metrics.get("local-steps", strategy.training["local_steps"]),
        }
        receipt = self.training.receive(
            key,
            lambda: model_of(next(iter(reply.content.array_records.values()))),
            num_examples=metrics.get(strategy.weighted_by_key, 1),
            loss=metrics.get(strategy.loss_key),
            metrics=RecordDict({"metrics": found[0]}) if found else None,
            **training,
        )
        if receipt is None:
            return
        if receipt.status in ("faulty", "expired", "empty"):
            log(INFO, "\t> Reply of node %d is %s: %s", reply.metadata.src_node_id, receipt.status, receipt.reason)
            self._failed(receipt.reason or receipt.status)
            return
        self.failures = 0

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures >= self.strategy.max_failures:
            raise RuntimeError(f"{self.failures} replies in a row were of no use, the last: {why}")

    def _note_step(self, last: int) -> None:
        """Logs, evaluates and stores the newest version, once, however its step came about."""
        step, strategy, before = self.server.version, self.strategy, self.noted
        if step == before:
            return
        self.noted = step
        kept = self.training.take_metrics()
        if kept:
            try:
                metrics = strategy.train_metrics_aggr_fn(kept, strategy.weighted_by_key)
            except Exception as error:  # nodes whose metrics do not go together
                log(WARNING, "Metrics of step %d cannot be aggregated: %r", step, error)
            else:
                self.history.train_metrics_clientapp[step] = metrics
        log(INFO, "[STEP %d/%d] %s", step, last, self.history.train_metrics_clientapp.get(step, ""))
        if step // strategy.evaluate_every > before // strategy.evaluate_every or step >= last:
            self._evaluate_here(step)
            self._evaluate_there(step)
        if step // strategy.checkpoint_every > before // strategy.checkpoint_every:
            self.training.checkpoint(self._notes())

    def _notes(self) -> dict[str, Any]:
        return {
            name: {str(step): dict(own) for step, own in getattr(self.history, name).items()}
            for name in get_args(_Metrics)
        }

    # Evaluation

    def _evaluate_here(self, step: int) -> None:
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(step, self._arrays(self.server.pull()))
        if metrics is not None:
            log(INFO, "Global evaluation of step %d: %s", step, metrics)
            self.history.evaluate_metrics_serverapp[step] = metrics

    def _evaluate_there(self, step: int) -> None:
        """Asks nodes to evaluate this step, beside their training."""
        arrays, config = self._arrays(self.server.pull()), ConfigRecord(self.evaluate_config)
        messages = self.strategy.configure_evaluate(step, arrays, config, self.grid)
        keys = set(self.grid.push_messages(messages))
        if keys:
            self.evaluations[step] = _Evaluation(keys, [], monotonic() + self.timeout)

    def _evaluated(self, reply: Message) -> None:
        key = reply.metadata.reply_to_message_id
        for each in self.evaluations.values():
            if key in each.keys:
                each.keys.discard(key)
                each.replies.append(reply)

    def _end_evaluations(self) -> None:
        for step, each in [*self.evaluations.items()]:
            if not each.keys or monotonic() > each.deadline:
                del self.evaluations[step]
                try:
                    metrics = self.strategy.aggregate_evaluate(step, each.replies)
                except Exception as error:  # replies that do not go together
                    log(WARNING, "Evaluation of step %d cannot be aggregated: %r", step, error)
                    continue
                if metrics is not None:
                    self.history.evaluate_metrics_clientapp[step] = metrics


def model_of(record: ArrayRecord) -> dict[str, Any]:
    """The arrays of a record by name, read-only views of its bytes."""
    return {name: array_of(array.data, array.dtype) for name, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """A record of these arrays, copied once."""
    return ArrayRecord({name: Array(str(a.dtype), a.shape, _NUMPY, bytes_of(a)) for name, a in arrays.items()})
