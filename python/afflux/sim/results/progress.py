"""Live progress of runs: bars by rich on a terminal, otherwise lines at growing intervals."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from afflux.sim.results.run_progress import JobProgress, RunProgress
from afflux.sim.workload.config import UNLIMITED

#: Up to this number of runs, each finished run keeps its bar; of more runs, only the active ones have a bar.
MOST_BARS = 12
#: Seconds between two updates of a bar.
BAR_SECONDS = 0.1
#: Seconds before the first line if the output is not a terminal; the interval doubles up to LINE_SECONDS.
FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 60.0


class TimeLeft:
    """An estimate of the seconds until a run ends, from its pace since `now`, when the share `done` was finished."""

    def __init__(self, now: float, done: float) -> None:
        self._began, self._done_before = now, done

    def seconds(self, now: float, done: float) -> float:
        """Return the estimate; nan before there is one."""
        gained = done - self._done_before
        return max(now - self._began, 0.0) * (1 - done) / gained if gained > 0 else math.nan


@contextmanager
def show_progress(
    titles: Sequence[str], arrivals: int, console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[JobProgress]:
    """Show arrivals, accuracy, staleness and the time left of each run.

    Args:
        titles: one for each run.
        arrivals: of each run, at most; UNLIMITED if it ends otherwise.
        console: the output: bars on a terminal, else a line after 10, 30 and 70 seconds, then every minute.
        clock: seconds, for the estimates.

    Yields:
        A function to call with (index of the run, its progress).
    """
    if console.is_interactive:  # a terminal that can move its cursor
        display = _Bars(titles, arrivals, console, clock)
        with display.bars:
            yield display.watch
    else:
        yield _Lines(titles, arrivals, console, clock).watch


class _LeftColumn(ProgressColumn):
    """The time left, as `TimeLeft` estimates it."""

    def render(self, task: Task) -> Text:
        return Text(format_seconds(task.fields["left"]), style="progress.remaining")


class _Bars:
    """A bar for each active run, and one for all runs."""

    def __init__(self, titles: Sequence[str], arrivals: int, console: Console, clock: Callable[[], float]) -> None:
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            _LeftColumn(),
            console=console,
        )
        self._arrivals, self._clock = arrivals, clock
        self._latest: list[RunProgress | None] = [None] * len(titles)
        self._shown = [-math.inf] * len(titles)
        # The pace of a run counts from its first arrival here: it may have waited for other runs, or be a resumed run.
        self._left: list[TimeLeft | None] = [None] * len(titles)
        self._all_left = TimeLeft(clock(), 0.0)
        self._all = self._add("all runs", visible=len(titles) > 1)
        self._tasks = [self._add(title, visible=len(titles) == 1) for title in titles]

    def _add(self, title: str, visible: bool) -> TaskID:
        return self.bars.add_task(title, total=1.0, visible=visible, facts="", left=math.nan)

    def watch(self, index: int, run: RunProgress) -> None:
        """Show the progress of a run."""
        now, earlier = self._clock(), self._latest[index]
        if not _is_news(run, earlier) or (now - self._shown[index] < BAR_SECONDS and not run.finished):
            return
        self._latest[index], self._shown[index] = run, now
        left = self._left[index] = self._left[index] or TimeLeft(now, _known(run.done))
        self.bars.update(
            self._tasks[index],
            total=None if math.isnan(run.done) else 1.0,
            completed=_known(run.done),
            visible=not run.finished or len(self._tasks) <= MOST_BARS,
            facts=describe(run, self._arrivals),
            left=0.0 if run.finished else left.seconds(now, run.done),
            refresh=earlier is None,  # shows where a resumed run begins, even if it ends at once
        )
        begun = [one for one in self._latest if one is not None]
        share = sum(_known(one.done) for one in begun) / len(self._latest)
        self.bars.update(
            self._all,
            completed=share,
            facts=f"{sum(one.finished for one in begun)} of {len(self._latest)} finished",
            left=self._all_left.seconds(now, share),
        )


class _Lines:
    """A line for the run that has progressed, after FIRST_LINE_SECONDS and then at intervals up to LINE_SECONDS."""

    def __init__(self, titles: Sequence[str], arrivals: int, console: Console, clock: Callable[[], float]) -> None:
        self._titles, self._arrivals, self._console, self._clock = titles, arrivals, console, clock
        self._interval = FIRST_LINE_SECONDS
        self._due = clock() + self._interval
        self._left: list[TimeLeft | None] = [None] * len(titles)
        self._finished: set[int] = set()

    def watch(self, index: int, run: RunProgress) -> None:
        """Print the progress of a run, if a line is due."""
        if not _is_news(run, None):
            return
        now = self._clock()
        left = self._left[index] = self._left[index] or TimeLeft(now, _known(run.done))
        if run.finished:
            self._finished.add(index)
        if now < self._due:
            return
        self._interval = min(2 * self._interval, LINE_SECONDS)
        self._due = now + self._interval
        remains = "" if run.finished else format_seconds(left.seconds(now, run.done))
        text = f"{self._titles[index]}: {describe(run, self._arrivals)}{f', {remains} left' if remains else ''}"
        if len(self._titles) > 1:
            text += f"; {len(self._finished)} of {len(self._titles)} runs finished"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _is_news(run: RunProgress, earlier: RunProgress | None) -> bool:
    """Return whether the run has progressed.

    A run in another process is polled, and may not have begun.
    """
    if earlier is None:
        return run.arrivals > 0
    return run.arrivals > earlier.arrivals or run.finished > earlier.finished


def describe(run: RunProgress, arrivals: int) -> str:
    """Return the facts of a run in one line.

    >>> describe(RunProgress(12, 4, 3.5, 0.8125, 2.25, 0.5), 24)
    '12/24 arrivals, accuracy 81.2%, staleness 2.2'
    """
    count = f"{run.arrivals}/{arrivals}" if arrivals < UNLIMITED else f"{run.arrivals}"
    accuracy = "" if math.isnan(run.accuracy) else f", accuracy {run.accuracy:.1%}"
    staleness = "" if math.isnan(run.mean_staleness) else f", staleness {run.mean_staleness:.1f}"
    return f"{count} arrivals{accuracy}{staleness}"


def format_seconds(seconds: float) -> str:
    """Return a duration; nothing if it is not known.

    >>> format_seconds(75.2), format_seconds(7325), format_seconds(float("nan"))
    ('1:16', '2:02:05', '')
    """
    if not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _known(done: float) -> float:
    return 0.0 if math.isnan(done) else min(done, 1.0)
