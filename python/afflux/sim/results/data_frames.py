"""Results as pandas data frames."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from afflux.sim.errors import MissingExtraError, known
from afflux.sim.results.run_result import Evaluation, RunResult
from afflux.sim.results.statistics import paired_differences, usual_targets

Rows = Iterable[tuple[Any, ...]]


def data_frame(results: Sequence[RunResult], table: str, target: float) -> Any:
    """Return a table of results as a pandas DataFrame.

    Args:
        results: one for each rule and seed.
        table: evaluations: one row each; runs: the numbers of `RunResult.summary`, a row for each run; arrivals: client
            and staleness of each arrival; participation: arrivals of each client that was seen; targets: when each
            run reached which accuracy first; differences: of the final accuracy, see `paired_differences`.
        target: for the numbers that have one.

    Raises:
        ConfigError: an unknown table.
        MissingExtraError: pandas is not installed.
    """
    known("table", table, TABLES)
    if find_spec("pandas") is None:
        raise MissingExtraError("a data frame needs pandas: pip install pandas")
    columns, rows = TABLES[table](results, target)
    return import_module("pandas").DataFrame(list(rows), columns=list(columns))


def _evaluations(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    rows = ((*_run(run), *row) for run in results for row in run.evaluations)
    return ("rule", "seed", *Evaluation._fields), rows


def _runs(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    summaries = [run.summary(target) for run in results]
    names = list(summaries[0]) if summaries else []
    rows = ((*_run(run), *summary.values()) for run, summary in zip(results, summaries, strict=True))
    return ("rule", "seed", *names), rows


def _arrivals(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    rows = (
        (*_run(run), number, client, staleness)
        for run in results
        for number, (client, staleness) in enumerate(zip(run.clients.tolist(), run.staleness.tolist(), strict=True))
    )
    return ("rule", "seed", "number", "client", "staleness"), rows


def participation_rows(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    """Return columns and rows of the arrivals of each client that was seen."""

    def rows() -> Rows:
        for run in results:
            clients, counts = np.unique(run.clients, return_counts=True)
            for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
                yield *_run(run), client, count

    return ("rule", "seed", "client", "arrivals"), rows()


def target_rows(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    """Return columns and rows of the first evaluation of each run at each of the usual targets; None: not reached."""
    targets = usual_targets(results, target)
    hits = ((run, goal, run.first_to_reach(goal)) for run in results for goal in targets)
    rows = ((*_run(run), goal, *(hit[:3] if hit is not None else (None, None, None))) for run, goal, hit in hits)
    return ("rule", "seed", "target", *Evaluation._fields[:3]), rows


def _differences(results: Sequence[RunResult], target: float) -> tuple[Sequence[str], Rows]:
    rows = paired_differences(results, target=target)
    return ("first", "second", "seeds", "mean", "low", "high"), rows


def _run(run: RunResult) -> tuple[str, int]:
    return run.spec.label, run.seed


TABLES: dict[str, Callable[[Sequence[RunResult], float], tuple[Sequence[str], Rows]]] = {
    "evaluations": _evaluations,
    "runs": _runs,
    "arrivals": _arrivals,
    "participation": participation_rows,
    "targets": target_rows,
    "differences": _differences,
}
