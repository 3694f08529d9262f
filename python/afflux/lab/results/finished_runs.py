"""The record of the runs of a folder, one JSON line each, by which the same command continues after any end.

The last line of a run counts. No command makes a run again that has ended, or diverged; a run that was interrupted or
killed, has failed, or is open has no result.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from afflux import __version__
from afflux.lab.results.audit_log import FOLDER, file_stem, read_audit_log, truncate_file
from afflux.lab.results.model_file import FOLDER as MODELS
from afflux.lab.results.run_history import RunHistory
from afflux.lab.results.run_result import ClientEvaluation, Evaluation, RunResult, evaluation_reader
from afflux.ops.errors import ConfigError
from afflux.rules.files import code_digests
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import DivergedError, ProcessKilledError, TrainingError
from afflux.sim.workload.config import Count, SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric

_LOGGER = logging.getLogger("afflux")
FILE = "finished.jsonl"
#: Of lines that have no result: which errors they are, beside `OPEN`, a run that no command has brought to an end.
ERRORS = {"diverged": DivergedError, "failed": TrainingError, "killed": ProcessKilledError}
OPEN, INTERRUPTED = "open", "interrupted"
AGAIN = {OPEN, INTERRUPTED, *ERRORS} - {"diverged"}  #: the same command makes these runs again


class Job(NamedTuple):
    """One run: a rule and a seed."""

    spec: RuleSpec
    seed: int
    #: Other rules that get the same updates; the clients train from the params of `spec`.
    followers: tuple[RuleSpec, ...] = ()
    config: SimConfig | None = None  #: Settings of this job; None: those of all jobs.
    may_diverge: bool = False  #: Whether the first client that diverges ends the job.
    #: Makes the run in the place of `simulate`, called with the job, its settings and options of `simulate`.
    make: Callable[..., list[RunResult]] | None = None

    @property
    def label(self) -> str:
        """Name of the job in tables."""
        return self.spec.label + "".join(f" + {follower.label}" for follower in self.followers)

    @property
    def title(self) -> str:
        """Name of the job, different from those of other jobs with the same rule."""
        return f"{self.label}, seed {self.seed}"


class FailedRun(NamedTuple):
    """A run without a result."""

    rule: str  #: its label, or those of all rules that get the same updates
    seed: int
    status: str  #: diverged, failed (an exception in the code of the task), killed, interrupted or open
    reason: str
    cause: Exception | None = None  #: of a run of this process

    @property
    def error(self) -> Exception:
        """The exception that has ended the run; that of a client's training, if this process has raised it."""
        if self.cause is None:
            return ERRORS.get(self.status, TrainingError)(self.reason or self.status)
        client = self.cause.__cause__
        return client if isinstance(client, Exception) and client.__traceback__ is not None else self.cause

    def facts(self) -> dict[str, Any]:
        """Return the fields that are recorded."""
        return {name: value for name, value in self._asdict().items() if name != "cause"}

    def __str__(self) -> str:
        return f"{self.rule}, seed {self.seed} {'was ' * (self.status not in ('diverged', 'failed'))}{self.status}"


Runs = Sequence[RunResult] | FailedRun  #: what a job gives: a result for each of its rules


def line_of(result: RunResult | FailedRun) -> dict[str, Any]:
    """Return what `evaluations_of` reads, and the label, seed and largest staleness; of a failed run also why."""
    if isinstance(result, FailedRun):
        return {"rule": result.rule, "seed": result.seed, "evaluations": (), "max_staleness": 0} | result.facts()
    facts = {"rule": result.spec.label, "seed": result.seed, "evaluations": result.evaluations}
    facts["max_staleness"] = result.max_staleness
    return facts | ({} if result.metrics == CLASSIFICATION else {"metrics": msgspec.to_builtins(result.metrics)})


def evaluations_of(line: Mapping[str, Any]) -> tuple[tuple[Evaluation, ...], tuple[Metric, ...]]:
    """Return the evaluations of a line, none of a run without a result, and their metrics."""
    metrics = msgspec.convert(line["metrics"], tuple[Metric, ...]) if "metrics" in line else CLASSIFICATION
    hook = evaluation_reader(metrics)
    return msgspec.convert(line["evaluations"], tuple[Evaluation, ...], dec_hook=hook), metrics


