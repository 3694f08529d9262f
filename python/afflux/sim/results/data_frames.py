"""Results as pandas data frames, which are also the CSV files of a run folder."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from afflux.sim.errors import known, require
from afflux.sim.results.run_result import Evaluation, RunResult, group_by_rule, summarise
from afflux.sim.results.statistics import PairedDifference, paired_differences, usual_targets

Rows = Iterator[Any]  #: tuples, or dicts by column


def data_frame(results: Sequence[RunResult], table: str, target: float, dtype: type | None = None) -> Any:
    """Return a table of results as a pandas DataFrame.

    Args:
        results: one for each rule and seed.
        table: evaluations: one row each; runs: the numbers of `RunResult.summary`, a row for each run; summary: their
            mean and standard deviation over seeds, a row for each rule; arrivals: client and staleness of each arrival;
            staleness: number of arrivals by staleness; participation: arrivals of each client that was seen; targets:
            when each run reached which accuracy first; differences: of the final accuracy, see `paired_differences`.
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
    return pandas.DataFrame(list(rows(results, target)), columns=columns, dtype=dtype)


def _evaluations(results: Sequence[RunResult], target: float) -> Rows:
    return ((run.spec.label, run.seed, *row) for run in results for row in run.evaluations)


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


def _differences(results: Sequence[RunResult], target: float) -> Rows:
    return iter(paired_differences(results, target=target))


#: Columns and rows by table; None: the columns are those of the rows.
TABLES: dict[str, tuple[tuple[str, ...] | None, Callable[[Sequence[RunResult], float], Rows]]] = {
    "evaluations": (("rule", "seed", *Evaluation._fields), _evaluations),
    "runs": (None, _runs),
    "summary": (None, _summary),
    "arrivals": (("rule", "seed", "number", "client", "staleness"), _arrivals),
    "staleness": (("rule", "seed", "staleness", "arrivals"), _counts("staleness")),
    "participation": (("rule", "seed", "client", "arrivals"), _counts("clients")),
    "targets": (("rule", "seed", "target", *Evaluation._fields[:3]), _targets),
    "differences": (PairedDifference._fields, _differences),
}
