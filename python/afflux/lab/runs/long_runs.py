"""A long run, which continues from its last checkpoint after whatever has ended it."""

import logging
import shutil
from pathlib import Path
from typing import Any

from afflux.lab.results.audit_log import FOLDER
from afflux.lab.results.finished_runs import UNUSABLE, Job
from afflux.lab.results.run_history import Progress, RunProgress
from afflux.lab.results.run_result import RunResult
from afflux.lab.runs.run_checkpoint import InterruptedRun, StoredRun
from afflux.lab.runs.simulation import simulate
from afflux.ops.errors import ConfigError, StoreError
from afflux.ops.validation import printable
from afflux.sim.workload.config import SimConfig

CHECKPOINT_SECONDS = 60.0  #: between two checkpoints
_LOGGER = logging.getLogger("afflux")


def simulate_long(job: Job, config: SimConfig, progress: Progress | None, **options: Any) -> list[RunResult]:
    """Make the run of a job, which has one rule and a folder, from the last checkpoint there, if there is one.

    On one machine the bits are those of `simulate`. If the run cannot go on from what the folder holds, that is set
    aside, and the run begins again; if no store can be written, it is made without checkpoints. The log says both.
    `FinishedRuns` removes the folder.

    Args:
        job: the rule, the seed and the folder.
        config: the settings of the run.
        progress: see `simulate`.
        options: those of `simulate`, without `output` and `store`.

    Raises:
        ConfigError, TrainingError: see `simulate`.
        StoreError: a checkpoint cannot be written, after some were.
    """
    folder, moves = job.folder, False
    assert folder is not None
    assert not job.followers
    assert options.get("output") is options.get("store") is None
    store, output = folder / "store", folder / FOLDER

    def watched(run: RunProgress) -> None:
        nonlocal moves
        moves = True
        if progress is not None:
            progress(run)

    def make(output: Path | None, stored: StoredRun | None) -> list[RunResult]:
        written: dict[str, Any] = {"progress": watched, "output": output, "store": stored}
        return simulate([job.spec], job.seed, config, **options | written)

    while True:
        continues = store.exists()
        try:
            interrupted = InterruptedRun(store, output, job, config) if continues else None
            output.mkdir(parents=True, exist_ok=True)
            return make(output, StoredRun(store, CHECKPOINT_SECONDS, interrupted))
        except (ConfigError, StoreError) as error:
            if moves or not (continues or isinstance(error, StoreError)):
                raise
            problem = str(error)
        if not continues:
            _LOGGER.warning("%s", printable(f"{job.title} is made without checkpoints: {problem}"))
            shutil.rmtree(folder, ignore_errors=True)
            return make(None, None)
        aside = folder.with_name(folder.name + UNUSABLE)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        _LOGGER.warning("%s", printable(f"{job.title} begins again, and {aside} is set aside: {problem}"))
