"""A run whose process is killed with SIGKILL, and which another process resumes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from afflux.ops.errors import AffluxError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

if TYPE_CHECKING:
    from afflux.sim.results.run_history import RunProgress

CHECKPOINT_SECONDS = 0.1


class KilledRun(NamedTuple):
    """A run that was killed and resumed to its end."""

    log: Path  #: the audit log
    resumed_from: int  #: arrivals before the checkpoint with which the second process began


def kill_and_resume(folder: Path, spec: RuleSpec, seed: int, config: SimConfig, after: int) -> KilledRun:
    """Make a run with its server in a store in a process that kills itself, and continue it by `afflux run --resume`.

    Args:
        folder: the folder for the store and the run folder, `store` and `run`, which must not exist yet.
        spec: the rule.
        seed: of the run.
        config: the settings.
        after: number of arrivals after which the process gets SIGKILL; smaller than that of the run.

    Returns:
        The run after its end.

    Raises:
        AffluxError: one of the processes has ended in another way.
    """
    from afflux.sim.results.audit_log import FOLDER, file_stem
    from afflux.sim.runs.run_checkpoint import InterruptedRun

    store, run = folder / "store", folder / "run"
    process = multiprocessing.get_context("spawn").Process(
        target=run_until_killed, args=(store, run, spec, seed, config, after), daemon=True
    )
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise AffluxError(f"the process was to be killed, but ended with exit code {process.exitcode}")
    resumed_from = InterruptedRun.of(store).arrivals
    command = [sys.executable, "-m", "afflux", "run", "--resume", str(store)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise AffluxError(f"resuming {store} ended with exit code {ended.returncode}: {ended.stderr.strip()}")
    return KilledRun(run / FOLDER / f"{file_stem(spec.label, seed)}.jsonl", resumed_from)


def run_until_killed(store: Path, folder: Path, spec: RuleSpec, seed: int, config: SimConfig, after: int) -> None:
    """Make a run in a new store; this process sends itself SIGKILL, which it cannot handle, after some arrivals."""
    from afflux.sim.results import run_folder
    from afflux.sim.runs.resume import run_in_store

    def progress(run: "RunProgress") -> None:
        if run.arrivals >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    output = run_folder.create_audit_folder(run_folder.create_run_folder(folder), config, 1)
    run_in_store(store, spec, seed, config, output, progress, CHECKPOINT_SECONDS)
