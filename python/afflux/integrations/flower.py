"""Asynchronous aggregation for Flower: `AsyncStrategy` in the place of `FedAvg`, with any rule. ClientApps stay as they
are. See docs/flower.md.
"""

from logging import INFO
from os import PathLike
from typing import Any

from afflux.aggregation.options import Options
from afflux.integrations._core import missing
from afflux.rules.rule import Rule
from afflux.server.server import Server

try:
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.common.logger import log
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Result
except ImportError as error:
    missing("flwr", "flower", error)

from afflux.integrations._flower_run import EvaluateFn, FlowerRun, model_of, record_of

__all__ = ["AsyncStrategy", "model_of", "record_of"]


class AsyncStrategy(FedAvg):
    """A Flower strategy that keeps `concurrency` nodes training and makes a server step of every M replies.

    A node that replies gets the newest model and trains again, whatever the others do; a round in Flower's sense
    (`num_rounds`, `server-round`, the keys of `Result`) is a step of the server. Federated evaluation goes on beside
    training, with the settings of FedAvg.

    Args:
        rule: from `afflux.rules`, for example `fedbuff(buffer_size=10)`.
        concurrency: nodes that train at the same time; None: all that are there when the run starts.
        timeout: seconds after which another node trains in the place of one that has not replied; None: the `timeout`
            of `start`.
        store: a folder for the server's state. `start` goes on from it if it holds a server.
        checkpoint_every: steps after which the nodes that train, arrivals that wait and the history are stored too.
        evaluate_every: steps between evaluations.
        loss_key: of a node's training loss in its MetricRecord.
        client_lr: learning rate of the nodes, for rules that take gradients; "client-lr" of a MetricRecord counts more.
        local_steps: their number of local steps, likewise; "local-steps" of a MetricRecord counts more.
        max_failures: replies in a row that are errors or are refused, after which `start` raises.
        poll_interval: seconds between two looks for replies while there are none.
        seed: of the choice of nodes.
        num_threads: of a step; None: all CPUs of this process.
        server_options: fields of `ServerOptions`, such as max_staleness. num_clients is the number of nodes at the
            start if a rule needs it and it is not given.
        options: of `flwr.serverapp.strategy.FedAvg`: fraction_evaluate, min_available_nodes, weighted_by_key, ...

    Attributes:
        server: the `afflux.Server` of the last run: params, counts, log, ...
        lost: counts of replies that belong to no open message ("unknown"), of nodes that replied with an error
            ("failed"), and of nodes that exceeded the timeout ("overdue").
    """

    def __init__(
        self,
        rule: Rule,
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        store: "str | PathLike[str] | None" = None,
        checkpoint_every: int = 10,
        evaluate_every: int = 1,
        loss_key: str = "train_loss",
        client_lr: float | None = None,
        local_steps: int | None = None,
        max_failures: int = 1000,
        poll_interval: float = 0.05,
        seed: int = 0,
        num_threads: int | None = None,
        server_options: Options | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rule = rule
        self.concurrency = concurrency
        self.timeout = timeout
        self.store = store
        self.checkpoint_every, self.evaluate_every = checkpoint_every, evaluate_every
        self.loss_key = loss_key
        self.training = {"client_lr": client_lr, "local_steps": local_steps}
        self.max_failures = max_failures
        self.poll_interval = poll_interval
        self.seed = seed
        self.num_threads = num_threads
        self.server_options: Options = server_options or {}
        self.server: Server | None = None
        self.lost: dict[str, int] = {}

    def summary(self) -> None:
        """Logs the rule and the settings."""
        log(INFO, "\t├──> Asynchronous aggregation by afflux:")
        log(INFO, "\t│\t├── Rule: %s, M = %d", self.rule.name, self.rule.buffer_size)
        log(INFO, "\t│\t└── Nodes at the same time: %s", self.concurrency or "all")
        super().summary()

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
            timeout: seconds for the reply of a node.
            train_config: sent to the nodes that train, with "server-round", the step that they train for.
            evaluate_config: sent to the nodes that evaluate.
            evaluate_fn: evaluates a version, called with its number and arrays.

        Returns:
            The last version, and metrics by step, as FedAvg returns them by round.

        Raises:
            AffluxError: the rule does not fit the model or the options.
            RuntimeError: `max_failures` replies in a row were of no use.
        """
        log(INFO, "Starting %s strategy: %d steps", type(self).__name__, num_rounds)
        self.summary()
        run = FlowerRun(self, grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        try:
            return run.to(num_rounds)
        finally:
            run.close()
