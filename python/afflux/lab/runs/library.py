"""A simulation of the user's own model, data and clients."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afflux.arrays.roles import Roles
from afflux.lab.results import audit_log, run_folder
from afflux.lab.results.finished_runs import Job, Runs, check_inputs
from afflux.lab.results.run_history import JobProgress, OnEvaluation
from afflux.lab.results.run_result import buffers_text
from afflux.lab.results.simulation_results import SimulationResults
from afflux.lab.runs.compare import compare, inputs_of_jobs, make_jobs
from afflux.lab.runs.run_checkpoint import CHECKPOINT_SECONDS, StoredRun, interrupted_run
from afflux.lab.runs.workers import Workers
from afflux.lab.tasks.ignored_settings import (
    OF_FUNCTION,
    OF_TRAINING,
    refuse_ignored_settings,
    unread_by_rules,
)
from afflux.lab.tasks.registry import build_task
from afflux.ops.errors import ConfigError
from afflux.ops.validation import as_int, brief, known
from afflux.rules.specs import RuleSpec, read_rules
from afflux.sim.clients.training import with_settings
from afflux.sim.errors import require
from afflux.sim.workload.config import IMAGES, LORA, MADE_IN_PYTHON, PAPERS, SETTINGS, SimConfig, unlimit_arrivals
from afflux.sim.workload.delays import DELAYS_OF_TASK, DelayLaw
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from afflux.sim.workload.task import (
    ClientTraining,
    Evaluate,
    EvaluateClient,
    Loss,
    SeededClients,
    Task,
    TrainingFunction,
    sgd,
)

if TYPE_CHECKING:
    from torch import nn

#: One rule or several: texts that `parse_rule` reads, or what it returns.
Rules = str | RuleSpec | Sequence[str | RuleSpec]

_LOGGER = logging.getLogger("afflux")
#: Settings that are set by other arguments of `Simulation`.
_GIVEN_OTHERWISE = ("task", "data", "data_dir", "model", "partition", "alpha", "classes", "num_clients")
_TEXT = "a string such as 'fedbuff:buffer_size=10', 'LABEL=fedbuff', or 'FILE.py:FUNCTION' for a rule of your own"


def rules_by_name(rules: Rules, common: Mapping[str, Any] | None = None) -> list[RuleSpec]:
    """Return the rules by name, each of which can be built; see `read_rules`.

    Raises:
        ConfigError: an unknown rule or option, a bad value, a rule that is given twice, or something else than a rule.
    """
    specs = [rules] if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable) else [*rules]
    for rule in specs:
        if not isinstance(rule, str | RuleSpec):
            raise ConfigError(f"a rule is of type {type(rule).__name__}, must be {_TEXT}")
    return read_rules(specs, common)


def checked_settings(config: SimConfig, names: Iterable[str], rules: list[RuleSpec]) -> SimConfig:
    """Return the settings of a task by its name; by default the delays are those of the task itself, if it has some.

    Args:
        config: the settings.
        names: of the settings that the user set.
        rules: of the runs.

    Raises:
        ConfigError: a setting was set that no run reads.
    """
    user_set = list(names)
    config.refuse_unread(user_set)
    config.refuse(user_set, unread_by_rules(rules))
    read_by_task = [name for name in user_set if name in (*OF_FUNCTION, *OF_TRAINING)]
    # Settings that differ from their defaults are checked when a run makes its task.
    unchecked = config.task != IMAGES and set(read_by_task) - set(config.changed())
    is_user_task = config.task.partition(":")[0] not in (IMAGES, PAPERS, LORA)
    takes_delays = is_user_task and config.delays == SimConfig.delays and "delays" not in user_set
    if not unchecked and not takes_delays:
        return config
    task = build_task(config, read_by_task)
    return replace(config, delays=DELAYS_OF_TASK) if takes_delays and task.delays is not None else config


class Simulation:
    """Runs of some rules and seeds on one task; the command line's `afflux compare` as a library.

    With one seed every rule sees the same clients, delays and batches. The same arguments give the same result
    bit for bit.
    """

    def __init__(
        self,
        model: "nn.Module | Callable[..., nn.Module]",
        clients: "Sequence[Any] | SeededClients | Callable[..., Any]",
        training: ClientTraining | TrainingFunction | None = None,
        evaluate: Evaluate | None = None,
        *,
        rules: Rules = "fedbuff",
        seeds: Sequence[int] = (0,),
        paired: bool = False,
        buffer_size: int | None = None,
        num_clients: int | None = None,
        loss: Loss | None = None,
        validation: Any = None,
        vectors: Mapping[str, Callable[..., Any]] | None = None,
        tuning: Evaluate | None = None,
        metrics: Sequence[Metric] = CLASSIFICATION,
        evaluate_client: EvaluateClient | None = None,
        personalise: Callable[..., object] | None = None,
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
            training: `sgd(...)`, `fedprox(...)` or `scaffold(...)`; or a function (model, data, rng) -> mean loss or
                None, local steps, examples, which trains the model in place. Default `sgd()`. A function that takes
                settings such as client_lr as keyword-only parameters gets their values.
            evaluate: a function (model) -> accuracy, loss, such as `classification(x_test, y_test)`; or, with
                `metrics`, -> {name: number}.
            rules: one rule or several, NAME or NAME:OPTION=VALUE:..., as on the command line.
            seeds: one run of each rule for each seed.
            paired: whether all rules get the updates of the first rule's clients.
            buffer_size: arrivals per server step, for the rules that have a buffer and do not set its size themselves.
                None: 10, but a function in a file keeps its own default.
            num_clients: number of clients, if `clients` is a function.
            loss: of `sgd` and the like, (output, labels) -> mean loss; default cross entropy.
            validation: the server's own data set (x, y), for rules that score updates by it.
            vectors: the other vectors that rules are handed, by name: functions (model) -> (d,); see `Task`.
            tuning: as `evaluate`, on examples that no client and no test has, for `tune`. Not needed if `clients` is
                `partitioned(...)` and `evaluate` is `classification(...)`.
            metrics: what `evaluate` returns; default accuracy and loss. Tables, grids and `target` take the first.
            evaluate_client: (model, data of a client) -> the same, for `RunResult.client_evaluations`: the clients of a
                sample (`fairness_clients`) at the end of a run, and after each `fairness_every` arrivals.
            personalise: (model, data of a client, rng), adapts the model to a client in place before a second
                evaluation of the client.
            roles: the roles of arrays by patterns of names, such as {"codebook": "copied"}; see `Layout.of`.
            delays: distribution of the running times: a name, or (number of clients, rng) -> (client, rng) -> time.
            name: of the task, for logs and tables.
            settings: fields of `SimConfig`: concurrency, arrivals, rounds, protocol, eval_every, target, client_lr,
                compile...

        Raises:
            ConfigError: an unknown or impossible setting or rule, a setting that the training function does not take,
                or clients without a number.
        """
        if evaluate is None:
            raise ConfigError("give evaluate=, a function (model) -> accuracy, loss")
        allowed = [name for name in SETTINGS if name not in _GIVEN_OTHERWISE]
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
            vectors={} if vectors is None else vectors,
            tuning=tuning,
            metrics=metrics,
            evaluate_client=evaluate_client,
            personalise=personalise,
            roles=roles,
            delays=None if isinstance(delays, str) else delays,
        )
        names = list(settings)
        count = num_clients or getattr(clients, "num_clients", None) or len(clients)  # type: ignore[arg-type]
        settings |= {"num_clients": count, "delays": delays if isinstance(delays, str) else DELAYS_OF_TASK}
        unlimit_arrivals(settings, "arrivals" in settings)
        if "concurrency" not in settings and settings.get("protocol") != "rounds":
            settings["concurrency"] = min(count, int(SimConfig.concurrency))
        self.config = SimConfig(task=f"{MADE_IN_PYTHON}:{name}", **settings)
        if own is not None:
            with_settings(own, self.config)  # raises for a function that cannot be called
        self.config.refuse_unread(names)
        refuse_ignored_settings(self.config, names, self.task, None)
        self._set_runs(rules, seeds, paired, buffer_size)
        self.config.refuse(names, unread_by_rules(job.spec for job in self.jobs))

    @classmethod
    def of(
        cls,
        config: "SimConfig | str",
        rules: Rules,
        seeds: Sequence[int] = (0,),
        *,
        paired: bool = False,
        buffer_size: int | None = None,
        task: Task | None = None,
        **settings: Any,
    ) -> "Simulation":
        """Return the simulation of a task by its name, as the command line makes it.

        Args:
            config: the task as in --task: images, papers:dataset=NAME:network=NAME, lora:...; or FILE.py:FUNCTION,
                which is executed.
            rules: see `Simulation`.
            seeds: see `Simulation`.
            paired: see `Simulation`.
            buffer_size: see `Simulation`.
            task: replaces the task in the settings.
            settings: as on the command line, with `_`: data, model, num_clients, delays (also "task": those of the
                task), ...

        Raises:
            ConfigError: an unknown or impossible setting or rule.
        """
        if isinstance(config, str):
            for setting in settings:
                known("setting", setting, SETTINGS)
            unlimit_arrivals(settings, "arrivals" in settings)
            config = SimConfig(task=config, **settings)
            config = checked_settings(config, settings, rules_by_name(rules, {"buffer_size": buffer_size}))
        simulation = cls.__new__(cls)
        simulation.task, simulation.config = task, config
        simulation._set_runs(rules, seeds, paired, buffer_size)
        return simulation

    def _set_runs(self, rules: Rules, seeds: Sequence[int], paired: bool, buffer_size: int | None) -> None:
        specs = rules_by_name(rules, {"buffer_size": buffer_size})
        numbers = [as_int(seed) for seed in seeds] if isinstance(seeds, Iterable) else [None]
        plain_seeds = [number for number in numbers if number is not None]
        if len(plain_seeds) < len(numbers):
            raise ConfigError(f"seeds is {brief(seeds)}, must be a sequence of whole numbers, such as [0, 1, 2]")
        if not specs or not plain_seeds:
            raise ConfigError("give at least one rule and one seed")
        if len(set(plain_seeds)) != len(plain_seeds):
            raise ConfigError("a seed is given twice")
        self.jobs: list[Job] = make_jobs(specs, plain_seeds, paired=paired)

    def run(
        self,
        *,
        processes: int = 1,
        workers: Workers = 1,
        out: Path | str | None = None,
        store: Path | str | None = None,
        checkpoint_every: float = CHECKPOINT_SECONDS,
        watch: JobProgress | None = None,
        on_evaluation: OnEvaluation | None = None,
    ) -> SimulationResults:
        """Make all runs.

        A run that diverges, whose process is killed or, with faults="raise", in which a client fails ends alone:
        `SimulationResults.failures` has it. After Ctrl-C or another error, the results of the finished runs are in
        `out`, and the same call continues: it makes the runs that were interrupted or killed, or have failed, again.

        Args:
            processes: number of runs at the same time, each in a separate process. The results are the same.
                More than one need a task that can be pickled: functions and classes at the top of a module.
            workers: processes of each run that train; 1: the process of the run. The results are the same; more than
                one need a task that can be pickled. "ray": tasks of Ray, one for each CPU of the cluster.
            out: a new folder for the results and audit logs, or the folder of the same call, perhaps with fewer rules
                or seeds, whose finished runs are not made again; default: nothing is written. A change of the
                simulation's functions is not noticed: it needs a new folder.
            store: a new folder in which the server of a single run is kept, with all that the same call needs to
                continue the run after an interruption, to the bits and files of a run without one. Needs `out`.
            checkpoint_every: seconds between two checkpoints in the store; 0: after every event. Ctrl-C and SIGTERM
                make one, too.
            watch: called with (index of the run, its progress); may raise an exception to stop.
            on_evaluation: called with (`TrackedRun`, dict of numbers) in this process, after each evaluation but the
                first one, of the initial params: the number of arrivals, those of the evaluation, and the means of
                `Report.metrics` over the rounds since the previous one. May raise an exception to stop.

        Returns:
            The results.

        Raises:
            ConfigError: the settings do not go together, data are missing, `out` or `store` holds other things, or
                another command writes to `out`.
            TrainingError: no run has a result, because the clients' trainings fail, or give numbers that are not finite
                (DivergedError).
            MissingExtraError: a package is not installed.
        """
        _warn_of_buffer_sizes(self.jobs)
        options: dict[str, Any] = {"processes": processes, "workers": workers, "watch": watch}
        options["on_evaluation"] = on_evaluation
        if out is None:
            if store is not None:
                raise ConfigError("store needs out=, a folder")
            finished: dict[int, Runs] = {}
            compare(self.jobs, self.config, task=self.task, finished=finished, **options)
            return SimulationResults.of_runs(finished, self.config)
        require(*run_folder.PACKAGES)
        output = run_folder.usable_path(out) / audit_log.FOLDER
        if store is not None:
            if len(self.jobs) != 1 or self.jobs[0].followers:
                raise ConfigError("a store is for one rule and one seed")
            interrupted = interrupted_run(run_folder.usable_path(store), output, self.jobs[0], self.config)
            options["store"] = StoredRun(Path(store), checkpoint_every, interrupted)
        return run_in_folder(self.jobs, self.config, output, self.task, **options)


