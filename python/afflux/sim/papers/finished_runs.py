"""Runs of a reproduction that have ended, one JSON line each as it ends: the same command goes on after the last."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.results.run_result import Row, RunResult
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig

FILE = "finished.jsonl"


class Outcome(NamedTuple):
    """What a table needs of a run."""

    rule: str
    """The rule's label."""
    seed: int
    rows: tuple[Row, ...]
    max_staleness: int

    @classmethod
    def of(cls, result: RunResult) -> "Outcome":
        """The outcome of a run that has just ended."""
        return cls(result.spec.label, result.seed, result.rows, result.max_staleness)

    @property
    def final_accuracy(self) -> float:
        """Accuracy after the last arrival."""
        return self.rows[-1].accuracy

    @property
    def best_accuracy(self) -> float:
        """Largest accuracy of all evaluations."""
        return max(row.accuracy for row in self.rows)

    def late_accuracy(self, share: float = 0.25) -> float:
        """Mean accuracy of the evaluations in the last `share` of the arrivals: less noise than one of them has."""
        late = [row.accuracy for row in self.rows if row.arrivals > (1 - share) * self.rows[-1].arrivals]
        return sum(late) / len(late)


class Finished(dict[int, list[RunResult]]):
    """What `compare` fills, by index into `jobs`: an entry is a line in the file before it is one here."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        self._path, self._jobs = path, jobs
        if path.exists():
            # A line that an interrupt cut off must not run on into the next one.
            whole, newline, _ = path.read_bytes().rpartition(b"\n")
            path.write_bytes(whole + newline)

    def __setitem__(self, index: int, results: list[RunResult]) -> None:
        """Writes the runs of job `index`."""
        with self._path.open("a", encoding="utf-8") as file:
            for result in results:
                file.write(json.dumps(_identity(self._jobs[index]) | Outcome.of(result)._asdict()) + "\n")
        super().__setitem__(index, results)


def load(path: Path, jobs: Sequence[Job]) -> dict[int, Outcome]:
    """The outcomes of those jobs that have ended before, by their index; what an interrupt cut off has not ended.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        kept = [json.loads(line) for line in lines]
        found = {
            _key(line): Outcome(
                line["rule"], line["seed"], tuple(Row(*row) for row in line["rows"]), line["max_staleness"]
            )
            for line in kept
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no finished runs: {error!r}") from error
    keys = [_key(_identity(job)) for job in jobs]
    return {index: found[key] for index, key in enumerate(keys) if key in found}


def _identity(job: Job) -> dict[str, Any]:
    """What a run depends on; where the data lie is not part of it."""
    config = asdict(job.config or SimConfig())
    del config["data_dir"]
    options = job.spec.plain_options()
    return {"afflux": __version__, "rule": job.spec.label, "options": options, "seed": job.seed, "config": config}


def _key(identity: dict[str, Any]) -> str:
    return json.dumps([identity[name] for name in ("afflux", "rule", "options", "seed", "config")], sort_keys=True)
