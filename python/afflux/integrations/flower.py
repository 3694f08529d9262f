"""Asynchronous aggregation for Flower: `AsyncStrategy` in the place of `FedAvg`, with any rule. ClientApps stay as they
are. See docs/flower.md.
"""

from collections.abc import Callable
from dataclasses import replace
from logging import INFO, WARNING
from time import sleep
from typing import Any, cast

from afflux.integrations._clients import ClientKey
from afflux.integrations._core import TrainingRun
from afflux.integrations._frameworks import missing
from afflux.integrations._loop import Loop
from afflux.integrations._settings import RunSettings, require_absolute_store
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, count_of, positive
from afflux.rules.rule import ClientId, Rule
from afflux.server.server import Server

try:
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.common.logger import log
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Result
except ImportError as error:
    missing("flwr", "flower", error)

from afflux.integrations._flower_run import EvaluateFn, FlowerTransport, model_of, record_of, roles_of

__all__ = ["AsyncStrategy", "model_of", "record_of"]


class AsyncStrategy(FedAvg):
    """A Flower strategy that keeps `concurrency` nodes training and makes a server step of every M replies.

    A node that replies gets the newest model and trains again, independent of the others; a round in Flower's sense
    (`num_rounds`, `server-round`, the keys of `Result`) is a step of the server. Federated evaluation runs in parallel
    with training, with the settings of FedAvg.

    Args:
        rule: a rule of `afflux.rules`, for example `fedbuff(buffer_size=10)`.
        loss_key: key of a node's training loss in its MetricRecord.
        client_key: for rules that keep state for each client: identifies a node in the next run, in which it has
            another id. A function of the node's id, or the key of an int or str in a MetricRecord or ConfigRecord of
            each reply. None: the node's id.
        options: the settings that all adapters share (docs/flower.md lists them), and those of
            `flwr.serverapp.strategy.FedAvg`. "client-lr" and "local-steps" in a reply's MetricRecord replace client_lr
            and local_steps.

    Attributes:
        server: the `afflux.Server` of the last run: params, counts, log, ...
        result: the result of the last run, also of an interrupted one.
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
        require_absolute_store("AsyncStrategy", self.settings, "Flower may start a ServerApp in another folder")
        for name in {"fraction_train", "min_train_nodes"} & others.keys():
            del others[name]
            log(WARNING, "%s has no effect on AsyncStrategy: concurrency= says how many nodes train", name)
        super().__init__(**others)
        self.rule, self.loss_key, self.client_key = rule, loss_key, client_key
        self.server: Server | None = None
        self.result = Result()
        self.lost: dict[str, int] = {}

    def summary(self) -> None:
        """Log the rule, and the settings that have an effect."""
        log(INFO, "\t├──> Rule: %s, M = %d", self.rule.name, self.rule.buffer_size)
        nodes = (self.settings.concurrency or "all", self.min_available_nodes)
        log(INFO, "\t├──> Nodes that train: %s, of at least %d", *nodes)
        evaluated = (self.settings.evaluate_every, self.fraction_evaluate, self.min_evaluate_nodes)
        log(INFO, "\t├──> Evaluation by nodes: every %d steps, by %.2f of them, at least %d", *evaluated)
        keys = (self.weighted_by_key, self.arrayrecord_key, self.configrecord_key)
        log(INFO, "\t└──> Keys: weight '%s', ArrayRecord '%s', ConfigRecord '%s'", *keys)

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
        """Train until the server has made `num_rounds` steps.

        Args:
            grid: any Grid of Flower.
            initial_arrays: the model; for a resumed run, only its names, shapes and dtypes count.
            num_rounds: steps of the server, with those of the runs before.
            timeout: seconds for the reply of a node, if the setting of this name is not given.
            train_config: configuration for the nodes that train, to which "server-round" is added, the next step. Its
                list "roles", such as ["bn.*=local"], is the setting of this name, if that is not given.
            evaluate_config: configuration for the nodes that evaluate.
            evaluate_fn: evaluates a version, called with its number and arrays.

        Returns:
            The last version, and metrics by step, as FedAvg returns them by round.

        Raises:
            AffluxError, StoreError: the rule does not fit the model or the options; the store is another server's.
            RuntimeError: all nodes fail.
        """
        timeout, num_rounds = positive("start", "timeout", timeout), count_of(0)("start", "num_rounds", num_rounds)
        log(INFO, "Starting %s strategy: %d steps", type(self).__name__, num_rounds)
        self.summary()
        least = max(1, self.min_available_nodes)
        while (there := len(list(grid.get_node_ids()))) < least:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", there, least)
            sleep(1)
        arrays, key = model_of(initial_arrays), cast(ClientKey | None, self.client_key)
        settings = self.settings
        if settings.roles is None and train_config is not None and "roles" in train_config:
            settings = replace(settings, roles=roles_of(train_config["roles"]))
        training = TrainingRun(self.rule, arrays, settings, num_clients=there, timeout=timeout, key=key)
        self.server, self.lost, self.result = training.server, training.lost, Result()
        configs = (train_config or ConfigRecord(), evaluate_config or ConfigRecord())
        transport = FlowerTransport(self, grid, training, *configs, evaluate_fn, last=num_rounds)
        with Loop(training, transport) as loop:
            if self.settings.store is not None and key is None and training.clients.are_kept and not self.server.joins:
                why = "under the id of its node, and Flower's simulation gives nodes new ids in each run"
                effect = "without client_key= a second run cannot go on from this store"
                log(WARNING, "%s keeps something for each client %s: %s", self.rule.name, why, effect)
            loop.run(num_rounds)
            self.result.arrays = transport.arrays(training.server.pull())
        return self.result
