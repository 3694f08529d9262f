"""Asynchronous aggregation for Flower: `AsyncStrategy` in the place of `FedAvg`, with any rule. ClientApps stay as they
are. See docs/flower.md.
"""

from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from afflux.integrations._core import TrainingRun, missing
from afflux.integrations._loop import Loop
from afflux.integrations._settings import RunSettings
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, count_of, positive
from afflux.rules.rule import ClientId, Rule
from afflux.server.server import Server

try:
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
    from flwr.common.logger import log
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Result
except ImportError as error:
    missing("flwr", "flower", error)

from afflux.integrations._flower_run import EvaluateFn, FlowerTransport, model_of, record_of, wait_for_nodes

__all__ = ["AsyncStrategy", "model_of", "record_of"]


#: Options of FedAvg for its sample of nodes.
_WITHOUT_EFFECT = {"fraction_train", "min_train_nodes"}


class AsyncStrategy(FedAvg):
    """A Flower strategy that keeps `concurrency` nodes training and makes a server step of every M replies.

    A node that replies gets the newest model and trains again, whatever the others do; a round in Flower's sense
    (`num_rounds`, `server-round`, the keys of `Result`) is a step of the server. Federated evaluation goes on beside
    training, with the settings of FedAvg.

    Args:
        rule: from `afflux.rules`, for example `fedbuff(buffer_size=10)`.
        loss_key: of a node's training loss in its MetricRecord.
        client_key: of rules that keep something for each client, what tells a node in the next run, where it has
            another id: a function of the node's id, or the key of an int or str in a MetricRecord or ConfigRecord of
            each reply. None: the node's id.
        options: the settings that all adapters share (docs/flower.md lists them): concurrency, timeout, store,
            checkpoint_every, evaluate_every, max_failures, retry_after, poll_interval, seed, num_threads, client_lr,
            local_steps, server_options; and those of `flwr.serverapp.strategy.FedAvg`: fraction_evaluate,
            min_available_nodes, weighted_by_key, ... "client-lr" and "local-steps" of a reply's MetricRecord count more
            than client_lr and local_steps.

    Attributes:
        server: the `afflux.Server` of the last run: params, counts, log, ...
        result: of the last run, also of one that was interrupted.
        lost: counts of replies that belong to no open message ("unknown"), of nodes that replied with an error
            ("failed"), and of nodes that exceeded the timeout ("overdue").

    Raises:
        AffluxError: a setting has a wrong type or value, or store is a relative path.
        TypeError: an option is neither a setting nor one of FedAvg.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        loss_key: str = "train_loss",
        client_key: str | Callable[[int], ClientId] | None = None,
        **options: Any,
    ) -> None:
        self.settings, others = RunSettings.split(options)
        if not (client_key is None or isinstance(client_key, str) or callable(client_key)):
            raise AffluxError(f"[AsyncStrategy] client_key is {brief(client_key)}, must be a function or a key")
        if self.settings.store is not None and not Path(self.settings.store).is_absolute():
            raise AffluxError(
                f"[AsyncStrategy] store is {brief(str(self.settings.store))}, must be an absolute path: Flower may "
                f"start a ServerApp in another folder"
            )
        for name in _WITHOUT_EFFECT & others.keys():
            del others[name]
            log(WARNING, "%s has no effect on AsyncStrategy: concurrency= says how many nodes train", name)
        super().__init__(**others)
        self.rule, self.loss_key, self.client_key = rule, loss_key, client_key
        self.server: Server | None = None
        self.result = Result()
        self.lost: dict[str, int] = {}

    def summary(self) -> None:
        """Logs the rule, and the settings that have an effect."""
        log(INFO, "\t├──> Asynchronous aggregation by afflux:")
        log(INFO, "\t│\t├── Rule: %s, M = %d", self.rule.name, self.rule.buffer_size)
        log(INFO, "\t│\t└── Nodes at the same time: %s", self.settings.concurrency or "all")
        log(INFO, "\t├──> Evaluation by nodes, every %d steps:", self.settings.evaluate_every)
        log(INFO, "\t│\t├── Fraction: %.2f", self.fraction_evaluate)
        log(INFO, "\t│\t└── Minimum nodes: %d", self.min_evaluate_nodes)
        log(INFO, "\t├──> Minimum available nodes: %d", self.min_available_nodes)
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", self.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", self.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", self.configrecord_key)

    def client_said(self, records: list[Any]) -> object:
        """The client that the records of a reply are of; None if `client_key` is no key of a record."""
        if not isinstance(self.client_key, str):
            return None
        for record in records:
            if isinstance(record, MetricRecord | ConfigRecord) and self.client_key in record:
                return record[self.client_key]
        raise ValueError(f"no MetricRecord or ConfigRecord of the reply has {self.client_key!r}, the client_key")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Trains until the server has made `num_rounds` steps.

        Args:
            grid: any of Flower's.
            initial_arrays: the model; of a run that is resumed, only its names, shapes and dtypes count.
            num_rounds: steps of the server, those of the runs before included.
            timeout: seconds for the reply of a node, if the setting of this name does not say it.
            train_config: sent to the nodes that train, with "server-round", the step that they train for.
            evaluate_config: sent to the nodes that evaluate.
            evaluate_fn: evaluates a version, called with its number and arrays.

        Returns:
            The last version, and metrics by step, as FedAvg returns them by round.

        Raises:
            AffluxError, StoreError: the rule does not fit the model or the options; the store is of another server.
            RuntimeError: no node is of use.
        """
        timeout, num_rounds = positive("start", "timeout", timeout), count_of(0)("start", "num_rounds", num_rounds)
        log(INFO, "Starting %s strategy: %d steps", type(self).__name__, num_rounds)
        self.summary()
        key: Any = "said" if isinstance(self.client_key, str) else self.client_key
        nodes = wait_for_nodes(grid, self.min_available_nodes)
        training = TrainingRun(
            self.rule, model_of(initial_arrays), self.settings, num_clients=nodes, timeout=timeout, key=key
        )
        self.server, self.lost = training.server, training.lost
        transport = FlowerTransport(
            self, grid, training, initial_arrays, train_config, evaluate_config, evaluate_fn, num_rounds
        )
        self.result = transport.history
        with Loop(training, transport) as loop:
            first = self._log_store(training)
            training.checkpoint(transport.notes())  # so that the client_key is stored before the first row
            loop.run(num_rounds)
            transport.finish()
            self.result.arrays = transport.arrays(training.server.pull())
        counts = {name: count for name, count in {**training.server.counts, **training.lost}.items() if count}
        made = training.server.version - first
        if not made:
            log(INFO, "No step was needed: the store holds step %d of %d: %s", first, num_rounds, counts)
        elif not first:
            log(INFO, "Made %d steps: %s", made, counts)
        else:
            log(INFO, "Made %d steps, after %d of earlier runs; of all runs: %s", made, first, counts)
        return self.result

    def _log_store(self, training: TrainingRun) -> int:
        """Logs what is stored; returns the version that the run begins with."""
        first, store = training.server.version, self.settings.store
        if store is None:
            return first
        if training.server.joins:
            log(INFO, "Going on from step %d of store %s", first, store)
        elif training.clients.are_kept and self.client_key is None:
            log(
                WARNING,
                "%s keeps something for each client under the id of its node, and Flower's simulation gives nodes new "
                "ids in each run: without client_key= a second run cannot go on from this store",
                self.rule.name,
            )
        return first
