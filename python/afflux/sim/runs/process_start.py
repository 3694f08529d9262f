"""Functions for starting processes, in this package and in `compare`."""

import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from afflux.sim.errors import ConfigError
from afflux.sim.workload.task import Task


def pickled(task: Task | None) -> bytes:
    """Return the task for other processes of this program; raise ConfigError if the task cannot be sent there."""
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise ConfigError(
            f"the task cannot be sent to another process ({error}): define its functions at the top of a module"
        ) from error


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes are started.

    Ctrl-C signals all processes. The new ones inherit the mask, so only the parent handles the signal.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
