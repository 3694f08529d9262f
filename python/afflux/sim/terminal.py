"""What a person sees while and after it runs: progress bars and the table, by rich."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from afflux.ops.units import in_bytes
from afflux.sim.compare import Job, Watch
from afflux.sim.config import SimConfig
from afflux.sim.result import RunResult, Spread, by_rule, summarise


@contextmanager
def progress(jobs: Sequence[Job], config: SimConfig, console: Console, done: int = 0) -> Iterator[Watch]:
    """Show one bar per rule, over all its seeds; nothing if the output is no terminal. `done`: arrivals that each job
    goes on from.
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
    labels = [job.label for job in jobs]
    total = {label: labels.count(label) * config.arrivals for label in labels}
    begun = {label: labels.count(label) * done for label in labels}
    tasks = {label: bars.add_task(label, total=count, completed=begun[label]) for label, count in total.items()}
    seen = [done] * len(jobs)

    def watch(index: int, arrivals: int) -> None:
        bars.advance(tasks[labels[index]], arrivals - seen[index])
        seen[index] = arrivals

    with bars:
        yield watch


def table(results: Sequence[RunResult], config: SimConfig) -> Table:
    """Return the summary, one column per rule; mean ± standard deviation if there are seeds."""
    goal = f"{100 * config.target:g}%"
    groups = by_rule(results)
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


def _number(value: Spread, runs: int, digits: int, scale: float = 1) -> str:
    if not value.seeds:
        return "-"
    text = f"{scale * value.mean:.{digits}f}"
    if value.seeds > 1:
        text += f" ± {scale * value.std:.{digits}f}"
    # The mean of those seeds that got there says little without how many did.
    return text if value.seeds == runs else f"{text} ({value.seeds} of {runs})"
