"""One run: one seed, and one rule; other rules may get the same updates."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import process_time

from afflux.aggregation.limits import RoundError
from afflux.lab import interrupts
from afflux.lab.results.finished_runs import Job
from afflux.lab.results.run_folder import remove_run_files
from afflux.lab.results.run_history import OnEvaluation, Progress
from afflux.lab.results.run_result import RunResult
from afflux.lab.runs.processes import killed_processes_as
from afflux.lab.runs.recorder import RecordedServer, record_events
from afflux.lab.runs.run_checkpoint import StoredRun
from afflux.lab.runs.setup import RunSetup
from afflux.lab.runs.workers import WorkerPool
from afflux.rules.specs import RuleSpec
from afflux.sim.clients.flat_model import reproducible_libraries
from afflux.sim.clients.training import SerialTraining
from afflux.sim.errors import DivergedError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.task import Task


def simulate(
    specs: Sequence[RuleSpec],
    seed: int,
    config: SimConfig,
    progress: Progress | None = None,
    output: Path | None = None,
    task: Task | None = None,
    pool: WorkerPool | None = None,
    store: StoredRun | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> list[RunResult]:
    """Simulate one seed, and one rule or several over one stream of updates.

    The clients train from the params of the first rule. The others get the same updates at the same times; the
    staleness of an arrival is each rule's own.

    The same arguments give the same bits, in this process or another, with a store or without. Runs with one seed share
    partition, initial params, dispatches, delays and batches for every rule; dispatches not if the selection of clients
    reads results. A run that is continued ends with the bits
    of one without an interruption.

    Args:
        specs: the rules.
        seed: of all random numbers.
        config: the settings.
        progress: called after each arrival with the progress of the first rule; may raise an exception to stop it.
        output: the destination of the audit logs; default none. A run that is continued continues these files.
        task: the task of the clients; default the task in the settings.
        pool: processes that train; None: this one. More processes give the same bits, and need a task that can be
            pickled.
        store: of the server of a single rule; needs `output`.
        on_evaluation: called after each evaluation of each rule.

    Returns:
        One result for each rule.

    Raises:
        ConfigError: the settings are impossible for these rules and this seed, or data are missing; or data, initial
            params or files are not those of the interrupted run, or its server was used since.
        TrainingError: the clients' trainings fail, or numbers are not finite or too large (DivergedError).
        StoreError: the store cannot be made or written, or is damaged.
    """
    start = process_time()
    killed = "a worker process was killed, or could not be started; the run can be resumed"
    with reproducible_libraries(), killed_processes_as(killed), ExitStack() as files:
        setup = RunSetup(config, seed, task, digests=output is not None)
        interrupted = None if store is None else store.interrupted
        if store is not None:
            setup.schedule(specs[0])  # raises for an impossible one before anything is written
        if interrupted is not None:
            interrupted.check_setup(setup)
        begun = interrupted if interrupted is not None and interrupted.arrivals else None  # else the run starts again
        history = None if begun is None else begun.notes.history
        start -= 0.0 if history is None else history.cpu_seconds
        first = setup.new_server(specs[0]) if store is None else store.server(specs[0], setup, files)
        leader = RecordedServer(specs[0], setup, first, "", history)
        followers = (RecordedServer(spec, setup, setup.new_server(spec), specs[0].label, None) for spec in specs[1:])
        servers = [leader, *followers]
        workers = None if pool is None else pool.for_run(setup, task)
        for server in servers:
            server.workers, server.record.on_evaluation = workers, on_evaluation
        training = workers or SerialTraining(setup.trainer, seed)
        loop = setup.loop(specs[0], [server.server for server in servers], training, lambda: leader.ended)
        header, size = None, 0
        if begun is not None:
            versions = {**first.retained_versions, first.version: first.pull()}
            loop.restore(begun.notes.stream, begun.read_arrays(), versions)
            header, size = begun.notes.header, begun.notes.log_bytes
        elif interrupted is not None:
            remove_run_files(interrupted.output.parent, [Job(specs[0], seed)])
        if output is not None:
            for server in servers:
                server.record.open(output, files, header, size)
            if store is not None:
                store.begin(loop, leader, output, start)
        try:
            record_events(loop, servers, progress, store or interrupts.raise_if_pending)
        except RoundError as error:
            raise DivergedError(str(error)) from error
        if store is not None:
            store.save()
        seconds = process_time() - start
        return [replace(server.result(), seconds=seconds) for server in servers]
