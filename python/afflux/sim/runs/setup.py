"""Shared by all rules in a simulation of one task, config and seed: clients, initial params, schedule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from afflux.aggregation.options import why_unclipped
from afflux.ops.errors import ConfigError
from afflux.rules.rule import Rule
from afflux.rules.specs import RuleSpec, needs_validation_gradient
from afflux.server.server import Server
from afflux.sim.clients.flat_model import FlatModel, make_module, reproducible_libraries, tree_of
from afflux.sim.clients.schedule import Event, make_schedule
from afflux.sim.clients.training import Trainer
from afflux.sim.errors import note_on_errors
from afflux.sim.results.audit_log import Header
from afflux.sim.results.finished_runs import Job
from afflux.sim.results.model_file import module_arrays
from afflux.sim.results.run_result import params_sha256
from afflux.sim.workload.config import IMAGES, LORA, PAPERS, SimConfig
from afflux.sim.workload.delays import DELAYS_OF_TASK, DelayLaw, TiedDelays, delay_law
from afflux.sim.workload.ignored_settings import (
    OF_FUNCTION,
    OF_TRAINING,
    refuse_ignored_settings,
    settings_read,
    unread_by_rules,
)
from afflux.sim.workload.inputs import input_digests, refuse_other_inputs
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.selection import Population, UniformSelection, check_passes
from afflux.sim.workload.task import Partitioned, Task, clients_with_data, num_examples, tuned_on_validation
from afflux.sim.workload.task_registry import build_task, task_function

#: The settings on which the data, their division and the model depend.
_OF_INPUTS = ("task", "data", "model", "part", "delays", "availability", *OF_FUNCTION)


def num_parameters(config: SimConfig, task: Task | None = None) -> int:
    """Return the number of trained parameters of the model, d; `task` replaces that in the settings."""
    task = build_task(config) if task is None else task
    return len(FlatModel(make_module(task.model, 0), task.roles).params)


def refuse_pair(clients: Any) -> None:
    """Raise ConfigError for a pair of arrays (x, y), which would be two clients."""
    if isinstance(clients, tuple) and len(clients) == 2 and all(hasattr(data, "shape") for data in clients):
        raise ConfigError(
            "clients is a pair of arrays, which would be the data sets of two clients: divide the examples by "
            "partitioned(x, y, num_clients=...), or give a list of data sets (x, y)"
        )


class SimulationSetup:
    """Clients, initial params and schedule of one task, config and seed."""

    def __init__(self, config: SimConfig, seed: int, task: Task | None = None, digests: bool = False) -> None:
        """Load the data and divide it among the clients.

        Args:
            config: the settings.
            seed: of all random numbers.
            task: the task of the clients; None: the task in the settings.
            digests: whether the digests of the inputs are computed.

        Raises:
            ConfigError: a negative seed, missing data, or a task that does not go with the settings.
        """
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        function = None
        if task is None:
            task = build_task(config)
            function = task_function(config.task)
        else:
            refuse_ignored_settings(config, config.changed(), task, None)
        refuse_pair(task.clients)
        task = tuned_on_validation(task) if config.part == "validation" else task
        with note_on_errors("while the clients' data were made"):
            data = task.data_for_seed(seed)
        if config.task != IMAGES:
            config = replace(config, num_clients=len(data))
        if task.training is not None and config.client_optimizer == "scaffold":
            raise ConfigError("client_optimizer is scaffold, but the task has a training function of its own")
        if config.delays == DELAYS_OF_TASK and task.delays is None:
            raise ConfigError(f"delays is {DELAYS_OF_TASK}, but task {config.task} has no delays of its own")
        self.config, self.seed = config, seed
        self.model = FlatModel(make_module(task.model, seed), task.roles, config.device)
        clients = clients_with_data(data)
        counts = [num_examples(own) for own in data] if isinstance(data, list | tuple) else ()
        self.population = Population(len(data), clients, counts)
        self.trainer = Trainer(self.model, data, task, config)
        #: Number of examples of the server's validation data; 0: no validation data.
        self.num_validation = (num_examples(task.validation) or 0) if task.validation is not None else 0
        #: The task's own delays, or those tied to the data; None: those of the settings.
        self.delays = task.delays if config.delays == DELAYS_OF_TASK else _tied(config.delays, data)
        #: Those that runs of this task read.
        self.settings: Mapping[str, Any] = settings_read(config, task, function)
        division = task.clients.division if isinstance(task.clients, Partitioned) else {}
        self.division: Mapping[str, Any] = {"num_clients": len(data)} | division  #: see `RunResult.division`
        #: See `input_digests`; empty unless they were asked for.
        self.inputs: Mapping[str, str] = input_digests(config, task, data, self.model.module) if digests else {}
        self.metrics = tuple(task.metrics)  #: of the task
        #: The clients that are evaluated each, in ascending order.
        self.sample = () if task.evaluate_client is None else _sample(clients, config.fairness_clients, seed)

    def refuse_other_inputs(self, path: Path, header: Header) -> None:
        """Compare the inputs with those of a run that is continued.

        Other versions of packages, and a log without digests, are one line of notice each.

        Args:
            path: for messages.
            header: of the log of the run.

        Raises:
            ConfigError: an input is another one; the error names it.
        """
        facts: dict[str, Any] = {"number of clients": header.num_clients, "first params": header.first_params_sha256}
        facts["metrics"] = header.task_metrics
        then = facts | (header.inputs or {})
        facts_now = len(self.population.clients), params_sha256(self.model.initial_params), self.metrics
        now = dict(zip(facts, facts_now, strict=True)) | dict(self.inputs)
        versions = {"afflux": header.afflux, **(header.versions or {})}
        refuse_other_inputs(str(path), then, now, versions, header.inputs is not UNSET)

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of an arrival and of a dispatch: the model; for SCAFFOLD also the change of c_i, and c (d,) float32.

        If the codec of the c_i rounds, a client also pulls its own.
        """
        arrays, control = module_arrays(self.model.module), 0
        model = sum(arrays[name].nbytes for name in self.model.layout.roles if name in arrays)
        if self.config.client_optimizer == "scaffold":
            control = self.model.initial_params.nbytes
        return model + control, model + control * (1 if self.config.control_codec == "float32" else 2)

    def new_server(self, rule: Rule, **options: Any) -> Server:
        """Make a server with the initial params, for these clients."""
        params: Any = self.model.initial_params
        if self.model.initial_buffers is not None:
            self.model.load(self.model.initial_params, self.model.initial_buffers)
            params, options["layout"] = tree_of(self.model)
        return Server(
            rule,
            params,
            num_clients=len(self.population.clients),
            num_threads=1,
            seed=self.seed,
            faults="record",  # a client that diverges
            clip_norms=self.config.clip_norms or None,
            **options,
        )

    def check_rule(self, rule: Rule) -> None:
        """Raise ConfigError if the rule needs facts, validation data or another selection, or excludes clip_norms."""
        check_passes(rule, self.config.selection)
        if rule.needs.facts:
            names = ", ".join(rule.needs.facts)
            raise ConfigError(f"{rule.name} needs facts of arrivals ({names}), which simulated clients do not push")
        if needs_validation_gradient(rule) and not self.num_validation:
            raise ConfigError(f"{rule.name} scores updates on validation data: give the task validation=(x, y)")
        count, available = self.config.validation, self.num_validation
        if needs_validation_gradient(rule) and count > available and count != SimConfig.validation:
            raise ConfigError(f"validation is {count}, but the server has only {available} examples to draw from")
        if self.config.clip_norms and (why := why_unclipped(rule, accumulate=False)) is not None:
            raise ConfigError(f"clip_norms is {self.config.clip_norms:g}, but {why}")

    def schedule(self, spec: RuleSpec, selection: UniformSelection | None = None) -> Iterator[Event]:
        """Yield the events; they depend on the rule only if it waits for a cohort, or if `selection` reads results."""
        return make_schedule(spec, self.seed, self.config, self.population, self.delays, selection)


