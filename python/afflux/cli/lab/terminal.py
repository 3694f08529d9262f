"""What a terminal shows, by rich: the live progress of runs, and the table of results."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from afflux.lab.results.finished_runs import FailedRun
from afflux.lab.results.run_history import JobProgress, RunProgress
from afflux.lab.results.run_result import RunResult, group_by_rule
from afflux.lab.results.statistics import score_of, shown_target, summary_rows
from afflux.sim.workload.config import UNLIMITED, SimConfig
from afflux.sim.workload.evaluation import Metric

#: Up to this number of runs, each finished run keeps its bar; of more runs, only the active ones have a bar.
MOST_BARS = 12
#: Seconds between two updates of a bar.
BAR_SECONDS = 0.1
#: Seconds before the first line if the output is not a terminal; the interval doubles up to LINE_SECONDS.
FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 60.0
WIDTH_OF_FILES = 200  #: columns of an output that is not a terminal


def open_console(*, stderr: bool = False) -> Console:
    """Return the console to which all commands print: text is text, without markup, emoji and highlights."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    return console


@contextmanager
def show_progress(
    titles: Sequence[str],
    arrivals: int,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[JobProgress]:
    """Show arrivals, score, staleness and the time left of each run.

    Args:
        titles: one for each run.
        arrivals: of each run, at most; UNLIMITED if it ends otherwise.
        console: the output, default standard error: bars on a terminal, else a line after 10, 30 and 70 seconds, then
            every minute. The line has the runs that go on and had an arrival since the line before, and the number of
            finished ones.
        clock: seconds, for the estimates.

    Yields:
        A function to call with (index of the run, its progress).
    """
    console = console or open_console(stderr=True)
    live = console.is_interactive  # a terminal that can move its cursor
    left = TimeRemainingColumn(compact=True)
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}", markup=False),
        left,
        console=console,
        get_time=clock,
        speed_estimate_period=math.inf,  # a run may have an arrival in a minute
        disable=not live,
    )
    count = len(titles)
    everything = bars.add_task("all runs", total=count, visible=count > 1, facts="")
    tasks = [bars.add_task(title, total=1.0, visible=count == 1, facts="") for title in titles]
    shares, updated = [0.0] * count, [-math.inf] * count
    interval, due = FIRST_LINE_SECONDS, clock() + FIRST_LINE_SECONDS
    arrivals_of: dict[int, int] = {}
    news: dict[int, RunProgress] = {}  # of the runs with an arrival since the last line

    def watch(index: int, run: RunProgress) -> None:
        nonlocal interval, due
        now, first = clock(), updated[index] == -math.inf
        if not run.arrivals and not run.finished:  # a run in another process is polled, and may not have begun
            return
        if now - updated[index] >= BAR_SECONDS or (run.finished and shares[index] < 1):
            updated[index], shares[index] = now, 0.0 if math.isnan(run.done) else min(run.done, 1.0)
            shown = not run.finished or count <= MOST_BARS
            # The first one is drawn at once: it shows where a resumed run begins, even if it ends soon.
            facts = describe(run, arrivals) if run.arrivals else ""
            bars.update(tasks[index], completed=shares[index], visible=shown, facts=facts, refresh=first)
            bars.update(everything, completed=sum(shares), facts=f"{_ended(shares)} of {count} finished")
        if live:
            return
        if arrivals_of.get(index) != run.arrivals:
            arrivals_of[index], news[index] = run.arrivals, run
        if now >= due:
            interval = min(2 * interval, LINE_SECONDS)
            due = now + interval
            bars.update(everything, completed=sum(shares))
            task = bars.tasks[everything]
            time_left = f", {left.render(task)} left" if task.time_remaining else ""
            lines = [f"{titles[k]}: {describe(row, arrivals)}" for k, row in sorted(news.items()) if not row.finished]
            text = "; ".join([f"{_ended(shares)} of {count} runs finished{time_left}", *lines])
            console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
            news.clear()

    with bars:
        yield watch


def describe(run: RunProgress, arrivals: int) -> str:
    """Return the facts of a run in one line.

    >>> describe(RunProgress(12, 4, 3.5, 0.8125, 2.25, 0.5), 24)
    '12/24 arrivals, accuracy 81.2%, staleness 2.2'
    """
    count = f"{run.arrivals}/{arrivals}" if arrivals < UNLIMITED else f"{run.arrivals}"
    metric = Metric(run.metric, run.unit).shown([run.score])
    score = "" if math.isnan(run.score) else f", {metric.words} {metric.text(run.score, '.1f')}"
    staleness = "" if math.isnan(run.mean_staleness) else f", staleness {run.mean_staleness:.1f}"
    return f"{count} arrivals{score}{staleness}"


def _ended(shares: Sequence[float]) -> int:
    return sum(share >= 1 for share in shares)


def results_table(results: Sequence[RunResult], config: SimConfig, failures: Sequence[FailedRun] = ()) -> Table:
    """Return the main numbers of the summary, one row per rule: many rules fit a terminal of 80 columns."""
    rows = dict(summary_rows(results, config.target, brief=True, failures=failures))
    metric, goal = score_of(results), shown_target(results, config.target)
    columns = {metric.title("final {}"): metric.title("final\n{}")}
    if goal is not None:
        columns |= {f"{time} to {(to := metric.text(goal))}": f"{time}\nto {to}" for time in ("rounds", "virtual time")}
    columns["server state"] = "server\nstate"
    columns |= {"faulty arrivals": "faulty\narrivals"} if "faulty arrivals" in rows else {}
    headers = [Column(header, justify="right", no_wrap=True) for header in columns.values()]
    shown = Table(Column("\nrule", overflow="fold"), *headers, box=SIMPLE_HEAD)
    for index, label in enumerate(group_by_rule(results)):
        shown.add_row(label, *(rows[title][index] for title in columns))
    return shown
