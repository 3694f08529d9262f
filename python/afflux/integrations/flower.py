"""Asynchronous aggregation for Flower: `AsyncStrategy` in the place of `FedAvg`, with any rule. ClientApps stay as they
are. See docs/guides/flower.md.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from logging import INFO, WARNING
from time import sleep
from typing import Any, NoReturn, cast

from afflux.arrays.interop import on_host
from afflux.integrations._clients import ClientKey, has_id
from afflux.integrations._core import TrainingRun
from afflux.integrations._frameworks import missing
from afflux.integrations._loop import Loop
from afflux.integrations._npy import array_of, bytes_of
from afflux.integrations._server import holds_server, keeps_clients
from afflux.integrations._settings import RunSettings, require_absolute_store, rule_of
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

from afflux.integrations._flower_run import (
    Choose,
    EvaluateFn,
    FlowerTransport,
    NodeConfig,
    TrainConfig,
    model_of,
    record_of,
    roles_of,
)

__all__ = ["AsyncStrategy", "model_of", "record_of"]

#: The methods of a strategy that belong to rounds, and what takes their place.
_OF_ROUNDS = {
    "configure_train": "give `start` a function of the step as train_config=, or the constructor node_config=, choose=",
    "aggregate_train": "a rule aggregates, and evaluate_fn= of `start` gets each new model, for example to save it; a "
    "wrapper that calls aggregate_train, for example for differential privacy, needs a synchronous strategy",
}


class AsyncStrategy(FedAvg):
    """A Flower strategy that keeps `concurrency` nodes training; its server takes a step after every M replies.

    A node that replies gets the newest model and trains again, independent of the others; a round in Flower's sense
    (`num_rounds`, `server-round`, the keys of `Result`) is a step of the server. Federated evaluation runs in parallel
    with training, with the settings of FedAvg.

    Args:
        rule: a rule of `afflux.rules`, for example `fedbuff(buffer_size=10)`; or its text: "fedbuff:buffer_size=10"; or
            the result of `Rule.to_config`.
        loss_key: key of a node's training loss in its MetricRecord.
        client_key: for rules that keep state for each client: identifies a node in the next run, in which it has
            another id. A function of the node's id, or the key of an int or str in a MetricRecord or ConfigRecord of
            each reply. None: the node's id.
        node_config: a function of a node and the step that it trains for (its "server-round"): the configuration of
            this node, added to train_config.
        choose: a function of the ids of idle nodes, the number of nodes that are to train, and the step: the nodes that
            get a message, at most this number. None: a random choice.
        options: the settings that all adapters share (docs/reference/adapters.md lists them), and those of
            `flwr.serverapp.strategy.FedAvg`. "client-lr" and "local-steps" in a reply's MetricRecord replace client_lr
            and local_steps.

    A subclass may override `configure_evaluate`, `aggregate_evaluate`, `summary` and `start`. `configure_train` and
    `aggregate_train` belong to rounds, and are refused.

    Attributes:
        server: the `afflux.Server` of the last run: params, counts, log, ...
        result: the result of the last run, also of an interrupted one.
        evaluated_arrays: in `aggregate_evaluate`, the arrays that the nodes have evaluated.
        lost: counts of replies that belong to no open message ("unknown"), of nodes that replied with an error
            ("failed"), and of nodes that exceeded the timeout ("overdue").

    Raises:
        AffluxError: `rule` is no rule, a setting has a wrong type or value, store is a relative path, or a subclass
            overrides a method of rounds.
        TypeError: an option is neither a setting nor one of FedAvg.
    """

    def __init__(
        self,
        rule: Rule | str | Mapping[str, Any],
        *,
        loss_key: str = "train_loss",
        client_key: str | Callable[[int], ClientId] | None = None,
        node_config: NodeConfig | None = None,
        choose: Choose | None = None,
        **options: Any,
    ) -> None:
        self.rule = rule_of("AsyncStrategy", rule, {})
        self._refuse_hooks_of_rounds()
        self.settings, others = RunSettings.split(options)
        if not (client_key is None or isinstance(client_key, str) or callable(client_key)):
            raise AffluxError(f"[AsyncStrategy] client_key is {brief(client_key)}, must be a function or a key")
        for name, function in (("node_config", node_config), ("choose", choose)):
            if not (function is None or callable(function)):
                raise AffluxError(f"[AsyncStrategy] {name} is {brief(function)}, must be a function")
        require_absolute_store("AsyncStrategy", self.settings, "Flower may start a ServerApp in another folder")
        for name in {"fraction_train", "min_train_nodes"} & others.keys():
            del others[name]
            log(WARNING, "%s has no effect on AsyncStrategy: concurrency= says how many nodes train", name)
        super().__init__(**others)
        self.loss_key, self.client_key, self.node_config, self.choose = loss_key, client_key, node_config, choose
        self.server: Server | None = None
        self.result = Result()
        self.evaluated_arrays: ArrayRecord | None = None
        self.lost: dict[str, int] = {}

    def _refuse_hooks_of_rounds(self) -> None:
        """Raise AffluxError if the class, or the object itself, overrides a method that is never called."""
        for name, instead in _OF_ROUNDS.items():
            if name in vars(self) or getattr(type(self), name) is not getattr(AsyncStrategy, name):
                raise AffluxError(f"[AsyncStrategy] {type(self).__name__}.{name} would never be called: {instead}")

    def summary(self) -> None:
        """Log the rule, and the settings that have an effect."""
        log(INFO, "\t├──> Rule: %s, M = %d", self.rule.name, self.rule.buffer_size)
        nodes = self.settings.concurrency or "all"
        log(INFO, "\t├──> Nodes that train: %s, of at least %d", nodes, self.min_available_nodes)
        evaluated = (self.settings.evaluate_every, self.fraction_evaluate, self.min_evaluate_nodes)
        log(INFO, "\t├──> Evaluation by nodes: every %d steps, by %.2f of them, at least %d", *evaluated)
        keys = (self.weighted_by_key, self.arrayrecord_key, self.configrecord_key)
        log(INFO, "\t└──> Keys: weight '%s', ArrayRecord '%s', ConfigRecord '%s'", *keys)

    def configure_train(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise an error: there are no rounds."""
        raise AffluxError(f"[configure_train] AsyncStrategy has no rounds: {_OF_ROUNDS['configure_train']}")

    def aggregate_train(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise an error: there are no rounds."""
        raise AffluxError(f"[aggregate_train] AsyncStrategy has no rounds: {_OF_ROUNDS['aggregate_train']}")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | Mapping[str, Any],
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: TrainConfig | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train until the server has made `num_rounds` steps.

        Args:
            grid: any Grid of Flower.
            initial_arrays: the model: an ArrayRecord, or arrays by name such as a state_dict; for a resumed run, only
                its names, shapes and dtypes count.
            num_rounds: steps of the server, with those of the runs before.
            timeout: seconds for the reply of a node, if the setting of this name is not given.
            train_config: configuration for the nodes that train, to which "server-round" is added, the next step; or a
                function of this step that returns the configuration. The list "roles" of a configuration, such as
                ["bn.*=local"], is the setting of this name, if that is not given.
            evaluate_config: configuration for the nodes that evaluate.
            evaluate_fn: evaluates a version, called with its number and arrays.

        Returns:
            The last version, and metrics by step, as FedAvg returns them by round.

        Raises:
            AffluxError, StoreError: the rule does not fit the model or the options; the store is another server's.
            RuntimeError: all nodes fail, or none may train.
            Exception: a function of the user has raised it.
        """
        timeout, num_rounds = positive("start", "timeout", timeout), count_of(0)("start", "num_rounds", num_rounds)
        self._refuse_hooks_of_rounds()
        log(INFO, "Starting %s strategy: %d steps", type(self).__name__, num_rounds)
        self.summary()
        arrays, key = _arrays_of(initial_arrays), cast(ClientKey | None, self.client_key)
        there = self._wait_for_nodes(grid, key)
        settings = replace(self.settings, timeout=self.settings.timeout or timeout)
        if settings.roles is None and isinstance(train_config, ConfigRecord) and "roles" in train_config:
            settings = replace(settings, roles=roles_of(train_config["roles"]))
        training = TrainingRun(self.rule, arrays, settings, num_clients=there, key=key)
        self.server, self.lost, self.result = training.server, training.lost, Result()
        configs = (train_config or ConfigRecord(), evaluate_config or ConfigRecord())
        transport = FlowerTransport(self, grid, training, *configs, evaluate_fn, last=num_rounds)
        with Loop(training, transport) as loop:
            if self.settings.store is not None and key is None and training.clients.are_kept and not self.server.joins:
                why = "under the id of its node, and Flower's simulation gives nodes new ids in each run"
                effect = "without client_key= a second run cannot go on from this store"
                log(WARNING, "%s keeps something for each client %s: %s", self.rule.name, why, effect)
            try:
                loop.run(num_rounds)
            except BaseException:
                with suppress(AffluxError):
                    self.result.arrays = transport.arrays(training.server.pull())
                raise
            self.result.arrays = transport.arrays(loop.result)
        return self.result

    def _wait_for_nodes(self, grid: Grid, key: ClientKey | None) -> int:
        """Wait for the nodes that the run needs from its start; return their number."""
        settings, least = self.settings, max(1, self.min_available_nodes)
        is_open = settings.server_options.get("num_clients") is None and not holds_server(settings)
        if is_open and keeps_clients(self.rule):
            # The number of nodes becomes num_clients: a node that comes later has no row.
            least = max(least, self.rule.buffer_size, settings.concurrency or 1)
        while (there := sum(has_id(key, node) for node in grid.get_node_ids())) < least:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", there, least)
            sleep(1)
        return there


def _arrays_of(initial: object) -> dict[str, Any]:
    """Return the initial arrays by name, as NumPy's."""
    if isinstance(initial, ArrayRecord):
        return model_of(initial)
    if not isinstance(initial, Mapping):
        words = "must be an ArrayRecord, or arrays by name: model.state_dict()"
        raise AffluxError(f"[start] initial_arrays is {brief(initial)}, {words}")
    return {name: _on_host(array) for name, array in initial.items()}


def _on_host(array: Any) -> Any:
    host = on_host(array, copy=True)
    is_bfloat16 = str(getattr(array, "dtype", "")) == "torch.bfloat16"
    return array_of(bytes_of(host.view("V2")), "bfloat16") if is_bfloat16 else host
