"""A run whose server is kept in a store: from the start, or from its last checkpoint."""

from contextlib import ExitStack
from pathlib import Path

from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim.clients.flat_model import reproducible_torch
from afflux.sim.results.audit_log import AuditLogWriter, AuditOutput, file_stem
from afflux.sim.results.run_history import Progress
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.updates_file import UpdatesFile
from afflux.sim.runs.run_checkpoint import InterruptedRun, RunCheckpoints
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.simulated_server import SimulatedServer, feed_servers
from afflux.sim.runs.simulation import open_metrics, record_updates
from afflux.sim.runs.training_stream import TrainingStream
from afflux.sim.runs.worker_pool import WorkerPool, start_workers
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.sim.workload.task import Task

CHECKPOINT_SECONDS = 10.0


def run_in_store(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    output: AuditOutput,
    progress: Progress | None = None,
    seconds: float = CHECKPOINT_SECONDS,
    task: Task | None = None,
    workers: int | WorkerPool = 1,
) -> RunResult:
    """Simulate one rule as `run` does, with the server in a new store; the same bits.

    Args:
        path: the store's folder; must not exist yet.
        spec: the rule.
        seed: see `run`.
        config: see `run`.
        output: the destination of the audit log; a resumed run continues these files.
        progress: see `run`.
        seconds: between two checkpoints; 0: after every event. Ctrl-C makes one, too.
        task: see `run`.
        workers: see `run`.

    Returns:
        The result of the run.

    Raises:
        ConfigError: see `run`.
        StoreError: the store cannot be made or written.
    """
    return _run(path, spec, seed, config, output, progress, seconds, None, task, workers)


def resume(
    interrupted: InterruptedRun,
    progress: Progress | None = None,
    seconds: float = CHECKPOINT_SECONDS,
    task: Task | None = None,
    workers: int | WorkerPool = 1,
) -> RunResult:
    """Continue a run from its last checkpoint, to the bits of a run without an interruption.

    Args:
        interrupted: the last checkpoint.
        progress: see `run`.
        seconds: see `run_in_store`.
        task: see `run`.
        workers: see `run`.

    Returns:
        The result of the whole run.

    Raises:
        ConfigError: data, initial params or files are not those of the run, or its server was used since.
        StoreError: the store is damaged.
    """
    path, spec, seed = interrupted.path, interrupted.spec, interrupted.header.seed
    return _run(path, spec, seed, interrupted.config, interrupted.output, progress, seconds, interrupted, task, workers)


def _run(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    output: AuditOutput,
    progress: Progress | None,
    seconds: float,
    interrupted: InterruptedRun | None,
    task: Task | None,
    workers: int | WorkerPool,
) -> RunResult:
    with reproducible_torch(), ExitStack() as files:
        setup = SimulationSetup.of(config, seed, task, digests=True)
        setup.check_output(output)
        setup.schedule(spec)  # raises for an impossible one before anything is written
        if interrupted is not None:
            interrupted.check_setup(setup)

        def new_server(rule: Rule) -> Server:
            if interrupted is None:
                server = setup.new_server(rule, store=path, commit_every=None)
            else:
                server = Server.open(path, rule, num_threads=1, commit_every=None)
            # Rounds after the last checkpoint have no history: they must not be committed.
            files.callback(server.close, checkpoint=False)
            if interrupted is not None:
                interrupted.check_server(server)
            return server

        history = None if interrupted is None else interrupted.history
        leader = SimulatedServer(spec, setup, config.arrivals, new_server=new_server, history=history)
        processes = start_workers(workers, setup, task, files)
        leader.evaluate_in(processes)
        stream = TrainingStream(setup, leader, processes)
        if interrupted is not None:
            versions = {**leader.server.retained_versions, leader.server.version: leader.server.pull()}
            stream.restore(interrupted.stream, interrupted.read_arrays(), versions)
        name = file_stem(spec.label, seed)
        log_path, updates_path = output.folder / f"{name}.jsonl", output.folder / f"{name}.updates.npy"
        header, size = leader.log_header(updates_path.name if output.updates else None), 0
        if interrupted is not None and interrupted.arrivals:
            header, size = interrupted.header, interrupted.log_bytes
        elif interrupted is not None:  # no arrivals: files may be missing, or hold more than was committed
            output.folder.mkdir(parents=True, exist_ok=True)
            for old in (log_path, updates_path):
                old.unlink(missing_ok=True)
        log = leader.log = files.enter_context(AuditLogWriter(log_path, header, size))
        open_metrics([leader], output.tensorboard, seed, files, len(leader.history.staleness))
        run_id = None if interrupted is None else interrupted.run_id
        checkpoints = RunCheckpoints(path, stream, leader, log, output, seconds, run_id)
        events = stream.events(checkpoints)
        if output.updates:
            count = 0 if interrupted is None else interrupted.arrivals
            updates = files.enter_context(UpdatesFile(updates_path, len(setup.initial_params), count))
            events = record_updates(events, updates)
        checkpoints.save()
        feed_servers(events, [leader], progress)
        checkpoints.save()
        return leader.result()
