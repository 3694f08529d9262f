"""Shared by all rules in a simulation of one task, config and seed: clients, initial params, schedule, event loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from afflux.aggregation.options import why_unclipped
from afflux.ops.codecs import Codec
from afflux.ops.errors import ConfigError
from afflux.rules.rule import Rule
from afflux.rules.specs import RuleSpec
from afflux.server.assembly import RepeatedKey
from afflux.server.server import Server
from afflux.sim.clients.control_variates import ControlVariates
from afflux.sim.clients.flat_model import FlatModel, make_module, tree_of
from afflux.sim.clients.schedule import Event, make_schedule
from afflux.sim.clients.training import Trainer, Training
from afflux.sim.errors import note_on_errors
from afflux.sim.loop import EventLoop
from afflux.sim.workload.attacks import attack_law
from afflux.sim.workload.config import IMAGES, SimConfig
from afflux.sim.workload.delays import DELAYS_OF_TASK, DelayLaw, TiedDelays, delay_law
from afflux.sim.workload.selection import Population, UniformSelection, check_participation, selection_law
from afflux.sim.workload.task import VALIDATION_VECTOR, Task, clients_with_data, num_examples, tuned_on_validation


class SimulationSetup:
    """Clients and initial params of one task, config and seed; makes servers, schedules and event loops for them."""

    def __init__(self, config: SimConfig, seed: int, task: Task) -> None:
        """Load the data and divide it among the clients.

        Args:
            config: the settings.
            seed: of all random numbers.
            task: the task of the clients.

        Raises:
            ConfigError: a negative seed, missing data, or a task that does not go with the settings.
        """
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        task = tuned_on_validation(task) if config.part == "validation" else task
        with note_on_errors("while the clients' data were made"):
            data = task.data_for_seed(seed)
        if config.task != IMAGES:
            config = replace(config, num_clients=len(data))
        if task.training is not None and config.client_optimizer == "scaffold":
            raise ConfigError("client_optimizer is scaffold, but the task has a training function of its own")
        if config.delays == DELAYS_OF_TASK and task.delays is None:
            raise ConfigError(f"delays is {DELAYS_OF_TASK}, but task {config.task} has no delays of its own")
        self.config, self.seed, self.task, self.data = config, seed, task, data
        self.model = FlatModel(make_module(task.model, seed), task.roles, config.device)
        counts = [num_examples(own) for own in data] if isinstance(data, list | tuple) else ()
        self.population = Population(len(data), clients_with_data(data), counts)
        self.trainer = Trainer(self.model, data, task, config)
        #: Number of examples of the server's validation data; 0: no validation data.
        self.num_validation = (num_examples(task.validation) or 0) if task.validation is not None else 0
        attack, clients = attack_law(config.attack), self.population.clients
        self._attacks = {} if attack is None else dict.fromkeys(clients[: attack.clients], partial(attack, seed=seed))
        if 0 < len(clients) == len(self._attacks):
            raise ConfigError(f"attack is {config.attack}, but only {len(clients)} clients hold data")
        #: The task's own delays, or those tied to the data; None: those of the settings.
        self.delays = task.delays if config.delays == DELAYS_OF_TASK else _tied(config.delays, data)

    def new_server(self, spec: RuleSpec, **options: Any) -> Server:
        """Make a server of a rule with the initial params, for these clients; see `build_rule`."""
        rule = self.build_rule(spec)
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
            noise_key=self.noise_key(rule),
            **options,
        )

    def noise_key(self, rule: Rule) -> bytes | None:
        """Return the key of a simulated server's noise, which is not secret; None if the rule adds none."""
        return RepeatedKey(self.seed.to_bytes(32, "little")) if rule.needs.noise else None

    def build_rule(self, spec: RuleSpec) -> Rule:
        """Return the rule.

        Raises:
            ConfigError: it needs facts, validation data, a vector that the task lacks, or another selection; it rejects
                clip_norms; or the run has fewer arrivals than one round of it.
        """
        rule = spec.build()
        check_participation(rule, self.config.selection, self.config.rounds)
        if rule.needs.facts:
            names = ", ".join(rule.needs.facts)
            raise ConfigError(f"{rule.name} needs facts of arrivals ({names}), which simulated clients do not push")
        handed_in = {*rule.needs.handed_in}.difference(self.task.vectors)
        if handed_in - {VALIDATION_VECTOR}:
            raise ConfigError(f"{rule.name} needs the vectors {sorted(handed_in)}: give them by the task's vectors=")
        if handed_in and not self.num_validation:
            raise ConfigError(f"{rule.name} scores updates on validation data: give the task validation=(x, y)")
        count, available = self.config.validation, self.num_validation
        if handed_in and count > available and count != SimConfig.validation:
            raise ConfigError(f"validation is {count}, but the server has only {available} examples to draw from")
        if self.config.clip_norms and (why := why_unclipped(rule, accumulate=False)) is not None:
            raise ConfigError(f"clip_norms is {self.config.clip_norms:g}, but {why}")
        if self.config.arrivals < rule.buffer_size:
            raise ConfigError(f"arrivals is {self.config.arrivals}, but {spec.label} steps after {rule.buffer_size}")
        return rule

    def schedule(self, spec: RuleSpec, selection: UniformSelection | None = None) -> Iterator[Event]:
        """Yield the events; they depend on the rule only if it waits for a cohort, or if `selection` reads results."""
        return make_schedule(spec, self.seed, self.config, self.population, self.delays, selection)

    def loop(
        self, spec: RuleSpec, servers: Sequence[Server], training: Training, ended: Callable[[], bool] = lambda: False
    ) -> EventLoop:
        """Make the loop.

        Args:
            spec: the rule of the first server, from whose params the clients train.
            servers: all servers.
            training: where the clients train.
            ended: whether the run ends before the next event; it ends in any case at the limit of virtual time.
        """
        config, num_clients, controls = self.config, len(self.population.clients), None
        if config.client_optimizer == "scaffold":
            size, codec = len(self.model.initial_params), Codec(config.control_codec)
            controls = ControlVariates(size, num_clients, codec, self.seed)
        selection = selection_law(config.selection)
        return EventLoop(
            servers,
            training,
            partial(self.schedule, spec, selection),
            client_lr=config.client_lr,
            num_clients=num_clients,
            stale_models=config.stale_models if config.protocol == "rounds" else 1,
            controls=controls,
            selection=selection,
            attacks=self._attacks,
            ends=lambda event: ended() or 0 < config.virtual_time < event.time,
        )


def _tied(delays: str, data: Sequence[Any]) -> DelayLaw | None:
    """Return the delays that depend on the clients' data, if they do."""
    law = delay_law(delays)
    return law.of(data) if isinstance(law, TiedDelays) else None
