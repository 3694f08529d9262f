"""The finished runs of a reproduction, one JSON line each: the same command continues after the last one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.results.run_result import Evaluation, RunResult
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_files import code_digests

FILE = "finished.jsonl"


class Outcome(NamedTuple):
    """The facts about a run that tables show."""

    rule: str
    """The rule's label."""
    seed: int
    evaluations: tuple[Evaluation, ...]
    """Empty: a client diverged."""
    max_staleness: int

    @classmethod
    def of(cls, result: RunResult) -> "Outcome":
        """Return the outcome of a finished run."""
        return cls(result.spec.label, result.seed, result.evaluations, result.max_staleness)

    @property
    def final_accuracy(self) -> float:
        """Accuracy after the last arrival."""
        return self.evaluations[-1].accuracy

    @property
    def best_accuracy(self) -> float:
        """Largest accuracy of all evaluations."""
        return max(one.accuracy for one in self.evaluations)

    def late_accuracy(self, share: float = 0.25) -> float:
        """Return the mean accuracy of the evaluations in the last `share` of the arrivals, which is less noisy."""
        last = self.evaluations[-1].arrivals
        late = [one.accuracy for one in self.evaluations if one.arrivals > (1 - share) * last or not last]
        return sum(late) / len(late)


class FinishedRuns(dict[int, list[RunResult]]):
    """Results by index into `jobs`, which `compare` fills; an entry is written to the file before it is set."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        self._path, self._jobs = path, jobs
        if path.exists():
            # Remove a line that an interrupt cut off, so that the next line does not continue it.
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            path.write_bytes(whole + newline)

    def __setitem__(self, index: int, results: list[RunResult]) -> None:
        """Write the results of job `index`."""
        with self._path.open("a", encoding="utf-8") as file:
            job = self._jobs[index]
            for outcome in [Outcome.of(result) for result in results] or [Outcome(job.spec.label, job.seed, (), 0)]:
                file.write(json.dumps(_identity(job) | outcome._asdict()) + "\n")
        super().__setitem__(index, results)


def load_outcomes(path: Path, jobs: Sequence[Job]) -> dict[int, Outcome]:
    """Return the outcomes of the finished jobs, by index; a line that was cut off does not count.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        kept = [json.loads(line) for line in lines]
        found = {
            _key(line): Outcome(
                line["rule"],
                line["seed"],
                tuple(Evaluation(*row) for row in line["evaluations"]),
                line["max_staleness"],
            )
            for line in kept
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no finished runs: {error!r}") from error
    keys = [_key(_identity(job)) for job in jobs]
    return {index: found[key] for index, key in enumerate(keys) if key in found}


def _identity(job: Job) -> dict[str, Any]:
    """Return everything on which a run depends; the folder of the data is not part of it."""
    config = (job.config or SimConfig()).recorded()
    config.pop("data_dir", None)
    facts = {"afflux": __version__, "rule": job.spec.identity, "options": job.spec.plain_options(), "seed": job.seed}
    code = code_digests(job.spec.name, str(config.get("task", "")))
    return facts | {"config": config} | ({"code": code} if code else {})


def _key(identity: dict[str, Any]) -> str:
    facts = [identity[name] for name in ("afflux", "rule", "options", "seed", "config")]
    return json.dumps([*facts, identity.get("code", {})], sort_keys=True)
