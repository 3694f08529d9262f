"""Output of a run on the terminal: progress bars and the table of results, by rich."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from afflux.ops.units import in_bytes
from afflux.sim.results.run_result import RunResult, SeedStatistics, group_by_rule, summarise
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
    goal = f"{100 * config.target:g}%"
    groups = group_by_rule(results)
    summary = summarise(results, config.target)
    shown = Table(Column("", style="bold"), *(Column(label, justify="right") for label in groups))

    def add(title: str, name: str, digits: int, scale: float = 1.0) -> None:
        shown.add_row(
            title,
            *(_number(summary[label][name], len(groups[label]), digits, scale) for label in groups),
        )

    add("final accuracy, %", "final_accuracy", 1, 100)
    add("best accuracy, %", "best_accuracy", 1, 100)
    add(f"rounds to {goal}", "rounds_to_target", 0)
    add(f"virtual time to {goal}", "time_to_target", 0)
    add("max staleness, rounds", "max_staleness", 0)
    add("mean staleness", "mean_staleness", 1)
    add("mean max staleness", "mean_max_staleness", 1)
    shown.add_row("server ms per round", *(f"{summary[label]['server_ms'].mean:.3f}" for label in groups))
    shown.add_row("server state", *(in_bytes(summary[label]["state_bytes"].mean) for label in groups))
    return shown


def _number(value: SeedStatistics, runs: int, digits: int, scale: float = 1) -> str:
    if not value.seeds:
        return "-"
    text = f"{scale * value.mean:.{digits}f}"
    if value.seeds > 1:
        text += f" ± {scale * value.std:.{digits}f}"
    # Seeds that did not reach the target are left out of the mean: show how many did.
    return text if value.seeds == runs else f"{text} ({value.seeds} of {runs})"