def inputs_of_jobs(jobs: Sequence[Job], config: SimConfig, task: Task | None = None) -> list[Mapping[str, str]]:
    """Return the digests of the inputs of each job; jobs that differ in other settings than `_OF_INPUTS` share them.

    Args:
        jobs: the jobs.
        config: settings of the jobs that have no settings.
        task: the task of the clients; default the task in the settings.

    Raises:
        ConfigError: see `SimulationSetup`.
    """
    digests: dict[tuple[Any, ...], Mapping[str, str]] = {}
    inputs = []
    with reproducible_libraries():
        for job in jobs:
            settings = replace(job.config or config, compile=False)
            key = job.seed, *(getattr(settings, name) for name in _OF_INPUTS)
            if key not in digests:
                digests[key] = SimulationSetup(settings, job.seed, task, digests=True).inputs
            inputs.append(digests[key])
    return inputs


def _sample(clients: Sequence[int], most: int, seed: int) -> Sequence[int]:
    stream = random_stream(seed, StreamPurpose.CLIENT_EVALUATION)
    places = stream.choice(len(clients), min(most, len(clients)), replace=False)
    return [clients[place] for place in sorted(places.tolist())]


def _tied(delays: str, data: Sequence[Any]) -> DelayLaw | None:
    """Return the delays that depend on the clients' data, if they do."""
    law = delay_law(delays)
    return law.of(data) if isinstance(law, TiedDelays) else None


def checked_settings(config: SimConfig, given: Iterable[str], rules: list[RuleSpec]) -> SimConfig:
    """Return the settings of a task by its name; by default the delays are those of the task itself, if it has some.

    Args:
        config: the settings.
        given: the names of those that were given.
        rules: of the runs.

    Raises:
        ConfigError: a setting was given that no run reads.
    """
    given = list(given)
    config.refuse_unread(given)
    config.refuse(given, unread_by_rules(rules))
    read_by_task = [name for name in given if name in (*OF_FUNCTION, *OF_TRAINING)]
    # Settings that differ from their defaults are checked when a run makes its task.
    unchecked = config.task != IMAGES and set(read_by_task) - set(config.changed())
    own = config.task.partition(":")[0] not in (IMAGES, PAPERS, LORA)
    free = own and config.delays == SimConfig.delays and "delays" not in given
    if not unchecked and not free:
        return config
    task = build_task(config, read_by_task)
    return replace(config, delays=DELAYS_OF_TASK) if free and task.delays is not None else config
