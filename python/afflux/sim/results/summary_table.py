"""The rows of the table of results, for the terminal and for the page."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from afflux.ops.units import in_bytes
from afflux.sim.results.run_result import RunResult, SeedStatistics, group_by_rule, seed_statistics, summarise


class Row(NamedTuple):
    """One number of the summary in the table of results."""

    title: str
    name: str  #: name in `RunResult.summary`
    digits: int
    scale: float = 1.0
    brief: bool = True  #: whether the terminal shows it


def summary_rows(results: Sequence[RunResult], target: float, *, brief: bool) -> list[tuple[str, list[str]]]:
    """Return (title, one cell for each rule): mean +- standard deviation over seeds.

    Args:
        results: one for each rule and seed.
        target: accuracy of the rows that have one.
        brief: only the rows that the terminal shows.
    """
    goal = f"{100 * target:g}%"
    rows = (
        Row("final accuracy, %", "final_accuracy", 1, 100),
        Row("best accuracy, %", "best_accuracy", 1, 100),
        Row("mean accuracy of the last tenth, %", "late_accuracy", 1, 100, False),
        Row("stability (deviation in the last tenth), %", "stability", 2, 100),
        Row(f"rounds to {goal}", "rounds_to_target", 0),
        Row(f"virtual time to {goal}", "time_to_target", 0),
        Row("max staleness, rounds", "max_staleness", 0),
        Row("mean staleness", "mean_staleness", 1),
        Row("mean max staleness", "mean_max_staleness", 1),
        Row("weighted staleness, τ_ave", "weighted_staleness", 2, 1, False),
        Row("aggregated arrivals per round, N_ave", "aggregated_per_round", 2, 1, False),
        Row("rejected arrivals", "rejected_arrivals", 0, 1, False),
        Row("clients that took part", "participating_clients", 0, 1, False),
        Row("Gini coefficient of participation", "participation_gini", 2, 1, False),
    )
    groups, summary = group_by_rule(results), summarise(results, target)
    shown = [
        (row.title, [format_number(summary[one][row.name], len(groups[one]), row.digits, row.scale) for one in groups])
        for row in rows
        if row.brief or not brief
    ]
    for decision in sorted({name for run in results for name in run.decisions} - {"joined"}):
        counts = [seed_statistics([run.decisions.get(decision, 0) for run in groups[label]]) for label in groups]
        cells = [format_number(value, len(groups[label]), 0) for label, value in zip(groups, counts, strict=True)]
        shown.append((f"{decision} arrivals", cells))
    seconds = (summary[label]["server_ms"].mean for label in groups)
    shown.append(("server ms per round", ["-" if math.isnan(mean) else f"{mean:.3f}" for mean in seconds]))
    shown.append(("server state", [in_bytes(summary[label]["state_bytes"].mean) for label in groups]))
    return shown


def format_number(value: SeedStatistics, runs: int, digits: int, scale: float = 1) -> str:
    """Return mean +- standard deviation; "-" if no run has the number.

    Args:
        value: over the seeds that have the number.
        runs: all seeds.
        digits: after the point.
        scale: factor of the shown number.
    """
    if not value.seeds:
        return "-"
    text = f"{scale * value.mean:.{digits}f}"
    if value.seeds > 1:
        text += f" ± {scale * value.std:.{digits}f}"
    # Seeds that did not reach the target are left out of the mean: show how many did.
    return text if value.seeds == runs else f"{text} ({value.seeds} of {runs})"