class FinishedRuns(dict[int, Runs]):
    """Runs by index into `jobs`, which `compare` fills; an entry is written to the file before it is set."""

    def __init__(
        self,
        path: Path,
        jobs: Sequence[Job],
        inputs: Sequence[Mapping[str, str]] = (),
        more: Callable[[int, RunResult | None], Mapping[str, Any]] = lambda index, result: {},
        ended: Mapping[int, Runs] | None = None,
    ) -> None:
        """Write to `path`; `more` returns further facts of a line, also of a run without a result: None.

        Args:
            path: the file.
            jobs: the runs.
            inputs: digests of the inputs of each; default those of the results.
            more: see above.
            ended: the runs that have lines already.
        """
        super().__init__(ended or {})
        self.lines: dict[int, dict[str, Any]] = {}  #: Those of the runs that an earlier command has finished.
        self._path, self.jobs, self._inputs, self._more = path, jobs, inputs, more
        self._opened = False
        if path.exists() or path.is_symlink():
            # Remove a line that an interrupt cut off, so that the next line does not continue it.
            content = b"" if path.is_symlink() else path.read_bytes()
            truncate_file(path, content.rfind(b"\n") + 1)  # raises for a link

    def open_runs(self) -> None:
        """Write a line for each run that is not finished: a kill of this program leaves it."""
        self._opened = True
        for index, job in enumerate(self.jobs):
            if index not in self:
                self._write(index, FailedRun(job.label, job.seed, OPEN, ""))

    def __setitem__(self, index: int, runs: Runs) -> None:
        """Write the line of job `index`, unless it was interrupted and has no line."""
        if self._opened or not isinstance(runs, FailedRun) or runs.status != INTERRUPTED:
            self._write(index, runs)
        super().__setitem__(index, runs)

    def _write(self, index: int, runs: Runs) -> None:
        facts = _identity(self.jobs[index])
        inputs = self._inputs[index] if self._inputs else {} if isinstance(runs, FailedRun) else runs[0].inputs
        facts |= {"inputs": inputs, "versions": package_versions()} if inputs else {}
        if isinstance(runs, FailedRun):
            facts |= line_of(runs._replace(rule=self.jobs[index].spec.label)) | dict(self._more(index, None))
        else:
            rows = [line_of(result) | dict(self._more(index, result)) for result in runs]
            facts |= rows[0] | ({"others": rows[1:]} if rows[1:] else {})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts, default=lambda value: value.tolist()) + "\n")


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
                evaluations_of(line)
                line_key(line)
                records.append(line | {name: dict(line[name]) for name in ("inputs", "versions") if name in line})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} holds no finished runs: {type(error).__name__}: {error}") from error
    return records


def lines_of_jobs(
    lines: Sequence[dict[str, Any]], jobs: Sequence[Job], *, finished: bool = True
) -> dict[int, dict[str, Any]]:
    """Return the lines of the finished jobs, or of all, by index."""
    records = {line_key(line): line for line in lines if not (finished and line.get("status") in AGAIN)}
    return {index: records[key] for index, job in enumerate(jobs) if (key := key_of(job)) in records}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the bits of a run depend."""
    return {"afflux": __version__} | {name: version(name) for name in ("numpy", "torch")}


def refuse_other_inputs(
    place: str, inputs: Mapping[str, Any], now: Mapping[str, Any], versions: Mapping[str, str], recorded: bool
) -> None:
    """Compare the inputs of a run with those with which it continues.

    Args:
        place: the file or folder of the run, for messages.
        inputs: those with which the run began.
        now: the present ones.
        versions: of packages, when the run began; others are one line of notice.
        recorded: whether `inputs` has digests; their absence is one line of notice.

    Raises:
        ConfigError: an input is another one; the error names it.
    """
    names = sorted({*inputs, *now} if recorded else inputs)
    changed = [f"{name} {versions[name]}" for name, new in package_versions().items() if versions.get(name, new) != new]
    if other := [name for name in names if inputs.get(name) != now.get(name)]:
        raise ConfigError(
            f"{place}: the run began with other inputs: {', '.join(other)}; undo the change, or begin a new run"
            + (f" (that was with {', '.join(changed)})" if changed else "")
        )
    if not recorded:
        _LOGGER.warning("%s holds no digests of its inputs: a change of the data is not noticed", place)
    if changed:
        _LOGGER.warning("%s: the run began with %s: its bits may differ from here on", place, ", ".join(changed))


def check_inputs(where: str, lines: Mapping[int, Mapping[str, Any]], inputs: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ConfigError if runs began with other inputs, which `inputs` holds by the index of the run."""
    digests = {index: line.get("inputs", {}) for index, line in lines.items() if line["evaluations"]}
    versions = dict(chain.from_iterable(line.get("versions", {}).items() for line in lines.values()))
    then, now = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
    for index, recorded in digests.items():
        for name in {*recorded, *inputs[index]} if recorded else ():
            then[name].append(recorded.get(name))
            now[name].append(inputs[index].get(name))
    if digests:
        refuse_other_inputs(where, then, now, versions, all(digests.values()))


