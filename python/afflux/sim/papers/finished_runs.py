"""The finished runs of a reproduction, one JSON line each: the same command continues after the last one."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.results.run_result import Evaluation, RunResult
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.ignored_settings import OF_FUNCTION
from afflux.sim.workload.inputs import package_versions, refuse_other_inputs
from afflux.sim.workload.rule_files import code_digests
from afflux.sim.workload.task import Task

FILE = "finished.jsonl"
#: The settings on which the data, their division and the model depend.
_OF_INPUTS = ("task", "data", "model", "part", "delays", *OF_FUNCTION)


class Outcome(NamedTuple):
    """The facts about a run that tables show."""

    rule: str  #: the rule's label
    seed: int
    evaluations: tuple[Evaluation, ...]  #: empty: a client diverged
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

    def __init__(self, path: Path, jobs: Sequence[Job], inputs: Sequence[Mapping[str, str]] = ()) -> None:
        self._path, self._jobs, self._inputs = path, jobs, inputs
        if path.exists():
            # Remove a line that an interrupt cut off, so that the next line does not continue it.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def __setitem__(self, index: int, results: list[RunResult]) -> None:
        """Write the results of job `index`."""
        with self._path.open("a", encoding="utf-8") as file:
            job = self._jobs[index]
            facts = _identity(job)
            if self._inputs:
                facts |= {"inputs": self._inputs[index], "versions": package_versions()}
            for outcome in [Outcome.of(result) for result in results] or [Outcome(job.spec.label, job.seed, (), 0)]:
                file.write(json.dumps(facts | outcome._asdict()) + "\n")
        super().__setitem__(index, results)


def load_outcomes(
    path: Path, jobs: Sequence[Job], inputs: Sequence[Mapping[str, str]] | None = None
) -> dict[int, Outcome]:
    """Return the outcomes of the finished jobs, by index; a line that was cut off does not count.

    Args:
        path: the file.
        jobs: the jobs.
        inputs: see `inputs_of_jobs`; None: inputs are not compared.

    Raises:
        ConfigError: the file holds something else, or a run began with other inputs.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        found = {
            _key(line): (
                Outcome(
                    line["rule"],
                    line["seed"],
                    tuple(Evaluation(*row) for row in line["evaluations"]),
                    line["max_staleness"],
                ),
                dict(line.get("inputs", {})),
                dict(line.get("versions", {})),
            )
            for line in map(json.loads, lines)
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no finished runs: {error!r}") from error
    keys = [_key(_identity(job)) for job in jobs]
    ended = {index: found[key] for index, key in enumerate(keys) if key in found}
    if inputs is not None and ended:
        then, now = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
        for index, (_, digests, _) in ended.items():
            for name in {*digests, *inputs[index]} if digests else ():
                then[name].append(digests.get(name))
                now[name].append(inputs[index].get(name))
        versions = {name: text for _, _, one in ended.values() for name, text in one.items()}
        recorded = all(digests for _, digests, _ in ended.values())
        refuse_other_inputs(str(path), then, now, versions, recorded)
    return {index: outcome for index, (outcome, _, _) in ended.items()}


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
