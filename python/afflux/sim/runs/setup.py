"""Shared by all rules in a simulation of one config and one seed: data, clients, initial params, schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from afflux.arrays.layout import Layout
from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim.clients.schedule import Arrival, Dispatch, make_schedule
from afflux.sim.clients.training import Trainer
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.partitions import PARTITIONS
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.rule_specs import RuleSpec


@dataclass(frozen=True, eq=False, slots=True)
class SimulationSetup:
    """Data, clients, initial params and schedule of one config and one seed; made by `SimulationSetup.of`."""

    config: SimConfig
    seed: int
    clients: tuple[int, ...]  #: those that hold data
    trainer: Trainer
    num_train: int  #: examples of the training part
    initial_params: np.ndarray  #: (d,) float32, the params of version 0

    @classmethod
    def of(cls, config: SimConfig, seed: int) -> "SimulationSetup":
        """Load the data and divide it among the clients.

        Raises:
            ConfigError: a negative seed, or missing data.
        """
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        data = config.load_data()
        shards = PARTITIONS[config.partition](
            data.y_train, config.num_clients, config.heterogeneity, random_stream(seed, StreamPurpose.PARTITION)
        )
        clients = tuple(client for client, shard in enumerate(shards) if len(shard))
        module = config.new_model(data, seed)
        layout = Layout.of(module)
        params = layout.flatten(module)
        trainer = Trainer(module, layout, data, shards, config)
        return cls(config, seed, clients, trainer, len(data.y_train), params)

    def new_server(self, rule: Rule, **options: Any) -> Server:
        """Make a server with the initial params, for these clients."""
        return Server(
            rule,
            self.initial_params,
            num_clients=len(self.clients),
            num_threads=1,
            seed=self.seed,
            faults="record",  # a client that diverges
            **options,
        )

    def schedule(self, spec: RuleSpec) -> Iterator[Dispatch | Arrival]:
        """Yield which client starts and which one finishes when; depends on the rule only if it waits for a cohort."""
        return make_schedule(spec, spec.build().buffer_size, self.seed, self.config, self.clients)
