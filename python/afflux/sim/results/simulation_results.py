"""The results of a simulation of several rules and seeds: histories, statistics, data frames, figure, run folder."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from afflux.sim.errors import ConfigError, require
from afflux.sim.results import run_folder
from afflux.sim.results.audit_log import FOLDER, AuditLog, Count, file_stem, read_audit_log
from afflux.sim.results.model_file import FOLDER as MODELS
from afflux.sim.results.run_history import RunHistory
from afflux.sim.results.run_result import ClientEvaluation, Evaluation, RunResult, Summary, summarise
from afflux.sim.results.statistics import (
    LEVEL,
    PairedDifference,
    TargetStatistics,
    data_frame,
    latex_table,
    paired_differences,
    reach_targets,
    usual_targets,
)
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.store.files import read_bytes


class SimulationResults(tuple[RunResult, ...]):
    """The results of all runs, seed by seed, in the order of the rules."""

    config: SimConfig  #: the settings of the runs

    def __new__(cls, runs: Iterable[RunResult], config: SimConfig) -> "SimulationResults":
        """Hold results of runs with these settings."""
        results = super().__new__(cls, runs)
        results.config = config
        return results

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return what a copy is made from."""
        return tuple(self), self.config

    def of(self, rule: str, seed: int) -> RunResult:
        """Return the run of the rule with this label and seed; raise KeyError, which lists them, if there is none."""
        for run in self:
            if (run.spec.label, run.seed) == (rule, seed):
                return run
        raise KeyError(f"no run of {rule!r} with seed {seed!r}; there are {', '.join(map(repr, self.histories))}")

    @property
    def histories(self) -> dict[tuple[str, int], tuple[Evaluation, ...]]:
        """The evaluations of each run, by the rule's label and seed."""
        return {(run.spec.label, run.seed): run.evaluations for run in self}

    def summary(self, target: float | None = None) -> Summary:
        """Return {rule: {number: mean and deviation over seeds}}, a dict that is printed as a table.

        Args:
            target: score for the rounds and the time to the target; default: that of the simulation.
        """
        return summarise(self, self.config.target if target is None else target)

    def targets(self, *scores: float) -> list[TargetStatistics]:
        """Return when each rule reached scores first; without arguments, the usual ones that a run has reached."""
        return reach_targets(self, scores or usual_targets(self, self.config.target))

    def paired_differences(self, number: str = "", level: float = LEVEL) -> list[PairedDifference]:
        """Return the differences between the rules over the seeds that they share, with Student's intervals.

        Args:
            number: a name of `RunResult.summary`; default the final score, such as final_accuracy.
            level: of the intervals.

        Raises:
            ConfigError: an unknown number, or a level outside (0, 1).
        """
        return paired_differences(self, number, level, self.config.target)

    def to_dataframe(self, table: str = "evaluations") -> Any:
        """Return results as a pandas DataFrame, whose first columns are rule and seed, except for the last two.

        Args:
            table: evaluations (one row each), runs (the numbers of `RunResult.summary`), arrivals (client and staleness
                of each), staleness and participation (arrivals by staleness, and by client), targets, summary (mean and
                deviation of these numbers for each rule), clients (the evaluations of single clients), or differences
                (of the final score between rules).

        Raises:
            ConfigError: an unknown table.
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self, table, self.config.target)

    def draw(
        self,
        path: Path | str,
        *,
        panels: Sequence[str] = ("score", "staleness"),
        x: str | Sequence[str] = ("rounds", "time"),
        size: float | tuple[float, float] | None = None,
        title: str | None = None,
    ) -> None:
        """Write a figure: the score over rounds and over virtual time, and staleness, or other panels.

        The same results give the same bytes. Fonts are embedded, and text is text: no label is read as mathematics.

        Args:
            path: of a .pdf, .svg or .png file.
            panels: some of score (the first metric), the names of the metrics (accuracy and loss, unless the task
                declares others), staleness and participation.
            x: below curves of metrics: rounds, time or arrivals; for several, each has its panels.
            size: width in inches, such as 3.3 for one column of a page, or width and height. Narrow panels have smaller
                text and stand in several rows. Default: 4.5 inches for each panel.
            title: above the figure; default: the settings, or nothing if `size` is given.

        Raises:
            ConfigError: an unknown panel, x or kind of file, or an impossible size.
            MissingExtraError: matplotlib is not installed.
        """
        require("matplotlib")
        from afflux.sim.results.figures import draw_comparison

        if title is None:
            title = run_folder.describe_setting(self.config, self) if size is None else ""
        across = (x,) if isinstance(x, str) else tuple(x)
        draw_comparison(self, title, self.config.target, Path(path), tuple(panels), across, size)

    def to_latex(self) -> str:
        r"""Return a LaTeX table with a row for each rule, for the package booktabs, and a note below it.

        Its columns are the final accuracy, rounds and virtual time to the target, milliseconds of the server per round
        and the server's state, the best of each in bold; and, from two seeds on, the paired difference to the rule
        with the best accuracy with its interval, p of the paired t test with Holm's adjustment and, from six seeds on,
        of Wilcoxon's test.
        """
        return latex_table(self, self.config.target)

    def write(self, folder: Path | str) -> "SimulationResults":
        """Write the files of a run folder into `folder`, which is made if there is none; return these results."""
        run_folder.write_results(Path(folder), self, self.config)
        return self

    def __repr__(self) -> str:
        found: list[Any] = [f"{run.spec.label}, seed {run.seed}: {run.final_score:.4f}" for run in self]
        return f"SimulationResults({'; '.join(found)})"


#: The most bytes of a file that is read as a whole.
MOST_BYTES = 1 << 30


class _Run(msgspec.Struct, frozen=True):
    """A run in summary.json."""

    rule: str
    seed: Count
    clients_with_data: Count
    state_bytes: float
    params_sha256: str
    server_ms: float | None = None
    buffers_sha256: str = ""


class _Summary(msgspec.Struct, frozen=True):
    runs: list[_Run]


def read_results(folder: Path | str) -> SimulationResults:
    """Read the results of the runs in a run folder, from its tables and audit logs; nothing is executed.

    Args:
        folder: of `Simulation.run(out=...)`, or of the command line.

    Returns:
        The runs that have ended, as they were written, but without params; `RunResult.load` reads these from models/.

    Raises:
        ConfigError: a file is missing, or does not hold what a run writes.
    """
    folder = Path(folder)
    try:
        summary = msgspec.json.decode(read_bytes(folder / "summary.json", MOST_BYTES), type=_Summary)
        config = msgspec.json.decode(read_bytes(folder / "config.json", MOST_BYTES), type=run_folder.Configuration)
        evaluations, clients = (
            _rows_by_run(folder / name) if name == "metrics.csv" or (folder / name).exists() else {}
            for name in ("metrics.csv", "clients.csv")
        )
        runs, settings = list[RunResult](), None
        for run in summary.runs:
            log = read_audit_log(folder / FOLDER / f"{file_stem(run.rule, run.seed)}.jsonl")
            settings = log.header.settings(log.path)
            key = run.rule, run.seed
            runs.append(_result(run, config, evaluations[key], clients.get(key, []), log))
    except OSError as error:
        raise ConfigError(f"{folder} holds no results of a run: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder} holds results that no run has written: {error}") from None
    if settings is None:
        raise ConfigError(f"{folder} holds no results of a run")
    return SimulationResults(runs, settings)


def _rows_by_run(path: Path) -> dict[tuple[str, int], list[dict[str, str]]]:
    rows: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in csv.DictReader(read_bytes(path, MOST_BYTES).decode().splitlines()):
        rows.setdefault((row["rule"], int(row["seed"])), []).append(row)
    return rows


def _result(
    run: _Run,
    config: run_folder.Configuration,
    rows: Sequence[Mapping[str, str]],
    client_rows: Sequence[Mapping[str, str]],
    log: AuditLog,
) -> RunResult:
    names = tuple(metric.name for metric in log.header.task_metrics)
    model = log.path.parent.parent / MODELS / f"{log.path.stem}.safetensors"
    history = RunHistory([])
    for row in rows:
        place = int(row["arrivals"]), int(row["version"]), float(row["virtual_time"])
        history.evaluations.append(Evaluation(*place, *(float(row[name]) for name in names), names=names))
    history.client_evaluations = [
        ClientEvaluation(int(row["arrivals"]), int(row["client"]), row["model"], tuple(float(row[x]) for x in names))
        for row in client_rows
    ]
    (rule,) = [rule for rule in config.rules if rule.label == run.rule]
    for arrival in log.arrivals:
        history.add_arrival(arrival.client, arrival.status, arrival.staleness)
    for line in log.rounds:
        weights = np.array(line.weights, np.float64)  # None becomes nan
        report: Any = SimpleNamespace(staleness=np.array(line.staleness), weights=weights, seconds=0.0)
        report.stepped, report.rejected = line.stepped, line.rejected
        history.add_round(report)
    history.seconds = [] if run.server_ms is None else [run.server_ms / 1e3]
    return RunResult(
        spec=RuleSpec(rule.name, tuple(log.header.options.items()), rule.label),
        seed=run.seed,
        **history.result_fields(),
        state_bytes=int(run.state_bytes),
        num_clients=run.clients_with_data,
        params=np.zeros(0, np.float32),
        leader="" if rule.updates_of == rule.label else rule.updates_of,
        settings=config.simulation,
        division=config.division,
        options=rule.options,
        parts=rule.parts,
        first_params_sha256=log.header.first_params_sha256,
        digest=run.params_sha256,
        metrics=log.header.task_metrics,
        buffers_digest=run.buffers_sha256,
        model_file=model if model.is_file() else None,
    )
