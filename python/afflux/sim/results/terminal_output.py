"""Output of a run on the terminal: progress bars and the table of results, by rich."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from afflux.sim.results.run_result import RunResult, group_by_rule
from afflux.sim.results.summary_table import summary_rows
from afflux.sim.workload.config import SimConfig


@contextmanager
def progress_bars(
    labels: Sequence[str], arrivals: int, console: Console, done: int = 0
) -> Iterator[Callable[[int, int], None]]:
    """Show one progress bar per rule, over all its seeds; nothing if the output is no terminal.

    Args:
        labels: the rule of each job.
        arrivals: of each job.
        console: where the bars are shown.
        done: arrivals of each job that were handled before.

    Yields:
        A function to call with (index of the job, its arrivals so far).
    """
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("arrivals"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    total = {label: labels.count(label) * arrivals for label in labels}
    begun = {label: labels.count(label) * done for label in labels}
    tasks = {label: bars.add_task(label, total=count, completed=begun[label]) for label, count in total.items()}
    seen = [done] * len(labels)

    def watch(index: int, so_far: int) -> None:
        bars.advance(tasks[labels[index]], so_far - seen[index])
        seen[index] = so_far

    with bars:
        yield watch


def results_table(results: Sequence[RunResult], config: SimConfig) -> Table:
    """Return the summary, one column per rule; mean ± standard deviation if there are several seeds."""
    shown = Table(Column("", style="bold"), *(Column(label, justify="right") for label in group_by_rule(results)))
    for title, cells in summary_rows(results, config.target, brief=True):
        shown.add_row(title, *cells)
    return shown
