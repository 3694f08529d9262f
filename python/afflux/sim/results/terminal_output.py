"""The table of results on the terminal, by rich."""

from collections.abc import Sequence

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
