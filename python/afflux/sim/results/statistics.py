"""Statistics over seeds, the rows of tables, and results as data frames: the CSV files of a run folder."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from afflux.ops.units import in_bytes
from afflux.sim.errors import ConfigError, known, require
from afflux.sim.results.run_result import (
    CLIENT_NUMBERS,
    NUMBERS,
    PLACE,
    RunResult,
    SeedStatistics,
    group_by_rule,
    seed_statistics,
    summarise,
)
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.metrics import Metric

#: The shares in a table of targets, if a run has reached them.
USUAL_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
LEVEL = 0.95  #: level of confidence intervals


class TargetStatistics(NamedTuple):
    """The first time at which a rule's runs reached a target: arrivals, rounds and virtual time.

    The statistics are over the seeds that reached the target.
    """

    rule: str
    target: float
    runs: int  #: number of all runs, also those that did not reach the target
    arrivals: SeedStatistics
    rounds: SeedStatistics
    virtual_time: SeedStatistics


def score_of(results: Sequence[RunResult]) -> Metric:
    """Return the first metric, as tables and figures show the values of these runs."""
    return results[0].metrics[0].shown(row.score for run in results for row in run.evaluations)


def shown_target(results: Sequence[RunResult], target: float) -> float | None:
    """Return the target, or None if it is the default of the settings, and far from all scores."""
    bounds = [end for end in score_of(results).bounds if math.isfinite(end)]
    scores = [row.score for run in results for row in run.evaluations] + bounds
    return target if target != SimConfig.target or min(scores) <= target <= max(scores) else None


def usual_targets(results: Sequence[RunResult], target: float) -> list[float]:
    """Return `target`, if it is shown, and of shares the usual ones that a run has reached, but not at its start."""
    metric, goal = score_of(results), shown_target(results, target)
    best = metric.best(run.best_score for run in results)
    first = metric.worst(run.evaluations[0].score for run in results)
    usual = (share for share in USUAL_TARGETS if metric.reaches(best, share) and not metric.reaches(first, share))
    return sorted({*(() if goal is None else (goal,)), *(usual if metric.is_share else ())})


def reach_targets(results: Sequence[RunResult], targets: Iterable[float]) -> list[TargetStatistics]:
    """Return arrivals, rounds and virtual time to each target, rule by rule."""
    rows, targets = [], list(targets)
    for label, runs in group_by_rule(results).items():
        for target in targets:
            hits = [hit for run in runs if (hit := run.first_to_reach(target)) is not None]
            columns = list(zip(*hits, strict=True))[:3] or [(), (), ()]  # arrivals, version, virtual time
            rows.append(TargetStatistics(label, target, len(runs), *map(seed_statistics, columns)))
    return rows


class PairedDifference(NamedTuple):
    """A number of the rule `first` minus the same number of the rule `second`, seed by seed."""

    first: str  #: label of a rule
    second: str
    seeds: int  #: number of seeds for which both rules have the number
    mean: float
    low: float  #: lower end of the confidence interval; nan for a single seed
    high: float


def paired_differences(
    results: Sequence[RunResult], number: str = "", level: float = LEVEL, target: float = SimConfig.target
) -> list[PairedDifference]:
    """Compare the rules two by two on the seeds that they share.

    For one seed, all rules see the same clients, delays and batches, so the differences vary less than the numbers. The
    interval is Student's: mean +- t s / sqrt(n) over n seeds, exact for normal differences. Each interval by itself
    holds with probability `level`; there is no correction for the number of pairs.

    Args:
        results: one for each rule and seed.
        number: a name of `RunResult.summary`; default the final score, such as final_accuracy.
        level: of the intervals.
        target: for the numbers that have one.

    Returns:
        One difference for each pair of rules that share a seed.

    Raises:
        ConfigError: an unknown number, or a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ConfigError(f"level is {level}, must be in (0, 1)")
    values: dict[str, dict[int, float]] = {}
    for label, runs in group_by_rule(results).items():
        for run in runs:
            summary = run.summary(target)
            name = number or f"final_{run.metrics[0].name}"
            known("number", name, summary)
            values.setdefault(label, {})[run.seed] = summary[name]
    found = []
    for (first, mine), (second, theirs) in combinations(values.items(), 2):
        both = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        mean, std, seeds = seed_statistics(both)
        if seeds:
            half = t_quantile(seeds - 1, (1 + level) / 2) * std / math.sqrt(seeds) if seeds > 1 else math.nan
            found.append(PairedDifference(first, second, seeds, mean, mean - half, mean + half))
    return found


def t_quantile(degrees: int, probability: float) -> float:
    """Return the quantile of Student's t distribution."""
    require("sklearn")  # which brings SciPy
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(degrees, probability))


