"""The outcomes of finished runs, of which pages are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afflux.lab.results.finished_runs import Job, all_lines, check_inputs, evaluations_of, lines_of_jobs
from afflux.lab.results.run_result import Evaluated, Evaluation
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric


@dataclass(frozen=True)
class Outcome(Evaluated):
    """The facts about a run that tables show."""

    rule: str  #: the rule's label
    seed: int
    evaluations: tuple[Evaluation, ...]  #: empty: the run has no result
    max_staleness: int
    metrics: tuple[Metric, ...] = CLASSIFICATION
    reason: str = ""  #: why there is no result

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that a line of the file holds."""
        evaluations, metrics = evaluations_of(line)
        return cls(line["rule"], line["seed"], evaluations, line["max_staleness"], metrics, line.get("reason", ""))

    def late_score(self, share: float = 0.25) -> float:
        """Return the mean score of the evaluations in the last `share` of the arrivals, which is less noisy."""
        last = self.evaluations[-1].arrivals
        late = [one.score for one in self.evaluations if one.arrivals > (1 - share) * last or not last]
        return sum(late) / len(late)


def load_outcomes(
    paths: Path | Sequence[Path], jobs: Sequence[Job], inputs: Sequence[Mapping[str, str]] | None = None
) -> dict[int, Outcome]:
    """Return the outcomes of the finished jobs, by index; a line that was cut off does not count.

    Args:
        paths: the files.
        jobs: the jobs.
        inputs: digests of the inputs of each job; None: inputs are not compared.

    Raises:
        ConfigError: the file holds something else, or a run began with other inputs.
    """
    files = [paths] if isinstance(paths, Path) else paths
    ended = lines_of_jobs(all_lines(files), jobs)
    if inputs is not None:
        check_inputs(", ".join(map(str, files)), ended, dict(enumerate(inputs)))
    return {index: Outcome.of_line(line) for index, line in ended.items()}
