"""Long runs, which continue from their last checkpoint after whatever has ended them."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from afflux import __version__
from afflux.lab.results.audit_log import FOLDER, file_stem
from afflux.lab.results.finished_runs import AGAIN, FailedRun, FinishedRuns, Job, Runs, key_of, package_versions
from afflux.lab.results.run_history import Progress, RunProgress
from afflux.lab.results.run_result import RunResult
from afflux.lab.runs.run_checkpoint import InterruptedRun, StoredRun
from afflux.lab.runs.simulation import simulate
from afflux.ops.errors import ConfigError, StoreError
from afflux.ops.validation import printable
from afflux.sim.workload.config import SimConfig

UNUSABLE = ".unusable"  #: suffix of a folder from which the run could not go on
CHECKPOINT_SECONDS = 60.0  #: between two checkpoints
_LOGGER = logging.getLogger("afflux")


@dataclass(frozen=True)
class LongRun:
    """A run that is kept in a folder, and continued, until `FinishedLongRuns` has its line: `Job.make`."""

    folder: Path

    def __call__(self, job: Job, config: SimConfig, **options: Any) -> list[RunResult]:
        """Make the run."""
        return simulate_long(self.folder, job, config, **options)


class FinishedLongRuns(FinishedRuns):
    """Finished runs, which removes the folders of long runs that have ended."""

    def __setitem__(self, index: int, runs: Runs) -> None:
        """Write the line of job `index`, and remove its folder."""
        super().__setitem__(index, runs)
        if not isinstance(runs, FailedRun) or runs.status not in AGAIN:
            self.remove_folder(index)

    def remove_folder(self, index: int) -> None:
        """Remove the folder of a long run, and the one that was set aside."""
        if isinstance(run := self.jobs[index].make, LongRun):
            for path in (run.folder, run.folder.with_name(run.folder.name + UNUSABLE)):
                shutil.rmtree(path, ignore_errors=True)


def folder_name(job: Job, machine: Mapping[str, str]) -> str:
    """Return a name for `LongRun.folder`, another one for other settings, another machine or other packages.

    The bits of a run are those of one machine.
    """
    facts = json.dumps([key_of(job), machine, package_versions(), __version__], sort_keys=True)
    return f"{file_stem(job.label, job.seed)}-{sha256(facts.encode()).hexdigest()[:8]}"


def simulate_long(
    folder: Path, job: Job, config: SimConfig, progress: Progress | None, **options: Any
) -> list[RunResult]:
    """Make the run of a job with one rule from the last checkpoint in a folder, if there is one.

    On one machine the bits are those of `simulate`. If the run cannot go on from what the folder holds, that is set
    aside, and the run begins again; if no store can be written, it is made without checkpoints. The log says both.

    Args:
        folder: see above.
        job: the rule and the seed.
        config: the settings of the run.
        progress: see `simulate`.
        options: those of `simulate`, without `output` and `store`.

    Raises:
        ConfigError, TrainingError: see `simulate`.
        StoreError: a checkpoint cannot be written, after some were.
    """
    moves = False
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