def summary_rows(results: Sequence[RunResult], target: float, *, brief: bool) -> list[tuple[str, list[str]]]:
    """Return (title, one cell for each rule): mean +- standard deviation over seeds.

    Args:
        results: one for each rule and seed.
        target: score of the rows that have one.
        brief: only the rows that the terminal shows.
    """
    groups, summary = group_by_rule(results), summarise(results, target)
    metric, goal = score_of(results), shown_target(results, target)
    shown = []
    for number in (*NUMBERS, *CLIENT_NUMBERS):
        name = number.name.replace("score", metric.name)
        if not (number.brief or not brief) or name not in next(iter(summary.values())):
            continue
        values = ((summary[label][name], len(runs)) for label, runs in groups.items())
        if number.of_score:
            digits, scale = (number.digits, 100) if metric.is_share else (None, 1)
            shown.append((metric.title(number.title), [value.text(n, digits, scale) for value, n in values]))
        elif goal is not None or "{}" not in number.title:
            title = number.title.format("" if goal is None else metric.text(goal))
            shown.append((title, [value.text(n, number.digits) for value, n in values]))
    for decision in sorted({name for run in results for name in run.decisions} - {"joined"}):
        counts = [seed_statistics([run.decisions.get(decision, 0) for run in groups[label]]) for label in groups]
        cells = [value.text(len(groups[label]), 0) for label, value in zip(groups, counts, strict=True)]
        shown.append((f"{decision} arrivals", cells))
    seconds = (summary[label]["server_ms"].mean for label in groups)
    shown.append(("server ms per round", ["-" if math.isnan(mean) else f"{mean:.3f}" for mean in seconds]))
    shown.append(("server state", [in_bytes(summary[label]["state_bytes"].mean) for label in groups]))
    return shown


Rows = Iterable[Any]  #: tuples, or dicts by column


def data_frame(results: Sequence[RunResult], table: str, target: float, dtype: type | None = None) -> Any:
    """Return a table of results as a pandas DataFrame.

    Args:
        results: one for each rule and seed.
        table: evaluations: one row each; runs: the numbers of `RunResult.summary`, a row for each run; summary: their
            mean and standard deviation over seeds, a row for each rule; arrivals: client and staleness of each arrival;
            staleness: number of arrivals by staleness; participation: arrivals of each client that was seen; targets:
            when each run reached which score first; differences: of the final score, see `paired_differences`; clients:
            the evaluations of single clients.
        target: for the numbers that have one.
        dtype: of all columns; `object` leaves the values as they are. Default: the type of the values of a column.

    Raises:
        ConfigError: an unknown table.
        MissingExtraError: pandas is not installed.
    """
    known("table", table, TABLES)
    require("pandas")
    import pandas

    columns, rows = TABLES[table]
    if columns is not None and columns[-1] == METRICS:
        columns = (*columns[:-1], *(metric.name for metric in results[0].metrics))
    return pandas.DataFrame(list(rows(results, target)), columns=columns, dtype=dtype)


def _evaluations(results: Sequence[RunResult], target: float) -> Rows:
    return ((run.spec.label, run.seed, *row) for run in results for row in run.evaluations)


def _clients(results: Sequence[RunResult], target: float) -> Rows:
    return ((run.spec.label, run.seed, *row[:3], *row.values) for run in results for row in run.client_evaluations)


def _runs(results: Sequence[RunResult], target: float) -> Rows:
    return ({"rule": run.spec.label, "seed": run.seed, **run.summary(target)} for run in results)


def _summary(results: Sequence[RunResult], target: float) -> Rows:
    groups = group_by_rule(results)
    for label, row in summarise(results, target).items():
        numbers: dict[str, Any] = {"rule": label, "seeds": len(groups[label])}
        for name, value in row.items():
            numbers |= {name: value.mean, f"{name}_std": value.std}
        yield numbers


def _arrivals(results: Sequence[RunResult], target: float) -> Rows:
    for run in results:
        for number, row in enumerate(zip(run.clients.tolist(), run.staleness.tolist(), strict=True)):
            yield run.spec.label, run.seed, number, *row


def _counts(name: str) -> Callable[[Sequence[RunResult], float], Rows]:
    """Return a function of the numbers of arrivals by a fact about them."""

    def rows(results: Sequence[RunResult], target: float) -> Rows:
        for run in results:
            values, counts = np.unique(getattr(run, name), return_counts=True)
            for row in zip(values.tolist(), counts.tolist(), strict=True):
                yield run.spec.label, run.seed, *row

    return rows


def _targets(results: Sequence[RunResult], target: float) -> Rows:
    goals = usual_targets(results, target)
    for run in results:
        for goal in goals:
            hit = run.first_to_reach(goal)
            yield run.spec.label, run.seed, goal, *((None, None, None) if hit is None else hit[:3])


METRICS = "metrics"  #: stands for the columns of the task's metrics
#: Columns and rows by table; None: the columns are those of the rows.
TABLES: dict[str, tuple[tuple[str, ...] | None, Callable[[Sequence[RunResult], float], Rows]]] = {
    "evaluations": (("rule", "seed", *PLACE, METRICS), _evaluations),
    "runs": (None, _runs),
    "summary": (None, _summary),
    "arrivals": (("rule", "seed", "number", "client", "staleness"), _arrivals),
    "staleness": (("rule", "seed", "staleness", "arrivals"), _counts("staleness")),
    "participation": (("rule", "seed", "client", "arrivals"), _counts("clients")),
    "targets": (("rule", "seed", "target", *PLACE), _targets),
    "clients": (("rule", "seed", "arrivals", "client", "model", METRICS), _clients),
    "differences": (PairedDifference._fields, lambda results, target: paired_differences(results, target=target)),
}
