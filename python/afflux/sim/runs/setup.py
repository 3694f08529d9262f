"""What all rules share that are simulated with one config and one seed: data, clients, the first model, the events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from afflux.layout import Layout
from afflux.rule import Rule
from afflux.server import Server
from afflux.sim.clients.schedule import Arrival, Dispatch, make_schedule
from afflux.sim.clients.training import Trainer
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.partitions import PARTITIONS
from afflux.sim.workload.random_streams import Purpose, stream
from afflux.sim.workload.rule_specs import RuleSpec


@dataclass(frozen=True, eq=False, slots=True)
class World:
    """See the module; made by `World.of`."""

    config: SimConfig
    seed: int
    clients: tuple[int, ...]  #: those that hold data
    trainer: Trainer
    num_train: int  #: examples of the training part
    first: np.ndarray  #: (d,) float32, the params of version 0

    @classmethod
    def of(cls, config: SimConfig, seed: int) -> "World":
        """Load the data and divide it; raises ConfigError for a negative seed or missing data."""
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        task = config.load_data()
        shards = PARTITIONS[config.partition](
            task.y_train, config.num_clients, config.heterogeneity, stream(seed, Purpose.PARTITION)
        )
        clients = tuple(client for client, shard in enumerate(shards) if len(shard))
        module = config.new_model(task, seed)
        layout = Layout.of(module)
        first = layout.flatten(module)
        trainer = Trainer(module, layout, task, shards, config)
        return cls(config, seed, clients, trainer, len(task.y_train), first)

    def server(self, rule: Rule, **options: Any) -> Server:
        """A server of the first params, for these clients."""
        return Server(rule, self.first, num_clients=len(self.clients), num_threads=1, seed=self.seed, **options)

    def events(self, spec: RuleSpec) -> Iterator[Dispatch | Arrival]:
        """Who starts and who finishes when; the rule matters only if it waits for a cohort."""
        return make_schedule(spec, spec.build().buffer_size, self.seed, self.config, self.clients)
