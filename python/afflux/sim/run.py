"""One run: one rule, one seed, from the first dispatch to the last arrival."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from afflux.layout import Layout
from afflux.server import Server
from afflux.sim import models
from afflux.sim.broadcast import Broadcast, Sent
from afflux.sim.clients import Trainer, one_thread
from afflux.sim.config import RuleSpec, SimConfig
from afflux.sim.errors import ConfigError, DivergedError
from afflux.sim.events import Arrival, Dispatch
from afflux.sim.partitions import PARTITIONS
from afflux.sim.protocol import events_of
from afflux.sim.result import Row, RunResult
from afflux.sim.streams import Purpose, stream
from afflux.sim.tasks import load
from afflux.sim.validation import Validation, wants

Progress = Callable[[int], None]
"""Called after each arrival with the number of arrivals so far; may raise to stop the run."""


def run(spec: RuleSpec, seed: int, config: SimConfig, progress: Progress | None = None) -> RunResult:
    """Simulate `spec` with `seed`.

    The same arguments give the same bits, in this process or another; runs with one seed share
    partition, first model, dispatches, delays and batches, whatever the rule.
    """
    if seed < 0:
        raise ConfigError(f"seed is {seed}, must be 0 or more")
    with one_thread():
        return _run(spec, seed, config, progress or (lambda arrivals: None))


def _run(spec: RuleSpec, seed: int, config: SimConfig, progress: Progress) -> RunResult:
    rule = spec.build()
    task = load(config.data, Path(config.data_dir) if config.data_dir else None)
    shards = PARTITIONS[config.partition](
        task.y_train, config.num_clients, config.heterogeneity, stream(seed, Purpose.PARTITION)
    )
    clients = [client for client, shard in enumerate(shards) if len(shard)]
    if config.arrivals < rule.buffer_size:
        raise ConfigError(f"arrivals is {config.arrivals}, but {spec.label} steps after {rule.buffer_size}")
    module = models.build(config.model, task.shape, task.num_classes, stream(seed, Purpose.MODEL))
    layout = Layout.of(module)
    server = Server(rule, layout.flatten(module), num_clients=len(clients), num_threads=1)
    trainer = Trainer(module, layout, task, shards, config)
    broadcast = Broadcast(server, config, len(clients))
    validation = None
    if wants(rule):
        rng = stream(seed, Purpose.VALIDATION)
        validation = Validation(server, trainer, len(task.y_train), config.validation, config.refresh_every, rng)

    rows = [Row(0, 0, 0.0, *trainer.evaluate(server.params))]
    staleness: list[int] = []
    round_staleness: list[int] = []
    seconds: list[float] = []
    sent: dict[int, Sent] = {}
    for event in events_of(spec, rule.buffer_size, seed, config, clients):
        if isinstance(event, Dispatch):
            sent[event.sequence] = broadcast.pull(event.client, event.age)
            continue
        start = sent.pop(event.sequence)
        rng = stream(seed, Purpose.BATCHES, event.sequence)
        trained = trainer.train(event.client, start.model.params, rule.kind, rng, start.shift)
        if not (math.isfinite(trained.loss) and np.isfinite(trained.vector).all()):
            raise DivergedError(
                f"{spec.label}, seed {seed}: client {event.client} diverged at arrival "
                f"{len(staleness) + 1} (loss {trained.loss:g}); lower client_lr or server_lr"
            )
        receipt = server.push(
            event.client,
            trained.vector,
            version=start.model.version,
            num_examples=trained.num_examples,
            loss=trained.loss,
        )
        broadcast.finished(event.client, start, trained)
        if validation is not None:
            validation.refresh()
        staleness.append(receipt.staleness)
        if receipt.report is not None:
            round_staleness.append(int(np.max(receipt.report.staleness)))
            seconds.append(receipt.report.seconds)
        if len(staleness) % config.eval_every == 0 or len(staleness) == config.arrivals:
            rows.append(_evaluated(trainer, server, event, len(staleness), rows[-1]))
        progress(len(staleness))
    return RunResult(
        spec=spec,
        seed=seed,
        rows=tuple(rows),
        staleness=np.array(staleness, dtype=np.int64),
        round_staleness=np.array(round_staleness, dtype=np.int64),
        server_seconds=np.array(seconds),
        state_bytes=server.state_bytes,
        num_clients=len(clients),
        params=np.array(server.params),
    )


def _evaluated(trainer: Trainer, server: Server, event: Arrival, arrivals: int, last: Row) -> Row:
    # The model did not change since the last row if the version did not.
    if server.version == last.version:
        return last._replace(arrivals=arrivals, virtual_time=event.time)
    return Row(arrivals, server.version, event.time, *trainer.evaluate(server.params))
