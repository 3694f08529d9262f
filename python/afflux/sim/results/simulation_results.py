"""The results of a simulation of several rules and seeds: histories, statistics, data frames, figure, run folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from afflux.sim.errors import require
from afflux.sim.results import run_folder
from afflux.sim.results.data_frames import data_frame
from afflux.sim.results.run_result import Evaluation, RunResult, Summary, summarise
from afflux.sim.results.statistics import (
    LEVEL,
    PairedDifference,
    TargetStatistics,
    paired_differences,
    reach_targets,
    usual_targets,
)
from afflux.sim.workload.config import SimConfig


class SimulationResults(Sequence[RunResult]):
    """The results of all runs, seed by seed, in the order of the rules."""

    def __init__(self, runs: Sequence[RunResult], config: SimConfig) -> None:
        """Hold results of runs with these settings."""
        self._runs = tuple(runs)
        self.config = config

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> RunResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunResult]: ...
    def __getitem__(self, index: int | slice) -> RunResult | Sequence[RunResult]:
        return self._runs[index]

    def of(self, rule: str, seed: int) -> RunResult:
        """Return the run of the rule with this label and seed; raise KeyError, which lists them, if there is none."""
        for run in self._runs:
            if (run.spec.label, run.seed) == (rule, seed):
                return run
        raise KeyError(f"no run of {rule!r} with seed {seed!r}; there are {', '.join(map(repr, self.histories))}")

    @property
    def histories(self) -> dict[tuple[str, int], tuple[Evaluation, ...]]:
        """The evaluations of each run, by the rule's label and seed."""
        return {(run.spec.label, run.seed): run.evaluations for run in self._runs}

    def summary(self, target: float | None = None) -> Summary:
        """Return {rule: {number: mean and deviation over seeds}}, a dict that is printed as a table.

        Args:
            target: accuracy for the rounds and the time to the target; default: that of the simulation.
        """
        return summarise(self._runs, self.config.target if target is None else target)

    def targets(self, *accuracies: float) -> list[TargetStatistics]:
        """Return when each rule reached accuracies first; without arguments, the usual ones that a run has reached."""
        return reach_targets(self._runs, accuracies or usual_targets(self._runs, self.config.target))

    def paired_differences(self, number: str = "final_accuracy", level: float = LEVEL) -> list[PairedDifference]:
        """Return the differences between the rules over the seeds that they share, with Student's intervals.

        Args:
            number: a name of `RunResult.summary`.
            level: of the intervals.

        Raises:
            ConfigError: an unknown number, or a level outside (0, 1).
        """
        return paired_differences(self._runs, number, level, self.config.target)

    def to_dataframe(self, table: str = "evaluations") -> Any:
        """Return results as a pandas DataFrame, whose first columns are rule and seed, except for the last two.

        Args:
            table: evaluations (one row each), runs (the numbers of `RunResult.summary`), arrivals (client and staleness
                of each), staleness and participation (arrivals by staleness, and by client), targets, summary (mean and
                deviation of these numbers for each rule), or differences (of the final accuracy between rules).

        Raises:
            ConfigError: an unknown table.
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self._runs, table, self.config.target)

    def draw(self, path: Path | str) -> None:
        """Write a figure: accuracy over rounds and over virtual time, and staleness.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        require("matplotlib")
        from afflux.sim.results.figures import draw_comparison

        title = run_folder.describe_setting(self.config, self._runs)
        draw_comparison(self._runs, title, self.config.target, Path(path))

    def write(self, folder: Path | str) -> None:
        """Write the files of a run folder into `folder`, which is made if there is none; see `afflux compare`."""
        run_folder.write_results(Path(folder), self._runs, self.config)

    def __repr__(self) -> str:
        found: list[Any] = [f"{run.spec.label}, seed {run.seed}: {run.final_accuracy:.4f}" for run in self._runs]
        return f"SimulationResults({'; '.join(found)})"