def split_runs(runs: Mapping[int, Runs]) -> tuple[list[RunResult], list[FailedRun]]:
    """Return the results of runs by index, in the order of the indices, and the runs without a result."""
    ends = [runs[index] for index in sorted(runs)]
    results = [result for end in ends if not isinstance(end, FailedRun) for result in end]
    return results, [end for end in ends if isinstance(end, FailedRun)]


def _identity(job: Job) -> dict[str, Any]:
    """Return everything on which a run depends, and the version of afflux; the folder of the data is not part of it."""
    config = (job.config or SimConfig()).recorded()
    config.pop("data_dir", None)
    facts: dict[str, Any] = {"afflux": __version__, "rule": job.spec.identity, "options": job.spec.plain_options()}
    facts |= {"seed": job.seed, "config": config}
    if job.spec.identity != job.spec.label:
        facts["identity"] = job.spec.identity  # the rule of a line is its label
    if job.followers:
        facts["followers"] = [[rule.identity, rule.plain_options()] for rule in job.followers]
    code = code_digests(job.spec.name, *(str(config.get(name, "")) for name in ("task", "selection")))
    for rule in job.followers:
        code |= {f"rule {rule.label}": digest for digest in code_digests(rule.name, "").values()}
    return facts | ({"code": code} if code else {})


def key_of(job: Job, *, code: bool = True) -> str:
    """Return the `line_key` of the job's line; without `code` that of any text of its files."""
    return line_key(_identity(job) | ({} if code else {"code": {}}))


def line_key(line: Mapping[str, Any]) -> str:
    """Return what tells a run from others."""
    facts = [line.get("identity", line["rule"]), *(line[name] for name in ("options", "seed", "config"))]
    return json.dumps([*facts, line.get("code", {}), line.get("followers", [])], sort_keys=True)


class ResultFacts(msgspec.Struct, frozen=True):
    """The facts of a result that neither the outcome nor the audit log has."""

    num_clients: Count
    state_bytes: Count
    server_ms: float
    digest: str
    leader: str
    settings: dict[str, Any]
    division: dict[str, Any]
    options: dict[str, Any]
    parts: dict[str, Any]
    buffers_digest: str = ""
    client_evaluations: tuple[ClientEvaluation, ...] = ()


def result_facts(index: int, result: RunResult | None) -> dict[str, Any]:
    """Return what `read_line` reads beside the outcome; see `FinishedRuns`."""
    names = ResultFacts.__struct_fields__
    return {} if result is None else {"result": {name: getattr(result, name) for name in names}}


def read_line(folder: Path, line: Mapping[str, Any]) -> Runs:
    """Return the results of a line of a run folder, without params, or why there are none; nothing is executed.

    Raises:
        ConfigError: there is no audit log of the run, or the line is not that of a run.
    """
    if "status" in line:
        label = " + ".join([line["rule"], *(name for name, _ in line.get("followers", ()))])
        return FailedRun(label, line["seed"], str(line["status"]), str(line.get("reason", "")))
    try:
        return [_result(folder, row) for row in (line, *line.get("others", ()))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder} holds results that no run has written: {error}") from None


def _result(folder: Path, line: Mapping[str, Any]) -> RunResult:
    label, seed, facts = line["rule"], line["seed"], msgspec.convert(line["result"], ResultFacts)
    log = read_audit_log(folder / FOLDER / f"{file_stem(label, seed)}.jsonl")
    model = folder / MODELS / f"{log.path.stem}.safetensors"
    hook = evaluation_reader(log.header.task_metrics)
    history = RunHistory(msgspec.convert(line["evaluations"], list[Evaluation], dec_hook=hook))
    for arrival in log.arrivals:
        history.add_arrival(arrival.client, arrival.status, arrival.staleness)
    for _ in log.dropouts:
        history.add_dropout()
    for round in log.rounds:
        history.add_round(round)
    history.seconds = [] if np.isnan(facts.server_ms) else [facts.server_ms / 1e3]
    if log.end is None or log.end.params_sha256 != facts.digest:
        raise ConfigError(f"{log.path} is not the log of the run in {FILE}")
    names = {*ResultFacts.__struct_fields__} - {"server_ms"}
    return RunResult(
        spec=RuleSpec(log.header.rule, tuple(log.header.options.items()), label),
        seed=seed,
        **(history.result_fields() | {name: getattr(facts, name) for name in names}),
        params=np.zeros(0, np.float32),
        first_params_sha256=log.header.first_params_sha256,
        metrics=log.header.task_metrics,
        inputs=log.header.inputs or {},
        num_params=log.header.d,
        model_file=model if model.is_file() else None,
    )
