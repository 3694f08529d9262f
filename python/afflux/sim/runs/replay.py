"""A kept stream of updates fed to other rules: only the aggregation differs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np

from afflux.sim import interrupts
from afflux.sim.clients.training import one_thread
from afflux.sim.errors import ConfigError
from afflux.sim.results.audit_log import ArrivalLine, Log
from afflux.sim.results.run_result import RunResult, sha256
from afflux.sim.runs.setup import World
from afflux.sim.runs.simulated_server import Finished, Follower, Progress, Pull, follow
from afflux.sim.runs.simulation import write_logs
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec


def complete(log: Log) -> tuple[ArrivalLine, ...]:
    """Return the arrivals whose updates are there; raises ConfigError if none were kept."""
    rows = len(log.updates())
    for number, line in enumerate(log.arrivals):
        if line.update is None or line.update >= rows:
            return log.arrivals[:number]
    return log.arrivals


def config_of(log: Log, data_dir: str | None = None) -> SimConfig:
    """Return the config that the log was made with, for as many arrivals as can be replayed."""
    config = log.config()
    if not (arrivals := len(complete(log))):
        raise ConfigError(f"{log.path} has no complete arrival")
    return replace(config, arrivals=arrivals, data_dir=data_dir or config.data_dir)


def replay(
    log: Log,
    specs: Sequence[RuleSpec],
    config: SimConfig,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> list[RunResult]:
    """Feed the log's updates to each of `specs`, at once; the log's own rule gives the log's own bits.

    A client that was dispatched after k arrivals pulls each rule's version as of k arrivals. Clients trained from the
    params of the log's leader: a gradient is -update / (client_lr steps), a model is that version + update.

    Args:
        log: of a run that kept its updates.
        specs: the rules.
        config: `config_of(log)`.
        progress: see `run`.
        folder: where the rules' own audit logs go; exists.
    """
    with one_thread(), ExitStack() as files:
        world = World.of(config, log.header.seed)
        if (len(world.clients), sha256(world.first)) != (log.header.num_clients, log.header.first_params_sha256):
            raise ConfigError(
                f"{log.path}: the clients or first params rebuilt from its header are others; made by afflux "
                f"{log.header.afflux}, perhaps with other data"
            )
        followers = [Follower(spec, world, config.arrivals, log.header.leader) for spec in specs]
        if folder is not None:
            write_logs(followers, folder, log.header.seed, None, files)
        follow(recorded(complete(log), log.updates()), followers, progress or (lambda arrivals: None))
        return [follower.result() for follower in followers]


def recorded(arrivals: Sequence[ArrivalLine], updates: np.ndarray) -> Iterator[Pull | Finished]:
    """Yield the stream of a log; dispatches go by the number of their arrival."""
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for line in arrivals:
        starts[line.dispatched_after].append(line.number)
    for line in arrivals:
        yield from (Pull(sequence, line.number, line.number) for sequence in starts.pop(line.number, ()))
        loss = nan if line.loss is None else line.loss
        update = np.array(updates[line.update], np.float32)
        facts = (line.client, line.time, update, line.examples, loss, line.steps)
        yield Finished(line.number, line.number, line.dispatched_after, *facts)
        interrupts.check()
