"""Statistics over seeds, the rows of tables, and results as data frames: the CSV files of a run folder."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np

from afflux.lab.results.finished_runs import FailedRun
from afflux.lab.results.run_result import (
    CLIENT_NUMBERS,
    NUMBERS,
    PLACE,
    RunResult,
    TimeStatistics,
    buffer_sizes,
    group_by_rule,
    seed_statistics,
    summarise,
)
from afflux.ops.errors import ConfigError
from afflux.ops.units import in_bytes
from afflux.ops.validation import known
from afflux.sim.errors import require
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Metric

BUFFER_SIZE_TITLE = "arrivals per step, M"
LEVEL = 0.95  #: level of confidence intervals


_Key = TypeVar("_Key")


def shown_metrics(results: Sequence[RunResult]) -> list[Metric]:
    """Return the metrics, as tables and figures show the values of these runs."""
    rows = [row for run in results for row in run.evaluations]
    return [metric.shown(getattr(row, metric.name) for row in rows) for metric in results[0].metrics]


def score_of(results: Sequence[RunResult]) -> Metric:
    """Return the first of `shown_metrics`."""
    return shown_metrics(results)[0]


def shown_target(results: Sequence[RunResult], target: float) -> float | None:
    """Return the target, or None if it is the default of the settings, and far from all scores."""
    bounds = [end for end in score_of(results).bounds if math.isfinite(end)]
    scores = [row.score for run in results for row in run.evaluations] + bounds
    return target if target != SimConfig.target or min(scores) <= target <= max(scores) else None


class PairedDifference(NamedTuple):
    """A number of the rule `first` minus the same number of the rule `second`, seed by seed."""

    first: str  #: label of a rule
    second: str
    seeds: int  #: number of seeds for which both rules have the number
    mean: float
    low: float  #: lower end of the confidence interval; nan for a single seed
    high: float
    p: float  #: of the paired t test, two-sided; nan for a single seed, and if the differences of all seeds are equal
    p_holm: float  #: adjusted by Holm for the number of pairs


def holm(values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Return Holm's adjusted p of each hypothesis: the error of the whole family is at most the level."""
    names = sorted(values, key=values.__getitem__)
    products = [min(1.0, (len(names) - rank) * values[name]) for rank, name in enumerate(names)]
    return dict(zip(names, accumulate(products, max), strict=True))


def paired_differences(
    results: Sequence[RunResult], number: str = "", level: float = LEVEL, target: float = SimConfig.target
) -> list[PairedDifference]:
    """Compare the rules two by two on the seeds that they share.

    For one seed, all rules see the same clients, delays and batches, so the differences vary less than the numbers. The
    interval is Student's: mean +- t s / sqrt(n) over n seeds, exact for normal differences, as is the p of the t test.
    Each interval by itself holds with probability `level`; only `p_holm` is corrected for the number of pairs.

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
    require("sklearn")  # which brings SciPy
    from scipy.special import stdtr  # type: ignore[import-untyped]

    rows = []
    for (first, mine), (second, theirs) in combinations(values.items(), 2):
        both = [gap for seed in mine if seed in theirs and not math.isnan(gap := mine[seed] - theirs[seed])]
        mean, std, seeds = seed_statistics(both)
        if seeds:
            error = std / math.sqrt(seeds) if seeds > 1 else math.nan
            half = t_quantile(seeds - 1, (1 + level) / 2) * error
            p = 2 * float(stdtr(seeds - 1, -abs(mean) / error)) if error > 0 else math.nan
            rows.append(PairedDifference(first, second, seeds, mean, mean - half, mean + half, p, math.nan))
    adjusted = holm({row: row.p for row in rows if not math.isnan(row.p)})
    return [row._replace(p_holm=adjusted.get(row, math.nan)) for row in rows]


def t_quantile(degrees: int, probability: float) -> float:
    """Return the quantile of Student's t distribution."""
    require("sklearn")  # which brings SciPy
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def summary_rows(
    results: Sequence[RunResult], target: float, *, brief: bool, failures: Sequence[FailedRun] = ()
) -> list[tuple[str, list[str]]]:
    """Return (title, one cell for each rule): mean +- standard deviation over seeds; of times to a target, the median.

    Args:
        results: one for each rule and seed.
        target: score of the rows that have one.
        brief: only the rows that the terminal shows.
        failures: the runs without a result, whose seeds count.
    """
    groups, summary = group_by_rule(results), summarise(results, target)
    metric, goal = score_of(results), shown_target(results, target)
    rows: list[tuple[str, list[str]]] = []
    buffers, seed_count = buffer_sizes(results), len({run.seed for run in results} | {run.seed for run in failures})
    if buffers:
        rows.append((BUFFER_SIZE_TITLE, [str(buffers[label]) for label in groups]))
    for number in (*NUMBERS, *CLIENT_NUMBERS):
        name = number.name.replace("score", metric.name)
        if not (number.brief or not brief) or name not in next(iter(summary.values())):
            continue
        values = [row[name] for row in summary.values()]
        if number.of_score:
            digits, scale = (number.digits, 100) if metric.is_share else (None, 1)
            rows.append((metric.title(number.title), [value.text(seed_count, digits, scale) for value in values]))
        elif goal is not None or "{}" not in number.title:
            title = number.title.format("" if goal is None else metric.text(goal))
            rows.append((title, [value.text(seed_count, number.digits, number.scale) for value in values]))
    for decision in sorted({name for run in results for name in run.decisions} - {"joined"}):
        counts = [seed_statistics([run.decisions.get(decision, 0) for run in groups[label]]) for label in groups]
        rows.append((f"{decision} arrivals", [value.text(seed_count, 0) for value in counts]))
    seconds, sizes = ([row[name][0] for row in summary.values()] for name in ("server_ms", "state_bytes"))
    rows.append(("server ms per round", ["-" if math.isnan(mean) else f"{mean:.3f}" for mean in seconds]))
    rows.append(("server state", [in_bytes(mean) for mean in sizes]))
    return rows


