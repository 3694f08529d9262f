"""What all rules share that are simulated with one config and one seed: data, clients, the first model, the events."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afflux.layout import Layout
from afflux.sim import models
from afflux.sim.clients import Trainer
from afflux.sim.config import RuleSpec, SimConfig
from afflux.sim.delays import DELAYS
from afflux.sim.errors import ConfigError
from afflux.sim.events import Arrival, Dispatch, schedule
from afflux.sim.partitions import PARTITIONS
from afflux.sim.streams import Purpose, stream
from afflux.sim.tasks import load


@dataclass(frozen=True, eq=False, slots=True)
class World:
    """See the module; made by `World.of`."""

    config: SimConfig
    seed: int
    clients: tuple[int, ...]  #: those that hold data
    trainer: Trainer
    first: np.ndarray  #: (d,) float32, the params of version 0

    @classmethod
    def of(cls, config: SimConfig, seed: int) -> "World":
        """Load the data and divide it; raises ConfigError for a negative seed or missing data."""
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        task = load(config.data, Path(config.data_dir) if config.data_dir else None)
        shards = PARTITIONS[config.partition](
            task.y_train, config.num_clients, config.alpha, stream(seed, Purpose.PARTITION)
        )
        clients = tuple(client for client, shard in enumerate(shards) if len(shard))
        module = models.build(config.model, task.shape, task.num_classes, stream(seed, Purpose.MODEL))
        layout = Layout.of(module)
        first = layout.flatten(module)
        return cls(config, seed, clients, Trainer(module, layout, task, shards, config), first)

    def events(self, spec: RuleSpec) -> Iterator[Dispatch | Arrival]:
        """Who starts and who finishes when; the rule matters only if it waits for a cohort."""
        config = self.config
        concurrency, refill = config.concurrency, config.refill
        if spec.name == "fedavg":
            # The synchronous baseline: its cohort starts together and is waited for.
            concurrency = refill = spec.build().buffer_size
        if concurrency > len(self.clients):
            raise ConfigError(
                f"concurrency is {concurrency}, but only {len(self.clients)} of {config.num_clients} "
                f"clients hold data with seed {self.seed}"
            )
        return schedule(
            self.clients,
            concurrency=concurrency,
            arrivals=config.arrivals,
            delay=DELAYS[config.delays](config.num_clients, stream(self.seed, Purpose.DELAY_CLIENTS)),
            selection=stream(self.seed, Purpose.SELECTION),
            times=stream(self.seed, Purpose.DELAY_TIMES),
            refill=refill,
        )


def num_parameters(config: SimConfig) -> int:
    """Return d of the model that `config` describes."""
    task = load(config.data, Path(config.data_dir) if config.data_dir else None)
    module = models.build(config.model, task.shape, task.num_classes, stream(0, Purpose.MODEL))
    return sum(parameter.numel() for parameter in module.parameters())
