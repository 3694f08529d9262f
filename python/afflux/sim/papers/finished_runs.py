"""The finished runs of a reproduction, one JSON line each: the same command continues after the last one."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.results.run_result import Evaluated, Evaluation, RunResult, evaluation_reader
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.ignored_settings import OF_FUNCTION
from afflux.sim.workload.inputs import package_versions, refuse_other_inputs
from afflux.sim.workload.metrics import CLASSIFICATION, Metric
from afflux.sim.workload.rule_files import code_digests
from afflux.sim.workload.task import Task

FILE = "finished.jsonl"
#: The settings on which the data, their division and the model depend.
_OF_INPUTS = ("task", "data", "model", "part", "delays", *OF_FUNCTION)


@dataclass(frozen=True)
class Outcome(Evaluated):
    """The facts about a run that tables show."""

    rule: str  #: the rule's label
    seed: int
    evaluations: tuple[Evaluation, ...]  #: empty: a client diverged
    max_staleness: int
    metrics: tuple[Metric, ...] = CLASSIFICATION

    @classmethod
    def of(cls, result: RunResult) -> "Outcome":
        """Return the outcome of a finished run."""
        return cls(result.spec.label, result.seed, result.evaluations, result.max_staleness, result.metrics)

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that a line of the file holds."""
        metrics = msgspec.convert(line["metrics"], tuple[Metric, ...]) if "metrics" in line else CLASSIFICATION
        hook = evaluation_reader(metrics)
        rows = msgspec.convert(line["evaluations"], tuple[Evaluation, ...], dec_hook=hook)
        return cls(line["rule"], line["seed"], rows, line["max_staleness"], metrics)

    def line(self) -> dict[str, Any]:
        """Return what `of_line` reads."""
        facts = {name: getattr(self, name) for name in ("rule", "seed", "evaluations", "max_staleness")}
        return facts | ({} if self.metrics == CLASSIFICATION else {"metrics": msgspec.to_builtins(self.metrics)})

    def late_score(self, share: float = 0.25) -> float:
        """Return the mean score of the evaluations in the last `share` of the arrivals, which is less noisy."""
        last = self.evaluations[-1].arrivals
        late = [one.score for one in self.evaluations if one.arrivals > (1 - share) * last or not last]
        return sum(late) / len(late)


def inputs_of_jobs(jobs: Sequence[Job], task: Task | None = None) -> list[dict[str, str]]:
    """Return the digests of the inputs of each job; jobs that differ in other settings than `_OF_INPUTS` share them.

    Raises:
        ConfigError: see `run`.
    """
    from afflux.sim.clients.flat_model import reproducible_torch
    from afflux.sim.runs.setup import SimulationSetup

    digests: dict[tuple[Any, ...], dict[str, str]] = {}
    inputs = []
    with reproducible_torch():
        for job in jobs:
            config = replace(job.config or SimConfig(), compile=False)
            key = job.seed, *(getattr(config, name) for name in _OF_INPUTS)
            if key not in digests:
                digests[key] = dict(SimulationSetup.of(config, job.seed, task, digests=True).inputs)
            inputs.append(digests[key])
    return inputs


class FinishedRuns(dict[int, list[RunResult]]):
    """Results by index into `jobs`, which `compare` fills; an entry is written to the file before it is set."""

    def __init__(
        self,
        path: Path,
        jobs: Sequence[Job],
        inputs: Sequence[Mapping[str, str]] = (),
        more: Callable[[int, RunResult | None], Mapping[str, Any]] = lambda index, result: {},
    ) -> None:
        """Write to `path`; `more` returns further facts of a line, also of a job that has diverged: None."""
        self._path, self._jobs, self._inputs, self._more = path, jobs, inputs, more
        if path.exists():
            # Remove a line that an interrupt cut off, so that the next line does not continue it.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def __setitem__(self, index: int, results: list[RunResult]) -> None:
        """Write the results of job `index`."""
        job = self._jobs[index]
        facts = _identity(job)
        if self._inputs:
            facts |= {"inputs": self._inputs[index], "versions": package_versions()}
        with self._path.open("a", encoding="utf-8") as file:
            runs: Sequence[RunResult | None] = results or [None]
            for result in runs:
                outcome = Outcome(job.spec.label, job.seed, (), 0) if result is None else Outcome.of(result)
                file.write(json.dumps(facts | outcome.line() | dict(self._more(index, result))) + "\n")
        super().__setitem__(index, results)


def all_lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the lines of the files; a line that was cut off does not count.

    Raises:
        ConfigError: a file holds something else.
    """
    records = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            for line in map(json.loads, lines):
                Outcome.of_line(line)
                _key(line)
                records.append(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} holds no finished runs: {error!r}") from error
    return records


def lines_of_jobs(lines: Sequence[dict[str, Any]], jobs: Sequence[Job]) -> dict[int, dict[str, Any]]:
    """Return the lines of the finished jobs, by index."""
    records = {_key(line): line for line in lines}
    return {index: records[key] for index, job in enumerate(jobs) if (key := _key(_identity(job))) in records}


def load_outcomes(
    paths: Path | Sequence[Path], jobs: Sequence[Job], inputs: Sequence[Mapping[str, str]] | None = None
) -> dict[int, Outcome]:
    """Return the outcomes of the finished jobs, by index; a line that was cut off does not count.

    Args:
        paths: the files.
        jobs: the jobs.
        inputs: see `inputs_of_jobs`; None: inputs are not compared.

    Raises:
        ConfigError: the file holds something else, or a run began with other inputs.
    """
    files = [paths] if isinstance(paths, Path) else paths
    ended = lines_of_jobs(all_lines(files), jobs)
    where = ", ".join(map(str, files))
    try:
        digests = {index: dict(line.get("inputs", {})) for index, line in ended.items()}
        versions = dict(chain.from_iterable(dict(line.get("versions", {})).items() for line in ended.values()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} holds no finished runs: {error!r}") from error
    if inputs is not None and ended:
        then, now = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
        for index, recorded in digests.items():
            for name in {*recorded, *inputs[index]} if recorded else ():
                then[name].append(recorded.get(name))
                now[name].append(inputs[index].get(name))
        refuse_other_inputs(where, then, now, versions, all(digests.values()))
    return {index: Outcome.of_line(line) for index, line in ended.items()}


def _identity(job: Job) -> dict[str, Any]:
    """Return everything on which a run depends, and the version of afflux; the folder of the data is not part of it."""
    config = (job.config or SimConfig()).recorded()
    config.pop("data_dir", None)
    facts = {"afflux": __version__, "rule": job.spec.identity, "options": job.spec.plain_options(), "seed": job.seed}
    code = code_digests(job.spec.name, *(str(config.get(name, "")) for name in ("task", "selection")))
    return facts | {"config": config} | ({"code": code} if code else {})


def _key(identity: dict[str, Any]) -> str:
    facts = [identity[name] for name in ("rule", "options", "seed", "config")]
    return json.dumps([*facts, identity.get("code", {})], sort_keys=True)
