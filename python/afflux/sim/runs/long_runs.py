"""A long run, which goes on from its last checkpoint after whatever has ended it."""

import logging
import shutil

from afflux.ops.errors import ConfigError, StoreError
from afflux.ops.validation import printable
from afflux.sim.results.audit_log import FOLDER, AuditOutput
from afflux.sim.results.finished_runs import Job
from afflux.sim.results.run_history import OnEvaluation, Progress
from afflux.sim.results.run_result import RunResult
from afflux.sim.runs.run_checkpoint import InterruptedRun, StoredRun
from afflux.sim.runs.simulation import simulate
from afflux.sim.runs.workers import WorkerPool
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.task import Task

CHECKPOINT_SECONDS = 60.0  #: between two checkpoints
_LOGGER = logging.getLogger("afflux")


def simulate_long(
    job: Job,
    config: SimConfig,
    progress: Progress | None,
    task: Task | None,
    pool: WorkerPool | None,
    on_evaluation: OnEvaluation | None,
) -> list[RunResult]:
    """Make the run of a job, which has a folder, from the last checkpoint there if there is one.

    The bits are those of `simulate`. A folder that holds something else than a checkpoint of this run, as after a kill
    before the first one, is emptied, and the run begins again; the log says so. `FinishedRuns` removes the folder.

    Args:
        job: of one rule.
        config: the settings of the run.
        progress: see `simulate`.
        task: see `simulate`.
        pool: see `simulate`.
        on_evaluation: see `simulate`.
    """
    folder = job.folder
    assert folder is not None
    interrupted: InterruptedRun | None = None
    store, output = folder / "store", AuditOutput(folder / FOLDER)
    try:
        interrupted = InterruptedRun(store, folder, job.spec) if store.exists() else None
    except (ConfigError, StoreError) as error:
        _LOGGER.warning("%s", printable(f"{job.title} begins again: {error}"))
    if interrupted is None:
        shutil.rmtree(folder, ignore_errors=True)
    output.folder.mkdir(parents=True, exist_ok=True)
    stored = StoredRun(store, CHECKPOINT_SECONDS, interrupted)
    return simulate([job.spec], job.seed, config, progress, output, task, pool, stored, on_evaluation)
