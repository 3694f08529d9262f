"""Workers for consecutive runs in one process."""

from contextlib import ExitStack

from afflux.sim.errors import ConfigError
from afflux.sim.runs.setup import SimulationSetup
from afflux.sim.runs.workers import Workers
from afflux.sim.workload.task import Task


class WorkerPool:
    """Workers for consecutive runs in one process. The next run reuses them if they accept it (`Workers.begin`)."""

    def __init__(self, count: int) -> None:
        """Make a pool for `count` workers, which the first run starts; 1: the run's own process trains.

        Raises:
            ConfigError: the number is less than 1.
        """
        if count < 1:
            raise ConfigError(f"workers is {count}, must be at least 1")
        self._count = count
        self._workers: Workers | None = None

    def for_run(self, setup: SimulationSetup, task: Task | None) -> Workers | None:
        """Return workers for this run, and for no other at the same time; None if the run has no workers.

        Raises:
            ConfigError: the task cannot be sent to another process.
        """
        if self._count == 1:
            return None
        if self._workers is None or not self._workers.begin(setup, task):
            self.close()
            self._workers = Workers(self._count, setup, task)
        return self._workers

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def start_workers(
    workers: int | WorkerPool, setup: SimulationSetup, task: Task | None, files: ExitStack
) -> Workers | None:
    """Return the workers of a run: those of a pool, or new ones, which `files` ends."""
    if isinstance(workers, WorkerPool):
        return workers.for_run(setup, task)
    pool = WorkerPool(workers)
    files.callback(pool.close)
    return pool.for_run(setup, task)