def run_in_folder(
    jobs: Sequence[Job],
    config: SimConfig,
    output: Path,
    task: Task | None = None,
    *,
    store: StoredRun | None = None,
    **options: Any,
) -> SimulationResults:
    """Make the runs that a run folder lacks, and write the results of all.

    Args:
        jobs: all runs of the folder.
        config: settings of the jobs that have no settings, and those for tables.
        output: the folder of their logs in the run folder.
        task: the task of the clients; default the task in the settings.
        store: of the server of a single job.
        options: of `compare`.

    Returns:
        All results; those of an earlier command have no params.

    Raises:
        ConfigError: see `run_folder.open_run_folder`; or a finished run had other inputs.
        TrainingError: no run has a result.
    """
    folder, jobs = output.parent, [job._replace(config=job.config or config) for job in jobs]
    resumes = store is not None and store.interrupted is not None
    with run_folder.open_run_folder(jobs, config, output, resumes) as finished:
        if ended := finished.lines:
            inputs = inputs_of_jobs([jobs[index] for index in ended], config, task)
            check_inputs(str(folder), ended, dict(zip(ended, inputs, strict=True)))
        options |= {"output": output, "task": task, "finished": finished, "store": store}
        compare(jobs, config, **options)
        return SimulationResults.of_runs(finished, config).write(folder)


def _warn_of_buffer_sizes(jobs: Iterable[Job]) -> None:
    """Warn if the rules that have a buffer do not take as many arrivals per step: that alone changes their scores."""
    rules = {spec.label: spec.build() for job in jobs for spec in (job.spec, *job.followers)}
    sizes = {label: rule.buffer_size for label, rule in rules.items() if rule.buffer_size > 1}
    if len({*sizes.values()}) > 1:
        _LOGGER.warning("the rules differ in their buffers, %s: compare them at equal M", buffers_text(sizes))
