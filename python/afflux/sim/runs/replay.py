"""Replay of the kept updates of a run with other rules: only the aggregation differs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import nan

import numpy as np

from afflux.sim import interrupts
from afflux.sim.clients.flat_model import reproducible_torch
from afflux.sim.errors import ConfigError
from afflux.sim.results.audit_log import ArrivalLine, AuditLog, AuditOutput
from afflux.sim.results.run_history import Progress
from afflux.sim.results.run_result import RunResult
from afflux.sim.runs.event_loop import PullEvent, SimulatedServer, feed_servers
from afflux.sim.runs.run_record import UpdateEvent
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.sim.workload.task import Task


def complete_arrivals(log: AuditLog) -> tuple[ArrivalLine, ...]:
    """Return the arrivals whose updates are in the file of updates; raise ConfigError if no updates were kept."""
    rows = len(log.updates())
    for number, line in enumerate(log.arrivals):
        if line.update is None or line.update >= rows:
            return log.arrivals[:number]
    return log.arrivals


def replay_config(log: AuditLog, data_dir: str | None = None, task: str | None = None) -> SimConfig:
    """Return the config with which the log was made, for as many arrivals as can be replayed.

    Args:
        log: of a run that kept its updates.
        data_dir: folder of the data, if it is not the log's.
        task: the setting `task`, if the user has typed it; the file of a task is executed only then.

    Returns:
        The settings, without another end than the number of arrivals.

    Raises:
        ConfigError: no complete arrival, or settings that this afflux does not have.
    """
    config = log.config(task)
    if not (arrivals := len(complete_arrivals(log))):
        raise ConfigError(f"{log.path} has no complete arrival")
    config = replace(config, rounds=0, virtual_time=0.0, stop_at_target=False, compile=False, arrivals=arrivals)
    return replace(config, data_dir=data_dir or config.data_dir)


def replay_updates(
    log: AuditLog,
    specs: Sequence[RuleSpec],
    config: SimConfig,
    progress: Progress | None = None,
    output: AuditOutput | None = None,
    task: Task | None = None,
) -> list[RunResult]:
    """Push the log's updates to all of `specs` in one pass; the log's own rule gives the log's own bits.

    A client that was dispatched after k arrivals pulls each rule's version as of k arrivals. Clients trained from the
    params of the log's leader: a gradient is -update / (client_lr steps), a model is that version + update.

    Args:
        log: of a run that kept its updates.
        specs: the rules.
        config: `replay_config(log)`.
        progress: see `simulate`.
        output: the destination of the rules' own audit logs.
        task: see `simulate`.

    Returns:
        One result for each of `specs`.

    Raises:
        ConfigError: data or initial params are not those of the log, or the model has buffers.
    """
    with reproducible_torch(), ExitStack() as files:
        setup = SimulationSetup.of(config, log.header.seed, task, digests=True)
        if setup.model.initial_buffers is not None:
            raise ConfigError(f"{log.path}: the model has buffers, which kept updates do not hold")
        setup.refuse_other_inputs(log.path, log.header)
        servers = [SimulatedServer(spec, setup, log.header.leader) for spec in specs]
        if output is not None:
            for server in servers:
                server.record.open(output, files)
        events = recorded_events(complete_arrivals(log), log.updates())
        feed_servers(events, servers, progress)
        return [server.result() for server in servers]


def recorded_events(arrivals: Sequence[ArrivalLine], updates: np.ndarray) -> Iterator[PullEvent | UpdateEvent]:
    """Yield the events of a log; a dispatch has the number of its arrival."""
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for line in arrivals:
        starts[line.dispatched_after].append(line.number)
    for line in arrivals:
        yield from (PullEvent(sequence, line.number, line.number) for sequence in starts.pop(line.number, ()))
        loss = nan if line.loss is None and line.status == "faulty" else line.loss
        update = np.array(updates[line.update], np.float32)
        facts = (line.client, line.time, update, line.examples, loss, line.steps)
        reason = line.reason or ""
        yield UpdateEvent(line.number, line.number, line.dispatched_after, *facts, fault=reason)
        interrupts.raise_if_pending()
