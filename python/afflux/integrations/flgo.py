"""Asynchronous aggregation for FLGo: `algorithm(rule)` in the place of `flgo.algorithm.fedbuff`, with any rule.

Clients, tasks, loggers and simulators stay as they are. See docs/guides/flgo.md.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from typing import Any

from afflux.aggregation.options import Options
from afflux.arrays.roles import Roles
from afflux.integrations._core import NO_USE, Trained, TrainingRun
from afflux.integrations._frameworks import missing, warn_of_version
from afflux.integrations._settings import RunSettings, rule_of
from afflux.ops.errors import AffluxError
from afflux.rules.rule import ClientId, Rule

try:
    from flgo.algorithm.fedbase import BasicClient
except ImportError as error:
    missing("flgo", "flgo", error)

from afflux.integrations._flgo_rounds import Notes, StoredRounds

__all__ = ["AffluxServer", "algorithm"]

#: The key of a package, beside FLGo's own `__cid` and `__t`, with the id of the task that it answers.
TASK = "__afflux_task"
#: The moments of FLGo's clock after which a run without an available client ends: more than half a day of seconds.
_MOST_IDLE = 50_000


def algorithm(
    rule: Rule | Mapping[str, Any] | None = None,
    *,
    client: type[Any] = BasicClient,
    store: "str | PathLike[str] | None" = None,
    timeout: float | None = None,
    max_failures: int = 5,
    num_threads: int | None = None,
    roles: Roles | None = None,
    server_options: Options | None = None,
    noise_key_file: "str | PathLike[str] | None" = None,
) -> type[Any]:
    """Make an algorithm for `flgo.init`, for one run, because FLGo modifies the classes of an algorithm.

    Args:
        rule: a rule of `afflux.rules`; or its configuration, as in JSON or YAML: {"name": "fedbuff", ...its options},
            with FLGo's names `buffer_ratio` and `eta` in addition to afflux's, or the result of `Rule.to_config`.
            None: the configuration in FLGo's option "rule".
        client: the class of the clients; they reply with their models, {"model": ...}, as BasicClient does.
        store: a folder for the server's state. If it holds a server, `run` continues from it. None: in memory.
        timeout: virtual time after which another client trains instead of one that has not replied; None: FLGo's
            tolerance for latency.
        max_failures: consecutive failures (unusable packages, dropouts, no package within the timeout) after which a
            client counts as failed. `run` raises an error when all clients that may be drawn have failed.
        num_threads: threads of a step; None: all CPUs that this process may use.
        roles: the roles of arrays by patterns of names, such as {"bn.*": "local"}; see `Layout.of`.
        server_options: fields of `afflux.ServerOptions`, such as max_staleness or log.
        noise_key_file: a file of 32 secret random bytes, the `noise_key` of a rule that adds noise.

    Returns:
        A class with the attributes Server and Client.

    Raises:
        AffluxError: a setting has a wrong type or value.
    """
    warn_of_version("flgo", "0.4.4", version("flgo"))  # `flgo.__version__` of 0.4.4 is v0.4.3
    shared: dict[str, Any] = {"store": store, "timeout": timeout, "num_threads": num_threads, "roles": roles}
    options = Options() if server_options is None else server_options
    shared |= {"server_options": options, "noise_key_file": noise_key_file}
    settings = RunSettings(max_failures=max_failures, **shared)
    server = type("Server", (AffluxServer,), {"given_rule": rule, "settings": settings})
    return type("afflux", (), {"Server": server, "Client": type("Client", (client,), {})})


class AffluxServer(StoredRounds):
    """FLGo's asynchronous server with an `afflux.Server` as its aggregation; `algorithm` makes its subclasses.

    Attributes:
        server: the `afflux.Server`: params, counts, rows, log, ...
        lost: counts of packages that belong to no open task ("unknown"), of clients that dropped out ("failed"), and of
            clients that exceeded the timeout ("overdue").
    """

    given_rule: Rule | Mapping[str, Any] | None = None
    settings = RunSettings()

    def initialize(self) -> None:
        """Open the server. FLGo calls this method when model, clients and simulator exist."""
        _refuse_options(self.option)
        given = self.option.get("rule") if self.given_rule is None else self.given_rule
        rule = rule_of("flgo", given, {}, self.num_clients)
        if rule.buffer_size > self.num_clients:
            raise AffluxError(
                f"[flgo] buffer_size is {rule.buffer_size} of {self.num_clients} clients, and would never be reached: "
                "FLGo draws no client whose model is in the buffer"
            )
        self.algo_para = {"rule": rule.name, "M": rule.buffer_size}  # names the file of the results
        most = self.num_clients if "full" in self.sample_option else self.clients_per_round
        timeout = self.settings.timeout or float(self.get_tolerance_for_latency())
        settings = replace(self.settings, concurrency=most, timeout=timeout)
        self.training = TrainingRun(rule, self.model, settings, num_clients=self.num_clients)
        self.training.clock = lambda: self.gv.clock.current_time
        self.server, self.lost = self.training.server, self.training.lost
        self.training.clients.warn = self.gv.logger.warning
        self._resumed = self.training.resume(Notes, adapter="flgo")
        if self.server.options.flush_after is not None:
            self.training.close()
            raise AffluxError("[flgo] flush_after is in seconds, and FLGo's time is virtual")
        self.buffered_clients = self._blocked
        self.server.pull(out=self.model)
        self._idle = 0  # moments since a client has trained
        self.current_round = self.server.version + 1

    @property
    def _blocked(self) -> set[ClientId]:
        """Return the clients that FLGo may not draw: their models wait for a step, or their pushes are rejected."""
        return {*self.server.waiting.values(), *self.server.entered}

    def iterate(self) -> bool:
        """Process one moment of FLGo's clock.

        Raises:
            RuntimeError: all clients have failed repeatedly, or none has been available for a long time.
        """
        if self.training.expire():
            self._require_some_of_use()
        # FLGo's own set keeps clients that drop out, which would block their places.
        self.concurrent_clients = self.training.busy
        self._dropped_selected_clients: list[int] = []  # FLGo's simulator sets it when it draws clients
        updated: bool = super().iterate()
        self._idle = 0 if self.training.assignments else self._idle + 1
        if self._idle >= _MOST_IDLE:
            raise RuntimeError(
                f"no client has trained for {self._idle} moments of FLGo's clock: none of {self.num_clients} was "
                f"available, apart from {len(self._blocked)} whose models wait for a step or are rejected"
            )
        for client in self._dropped_selected_clients:
            self.training.drop(client, "it has dropped out")
        self.buffered_clients = self._blocked
        if self._dropped_selected_clients:
            self._require_some_of_use()
        return updated

    def _require_some_of_use(self) -> None:
        """Raise RuntimeError if all clients that FLGo may draw have failed repeatedly."""
        self.training.clients.are(set(range(self.num_clients)) - self._blocked)
        self.training.clients.require_some_of_use(self.training.clock())

    # Packages

    def pack(self, client_id: int, mtype: Any = 0, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the package for a client: FLGo's package, and the id of a task."""
        package: dict[str, Any] = super().pack(client_id, mtype, *args, **kwargs)
        return {**package, TASK: self.open_task(client_id)} if mtype == 0 else package

    def open_task(self, client_id: int) -> str:
        """Open a task of the newest version for the client; return its id."""
        task = self.training.assign(int(client_id))
        self.training.sent(task.id, task)
        return task.id

    def communicate_with(self, target_id: int, package: dict[str, Any]) -> dict[str, Any]:
        """Return a client's package, with the id of the task that it answers, and the facts that rules may need."""
        found = super().communicate_with(target_id, package)
        reply = dict(found) if isinstance(found, Mapping) else {}
        if TASK not in package:
            return reply
        client = self.clients[target_id]
        steps = client._working_amount  # the simulator's, of this time
        facts = {"num_examples": client.datavol, "client_lr": client.learning_rate, "local_steps": steps}
        return {**facts, **reply, TASK: package[TASK]}

    def unpack(self, packages_received_from_clients: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the packages as lists by name; None where a package lacks a key of another one."""
        packages = packages_received_from_clients
        names = dict.fromkeys(name for package in packages for name in package)
        return defaultdict(list, {name: [package.get(name) for package in packages] for name in names})

    def package_handler(self, received_packages: dict[str, list[Any]]) -> bool:
        """Push packages; return whether `run` logs a round. Each step is a round, also if several are made at once."""
        names, columns = list(received_packages), received_packages.values()
        packages = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        for place, package in enumerate(packages, 1):
            if not self._take(package):
                continue
            self.server.pull(out=self.model)
            self.current_round = self.server.version
            if place == len(packages):
                return True
            self._end_round()
            if self._if_exit():
                break
        return False

    def _take(self, package: dict[str, Any]) -> bool:
        """Push one package; return whether there is a new version."""
        before, output = self.server.version, self.gv.logger.output
        receipt = self.training.receive(str(package.get(TASK)), partial(_trained, package))
        if receipt is not None and receipt.status in NO_USE:
            self._require_some_of_use()
        if receipt is not None and receipt.report is not None:
            for name, value in receipt.report.metrics().items():
                output[f"step_{name}"].append(value)
            output["counts"] = self.training.counts
        return self.server.version > before


def _refuse_options(option: Mapping[str, Any]) -> None:
    """Raise AffluxError for options of FLGo that have no meaning for the adapter."""
    for name in ("save_checkpoint", "load_checkpoint"):
        if option.get(name):
            raise AffluxError(f"[flgo] {name} keeps the model alone: give algorithm(rule, store=...) instead")
    if option.get("algo_para"):
        raise AffluxError("[flgo] algo_para holds numbers by their place: give the options of the rule by name")
    if option["num_parallels"] > 1 and option.get("parallel_type") != "t":
        raise AffluxError("[flgo] clients may train in threads only: give parallel_type='t' with num_parallels")


def _trained(package: Mapping[str, Any]) -> Trained:
    count, loss, rate, steps = map(package.get, ("num_examples", "loss", "client_lr", "local_steps"))
    try:
        arrays = package["model"].state_dict(keep_vars=True)  # the parameters themselves
    except TypeError:  # a method of the model's own need not have this argument
        arrays = package["model"].state_dict()
    return Trained(arrays, count, loss, rate, steps, facts=package)
