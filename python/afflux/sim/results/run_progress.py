"""The progress of a run."""

from collections.abc import Callable
from typing import NamedTuple


class RunProgress(NamedTuple):
    """The progress of a run after an arrival."""

    arrivals: int
    version: int
    virtual_time: float
    accuracy: float  #: of the last evaluation
    mean_staleness: float  #: over the arrivals so far
    done: float  #: finished share of the run, for the limit that is nearest; 1 at its end; nan without a limit

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.done >= 1


Progress = Callable[[RunProgress], None]
"""Called after each arrival, and once more at the end of a run that ends before its limits; may raise to stop it."""
JobProgress = Callable[[int, RunProgress], None]
"""Called with (index of the job, its progress)."""
