"""TensorBoard's event files of a run, by torch: evaluations, and the rounds between two of them."""

from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

from afflux.aggregation.reports import Report
from afflux.sim.errors import MissingExtraError
from afflux.sim.results.run_result import Evaluation

FOLDER = "tensorboard"  #: in a run folder


def require_tensorboard() -> None:
    """Raise MissingExtraError, before any work is done, unless event files can be written."""
    if find_spec("tensorboard") is None:
        raise MissingExtraError("event files need the package tensorboard: pip install tensorboard")


class TensorBoardWriter(AbstractContextManager["TensorBoardWriter"]):
    """A writer of the scalars of one run; the step of each scalar is the number of arrivals.

    Rounds are written with the next evaluation, as the mean of each number of `Report.metrics` over the rounds since
    the one before: a run may have a round for each arrival.
    """

    def __init__(self, folder: Path, arrivals: int = 0) -> None:
        """Open event files in `folder`, which must not hold those of another run.

        Args:
            folder: is created.
            arrivals: number of arrivals before the run was resumed; later values of an earlier process are superseded.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=arrivals + 1 if arrivals else None)
        self._sums: dict[str, float] = {}
        self._rounds = 0

    def add_round(self, report: Report) -> None:
        """Add a round to the means that the next evaluation writes."""
        for name, value in report.metrics().items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._rounds += 1

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation, and the rounds since the previous one."""
        step = evaluation.arrivals
        for name in evaluation.names:
            self._writer.add_scalar(f"test/{name}", getattr(evaluation, name), step)
        self._writer.add_scalar("run/version", evaluation.version, step)
        self._writer.add_scalar("run/virtual_time", evaluation.virtual_time, step)
        for name, value in self._sums.items():
            if name != "version":
                self._writer.add_scalar(f"round/{name}", value / self._rounds, step)
        self._sums, self._rounds = {}, 0
        self._writer.flush()

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._writer.close()
