"""TensorBoard's event files of runs, by torch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afflux.lab.results.run_history import OnEvaluation, TrackedRun
from afflux.sim.errors import MissingExtraError

FOLDER = "tensorboard"  #: in a run folder


def require_tensorboard() -> None:
    """Raise MissingExtraError, before any work is done, unless event files can be written."""
    if find_spec("tensorboard") is None:
        raise MissingExtraError("event files need the package tensorboard: pip install tensorboard")


@contextmanager
def event_files(folder: Path | None, on_evaluation: OnEvaluation | None = None) -> Iterator[OnEvaluation | None]:
    """Write event files in the block; the step of each scalar is the number of arrivals.

    Args:
        folder: each run has a folder of its own inside it; None: no event files.
        on_evaluation: called after each evaluation is written.

    Yields:
        An `on_evaluation`, which writes the numbers; a resumed run supersedes the later ones of an earlier process.
    """
    if folder is None:
        yield on_evaluation
        return
    writers: dict[str, Any] = {}
    files = ExitStack()

    def write(run: TrackedRun, metrics: dict[str, float]) -> None:
        if run.name not in writers:
            from torch.utils.tensorboard import SummaryWriter

            purge = run.resumed_after + 1 if run.resumed_after else None
            writers[run.name] = files.enter_context(SummaryWriter(folder / run.name, purge_step=purge))
        for name, value in metrics.items():
            if name != "arrivals":
                writers[run.name].add_scalar(name, value, metrics["arrivals"])
        writers[run.name].flush()
        if on_evaluation is not None:
            on_evaluation(run, metrics)

    with files:
        yield write