def p_text(p: float) -> str:
    """Return a p as tables show it.

    >>> p_text(0.25), p_text(0.0002), p_text(math.nan)
    ('0.250', '< 0.001', '-')
    """
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


Records = Iterable[Any]  #: tuples, or dicts by column


def data_frame(results: Sequence[RunResult], table: str, target: float, dtype: type | None = None) -> Any:
    """Return a table of results as a pandas DataFrame.

    Args:
        results: one for each rule and seed.
        table: evaluations: one row each; runs: the numbers of `RunResult.summary`, a row for each run; summary: their
            mean and standard deviation over seeds, a row for each rule; table: the text that is printed, a row for each
            rule; arrivals: client and staleness of each arrival; staleness: number of arrivals by staleness;
            participation: arrivals of each client that was seen; differences: of the final score, see
            `paired_differences`; clients: the evaluations of single clients.
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


#: Columns, and a function of the results and the target that returns the rows.
ResultTable = tuple[tuple[str, ...] | None, Callable[[Sequence[RunResult], float], Records]]


def _by_run(columns: Sequence[str], rows: Callable[[RunResult], Records]) -> ResultTable:
    """Return a table with the rows of each run, behind rule and seed."""
    return ("rule", "seed", *columns), lambda results, target: (
        (run.spec.label, run.seed, *row) for run in results for row in rows(run)
    )


def _runs(results: Sequence[RunResult], target: float) -> Records:
    return ({"rule": run.spec.label, "seed": run.seed, **run.summary(target)} for run in results)


def _summary(results: Sequence[RunResult], target: float) -> Records:
    groups = group_by_rule(results)
    for label, row in summarise(results, target).items():
        numbers: dict[str, Any] = {"rule": label, "seeds": len(groups[label])}
        for name, value in row.items():
            kind = "is_bound" if isinstance(value, TimeStatistics) else "std"
            numbers |= {name: value[0], f"{name}_{kind}": value[1]}
        yield numbers


def _shown(results: Sequence[RunResult], target: float) -> Records:
    rows = dict(summary_rows(results, target, brief=True, failures=getattr(results, "failures", ())))
    for label, *cells in zip(group_by_rule(results), *rows.values(), strict=True):
        yield {"rule": label} | dict(zip(rows, cells, strict=True))


def _counts(values: np.ndarray) -> Records:
    """Return each of the facts about arrivals, and the number of its arrivals."""
    return zip(*(column.tolist() for column in np.unique(values, return_counts=True)), strict=True)


METRICS = "metrics"  #: stands for the columns of the task's metrics
#: By name; without columns, they are those of the rows.
TABLES: dict[str, ResultTable] = {
    "evaluations": _by_run((*PLACE, METRICS), lambda run: run.evaluations),
    "runs": (None, _runs),
    "summary": (None, _summary),
    "table": (None, _shown),
    "arrivals": _by_run(
        ("number", "client", "staleness"),
        lambda run: zip(range(len(run.clients)), run.clients.tolist(), run.staleness.tolist(), strict=True),
    ),
    "staleness": _by_run(("staleness", "arrivals"), lambda run: _counts(run.staleness)),
    "participation": _by_run(("client", "arrivals"), lambda run: _counts(run.clients)),
    "clients": _by_run(
        ("arrivals", "client", "model", METRICS),
        lambda run: ((*row[:3], *row.values) for row in run.client_evaluations),
    ),
    "differences": (PairedDifference._fields, lambda results, target: paired_differences(results, target=target)),
}
