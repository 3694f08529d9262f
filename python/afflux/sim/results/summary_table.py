"""The table of results: its rows, and on the terminal, by rich."""

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from afflux.ops.units import in_bytes
from afflux.sim.results.run_result import (
    NUMBERS,
    RunResult,
    group_by_rule,
    seed_statistics,
    summarise,
)
from afflux.sim.workload.config import SimConfig


def summary_rows(results: Sequence[RunResult], target: float, *, brief: bool) -> list[tuple[str, list[str]]]:
    """Return (title, one cell for each rule): mean +- standard deviation over seeds.

    Args:
        results: one for each rule and seed.
        target: accuracy of the rows that have one.
        brief: only the rows that the terminal shows.
    """
    groups, summary = group_by_rule(results), summarise(results, target)
    shown = []
    for number in NUMBERS:
        if number.brief or not brief:
            values = ((summary[label][number.name], len(runs)) for label, runs in groups.items())
            cells = [value.text(count, number.digits, number.scale) for value, count in values]
            shown.append((number.title.format(f"{100 * target:g}%"), cells))
    for decision in sorted({name for run in results for name in run.decisions} - {"joined"}):
        counts = [seed_statistics([run.decisions.get(decision, 0) for run in groups[label]]) for label in groups]
        cells = [value.text(len(groups[label]), 0) for label, value in zip(groups, counts, strict=True)]
        shown.append((f"{decision} arrivals", cells))
    seconds = (summary[label]["server_ms"].mean for label in groups)
    shown.append(("server ms per round", ["-" if math.isnan(mean) else f"{mean:.3f}" for mean in seconds]))
    shown.append(("server state", [in_bytes(summary[label]["state_bytes"].mean) for label in groups]))
    return shown


def results_table(results: Sequence[RunResult], config: SimConfig) -> Table:
    """Return the summary, one column per rule; mean ± standard deviation if there are several seeds."""
    shown = Table(Column("", style="bold"), *(Column(label, justify="right") for label in group_by_rule(results)))
    for title, cells in summary_rows(results, config.target, brief=True):
        shown.add_row(title, *cells)
    return shown


def table_by_rule(results: Sequence[RunResult], config: SimConfig) -> Table:
    """Return the main numbers of the summary, one row per rule: many rules fit a terminal of 80 columns."""
    rows = dict(summary_rows(results, config.target, brief=True))
    goal = f"{100 * config.target:g}%"
    columns = {
        "final accuracy, %": "final\naccuracy, %",
        f"rounds to {goal}": f"rounds\nto {goal}",
        f"virtual time to {goal}": f"virtual time\nto {goal}",
        "server state": "server\nstate",
    }
    headers = [Column(header, justify="right", no_wrap=True) for header in columns.values()]
    shown = Table(Column("\nrule", no_wrap=True), *headers, box=SIMPLE_HEAD)
    for index, label in enumerate(group_by_rule(results)):
        shown.add_row(label, *(rows[title][index] for title in columns))
    return shown
