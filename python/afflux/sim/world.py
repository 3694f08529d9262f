"""What all rules share that are simulated with one config and one seed: data, clients, the first model, the events."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afflux.arrays.layout import Layout
from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim import models
from afflux.sim.clients import Trainer
from afflux.sim.config import RuleSpec, SimConfig
from afflux.sim.errors import ConfigError
from afflux.sim.events import Arrival, Dispatch
from afflux.sim.partitions import PARTITIONS
from afflux.sim.protocol import events_of
from afflux.sim.streams import Purpose, stream
from afflux.sim.tasks import load


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
        task = load(config.data, Path(config.data_dir) if config.data_dir else None)
        shards = PARTITIONS[config.partition](
            task.y_train, config.num_clients, config.heterogeneity, stream(seed, Purpose.PARTITION)
        )
        clients = tuple(client for client, shard in enumerate(shards) if len(shard))
        module = models.build(config.model, task.shape, task.num_classes, stream(seed, Purpose.MODEL))
        layout = Layout.of(module)
        first = layout.flatten(module)
        trainer = Trainer(module, layout, task, shards, config)
        return cls(config, seed, clients, trainer, len(task.y_train), first)

    def server(self, rule: Rule, **options: Any) -> Server:
        """A server of the first params, for these clients."""
        return Server(rule, self.first, num_clients=len(self.clients), num_threads=1, seed=self.seed, **options)

    def events(self, spec: RuleSpec) -> Iterator[Dispatch | Arrival]:
        """Who starts and who finishes when; the rule matters only if it waits for a cohort."""
        return events_of(spec, spec.build().buffer_size, self.seed, self.config, self.clients)


def num_parameters(config: SimConfig) -> int:
    """Return d of the model that `config` describes."""
    task = load(config.data, Path(config.data_dir) if config.data_dir else None)
    module = models.build(config.model, task.shape, task.num_classes, stream(0, Purpose.MODEL))
    return sum(parameter.numel() for parameter in module.parameters())
