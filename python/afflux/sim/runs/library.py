"""A simulation of the user's own model, data and clients."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afflux.arrays.roles import Roles
from afflux.sim.errors import ConfigError, known
from afflux.sim.results import run_folder
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.results.run_history import JobProgress
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.simulation_results import SimulationResults
from afflux.sim.results.tensorboard import FOLDER, require_tensorboard
from afflux.sim.runs.compare import Job, compare, make_jobs
from afflux.sim.workload.client_training import ClientTraining, sgd
from afflux.sim.workload.config import ENDS, MADE_IN_PYTHON, UNLIMITED, SimConfig
from afflux.sim.workload.delay_names import DELAYS_OF_TASK
from afflux.sim.workload.delays import DelayLaw
from afflux.sim.workload.ignored_settings import refuse_ignored_settings, refuse_settings_of_other_rules
from afflux.sim.workload.rule_specs import BUFFER_SIZE, RuleSpec, parse_rule
from afflux.sim.workload.task import Evaluate, Loss, SeededClients, Task, TrainingFunction

if TYPE_CHECKING:
    from torch import nn

#: Settings that are set by other arguments of `Simulation`.
_GIVEN_OTHERWISE = ("task", "data", "data_dir", "model", "partition", "alpha", "classes", "num_clients")


def _text_of(rule: object) -> str:
    """Return the rule, if it is a text."""
    if not isinstance(rule, str):
        raise ConfigError(
            f"a rule is of type {type(rule).__name__}, must be a text such as 'fedbuff:buffer_size=10', or "
            "'FILE.py:FUNCTION' for a rule of your own"
        )
    return rule


class Simulation:
    """Runs of some rules and seeds on one task; the command line's `afflux compare` as a library.

    With one seed every rule sees the same clients, delays and batches. The same arguments give the same bits.
    """

    def __init__(
        self,
        model: "nn.Module | Callable[..., nn.Module]",
        clients: "Sequence[Any] | SeededClients | Callable[..., Any]",
        training: ClientTraining | TrainingFunction | None = None,
        evaluate: Evaluate | None = None,
        *,
        rules: str | RuleSpec | Sequence[str | RuleSpec] = "fedbuff",
        seeds: Sequence[int] = (0,),
        paired: bool = False,
        buffer_size: int = BUFFER_SIZE,
        num_clients: int | None = None,
        loss: Loss | None = None,
        validation: Any = None,
        roles: Roles | None = None,
        delays: str | DelayLaw = "exponential",
        name: str = "own",
        **settings: Any,
    ) -> None:
        """Describe a simulation; `run` makes it.

        A run ends at the first of its limits: `arrivals` (1600 unless another limit is given), `rounds` (server
        steps), `virtual_time`, or `target` with `stop_at_target=True`.

        Args:
            model: a torch module, which is copied for each run, or a function that makes one; see `Task`.
            clients: the data set of each client, or `partitioned(...)`, or a function of the client's number, which is
                called whenever the client trains; see `Task`.
            training: `sgd(...)`, `fedprox(...)` or `scaffold(...)`; or a function (model, data, rng) -> mean loss,
                local steps, examples, which trains the model in place. Default `sgd()`. A function that takes settings
                such as client_lr as keyword-only parameters gets their values.
            evaluate: a function (model) -> accuracy, loss, such as `classification(x_test, y_test)`.
            rules: one rule or several, NAME or NAME:OPTION=VALUE:..., as on the command line.
            seeds: one run of each rule for each seed.
            paired: whether all rules get the updates of the first rule's clients.
            buffer_size: arrivals per server step, for the rules that have a buffer and do not set its size themselves.
            num_clients: number of clients, if `clients` is a function.
            loss: of `sgd` and the like, (output, labels) -> mean loss; default cross entropy.
            validation: the server's own data set (x, y), for rules that score updates by it.
            roles: the roles of arrays by patterns of names, such as {"codebook": "copied"}; see `Layout.of`.
            delays: law of the running times: a name, or (number of clients, rng) -> (client, rng) -> time.
            name: of the task, for logs and tables.
            settings: fields of `SimConfig`: concurrency, arrivals, rounds, protocol, eval_every, target, client_lr,
                compile...

        Raises:
            ConfigError: an unknown or impossible setting or rule, a setting that the training function does not take,
                or clients without a number.
        """
        if evaluate is None:
            raise ConfigError("give evaluate=, a function (model) -> accuracy, loss")
        allowed = [field.name for field in fields(SimConfig) if field.name not in _GIVEN_OTHERWISE]
        for setting in settings:
            known("setting", setting, allowed)
        if training is None:
            training = sgd()
        own = None if isinstance(training, ClientTraining) else training
        if isinstance(training, ClientTraining):
            if twice := sorted(training.settings.keys() & settings.keys()):
                raise ConfigError(f"{twice[0]} is given twice: it is part of training")
            settings |= training.settings
        self.task: Task | None = Task(
            model=model,
            clients=clients,
            evaluate=evaluate,
            training=own,
            num_clients=num_clients,
            loss=loss,
            validation=validation,
            roles=roles,
            delays=None if isinstance(delays, str) else delays,
        )
        given = list(settings)
        count = num_clients or getattr(clients, "num_clients", None) or len(clients)  # type: ignore[arg-type]
        settings |= {"num_clients": count, "delays": delays if isinstance(delays, str) else DELAYS_OF_TASK}
        if "arrivals" not in settings and any(settings.get(end) for end in ENDS):
            settings["arrivals"] = UNLIMITED
        if "concurrency" not in settings and settings.get("protocol") != "rounds":
            settings["concurrency"] = min(count, SimConfig.concurrency)
        self.config = SimConfig(task=f"{MADE_IN_PYTHON}:{name}", **settings)
        self.config.refuse_unread(given)
        refuse_ignored_settings(self.config, given, self.task, None)
        self._set_runs(rules, seeds, paired, buffer_size)
        refuse_settings_of_other_rules(self.config, given, [job.spec for job in self.jobs])

    @classmethod
    def of(
        cls,
        config: SimConfig,
        rules: str | RuleSpec | Sequence[str | RuleSpec],
        seeds: Sequence[int] = (0,),
        *,
        paired: bool = False,
        buffer_size: int = BUFFER_SIZE,
        task: Task | None = None,
    ) -> "Simulation":
        """Return the simulation of these settings, as the command line makes it; `task` replaces the task in the
        settings. The delays are those of the settings: `SimConfig(delays="task")` takes the task's own.
        """
        simulation = cls.__new__(cls)
        simulation.task, simulation.config = task, config
        simulation._set_runs(rules, seeds, paired, buffer_size)
        return simulation

    def _set_runs(
        self, rules: str | RuleSpec | Sequence[str | RuleSpec], seeds: Sequence[int], paired: bool, buffer_size: int
    ) -> None:
        rules, common = [rules] if isinstance(rules, str | RuleSpec) else rules, {"buffer_size": buffer_size}
        specs = [rule if isinstance(rule, RuleSpec) else parse_rule(_text_of(rule), common) for rule in rules]
        if not specs or not seeds:
            raise ConfigError("give at least one rule and one seed")
        if len({spec.label for spec in specs}) != len(specs) or len(set(seeds)) != len(seeds):
            raise ConfigError("a rule or a seed is given twice")
        for spec in specs:
            spec.build()
        self.jobs: list[Job] = make_jobs(specs, list(seeds), paired=paired)

    def run(
        self,
        *,
        processes: int = 1,
        workers: int = 1,
        out: Path | str | None = None,
        keep_updates: bool = False,
        tensorboard: bool = False,
        watch: JobProgress | None = None,
    ) -> SimulationResults:
        """Make all runs.

        Args:
            processes: number of runs at the same time, each in a separate process. The results are the same.
                More than one need a task that can be pickled: functions and classes at the top of a module.
            workers: processes of each run that train; 1: that of the run itself. The results are the same; more than
                one need a task that can be pickled.
            out: a new folder for the results and audit logs, or the folder of a call that finished no run, or of the
                same call that was killed; default: nothing is written.
            keep_updates: whether all updates are kept in files beside the logs, 4 d bytes each.
            tensorboard: whether TensorBoard's event files are written during the runs.
            watch: called with (index of the run, its progress); may raise an exception to stop.

        Returns:
            The results.

        Raises:
            ConfigError: the settings do not go together, data are missing, or `out` is not empty.
            TrainingError: the clients' trainings fail, or give numbers that are not finite (DivergedError).
            MissingExtraError: a package is not installed.
        """
        if tensorboard:
            require_tensorboard()
        if out is None:
            if keep_updates or tensorboard:
                raise ConfigError(f"{'keep_updates' if keep_updates else 'tensorboard'} needs out=, a folder")
            return self.run_into(None, processes=processes, workers=workers, watch=watch)
        finished: dict[int, list[RunResult]] = {}
        command = self.jobs, self.config, keep_updates, tensorboard
        with run_folder.new_run_folder(Path(out), self.config, finished, command) as folder:
            d = self.num_parameters() if keep_updates else None
            output = run_folder.create_audit_folder(folder, self.config, len(self.jobs), keep_updates, d=d)
            output = output._replace(tensorboard=folder / FOLDER if tensorboard else None)
            results = self.run_into(output, processes=processes, workers=workers, watch=watch, finished=finished)
            results.write(folder)
        return results

    def run_into(
        self,
        output: AuditOutput | None,
        *,
        processes: int = 1,
        workers: int = 1,
        watch: JobProgress | None = None,
        finished: dict[int, list[RunResult]] | None = None,
    ) -> SimulationResults:
        """Make all runs; see `compare`."""
        results = compare(
            self.jobs,
            self.config,
            processes=processes,
            watch=watch,
            output=output,
            finished=finished,
            task=self.task,
            workers=workers,
        )
        return SimulationResults(results, self.config)

    def num_parameters(self) -> int:
        """Return the number of trained parameters of the model, d."""
        from afflux.sim.clients.flat_model import FlatModel, make_module
        from afflux.sim.workload.task_registry import build_task

        task = build_task(self.config) if self.task is None else self.task
        return len(FlatModel(make_module(task.model, 0), task.roles).params)
