"""Tables of results on the terminal, by rich."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from afflux.sim.results.run_result import RunResult, group_by_rule
from afflux.sim.results.summary_table import summary_rows
from afflux.sim.workload.config import SimConfig


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
