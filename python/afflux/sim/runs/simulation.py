"""One run: one seed, and one rule. The clients train from the rule's params; other rules may get the same updates."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from afflux.sim.clients.flat_model import reproducible_torch
from afflux.sim.results.audit_log import AuditLogWriter, AuditOutput, file_stem
from afflux.sim.results.run_history import Progress
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.tensorboard import TensorBoardWriter
from afflux.sim.results.updates_file import UpdatesFile
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.simulated_server import PullEvent, SimulatedServer, UpdateEvent, feed_servers
from afflux.sim.runs.training_stream import TrainingStream
from afflux.sim.runs.worker_pool import WorkerPool, start_workers
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.sim.workload.task import Task


def run(
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    progress: Progress | None = None,
    output: AuditOutput | None = None,
    task: Task | None = None,
    workers: int | WorkerPool = 1,
) -> RunResult:
    """Simulate one rule with one seed.

    The same arguments give the same bits, in this process or another. Runs with one seed share partition, initial
    params, dispatches, delays and batches for every rule.

    Args:
        spec: the rule.
        seed: of all random numbers.
        config: the settings.
        progress: called after each arrival with the progress of the run; may raise an exception to stop it.
        output: the destination of the audit log; default none.
        task: the task of the clients; default the task in the settings.
        workers: processes that train; 1: this one. More processes give the same bits, and need a task that can be
            pickled.

    Returns:
        The result of the run.

    Raises:
        ConfigError: the settings are impossible for this rule and seed, or data are missing.
        TrainingError: the clients' trainings fail, or give numbers that are not finite (DivergedError).
    """
    return run_paired([spec], seed, config, progress, output, task, workers)[0]


def run_paired(
    specs: Sequence[RuleSpec],
    seed: int,
    config: SimConfig,
    progress: Progress | None = None,
    output: AuditOutput | None = None,
    task: Task | None = None,
    workers: int | WorkerPool = 1,
) -> list[RunResult]:
    """Simulate several rules over one stream of updates: clients train from the params of the first rule.

    The first result has the bits of `run(specs[0], ...)`. The others get the same updates at the same times; the
    staleness of an arrival is each rule's own. Arguments and errors are those of `run`.
    """
    with reproducible_torch(), ExitStack() as files:
        setup = SimulationSetup.of(config, seed, task, digests=output is not None)
        setup.check_output(output)
        leader = SimulatedServer(specs[0], setup, config.arrivals)
        servers = [leader, *(SimulatedServer(spec, setup, config.arrivals, specs[0].label) for spec in specs[1:])]
        processes = start_workers(workers, setup, task, files)
        for server in servers:
            server.evaluate_in(processes)
        events = TrainingStream(setup, leader, processes).events()
        if output is not None:
            name = f"{file_stem(leader.spec.label, seed)}.updates.npy" if output.updates else None
            if name is not None:
                updates = files.enter_context(UpdatesFile(output.folder / name, len(setup.initial_params)))
                events = record_updates(events, updates)
            open_logs(servers, output.folder, seed, name, files)
            open_metrics(servers, output.tensorboard, seed, files)
        feed_servers(events, servers, progress)
        return [server.result() for server in servers]


def record_updates(
    events: Iterator[PullEvent | UpdateEvent], updates: UpdatesFile
) -> Iterator[PullEvent | UpdateEvent]:
    """Yield `events`; each update is written before a server, and with it the audit log, handles it."""
    for event in events:
        if isinstance(event, UpdateEvent):
            updates.append(event.update)
        yield event


def open_logs(
    servers: Sequence[SimulatedServer], folder: Path, seed: int, updates: str | None, files: ExitStack
) -> None:
    """Open a log in `folder` for each server; `files` closes them."""
    for server in servers:
        path = folder / f"{file_stem(server.spec.label, seed)}.jsonl"
        server.log = files.enter_context(AuditLogWriter(path, server.log_header(updates)))


def open_metrics(
    servers: Sequence[SimulatedServer], folder: Path | None, seed: int, files: ExitStack, arrivals: int = 0
) -> None:
    """Open TensorBoard's event files in `folder` for each server, if it is not None; see `TensorBoardWriter`."""
    if folder is not None:
        for server in servers:
            writer = TensorBoardWriter(folder / file_stem(server.spec.label, seed), arrivals)
            server.metrics = files.enter_context(writer)
