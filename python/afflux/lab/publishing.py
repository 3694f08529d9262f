"""Shared by all reproductions: many runs with one progress bar, resumed after an interrupt, and a folder of results."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import isinf, isnan
from pathlib import Path
from types import MappingProxyType
from typing import Any

from afflux.lab.outcomes import Outcome, load_outcomes
from afflux.lab.results.audit_log import FOLDER as AUDIT
from afflux.lab.results.curves import COLOURS, curve
from afflux.lab.results.finished_runs import FILE, FinishedRuns, Job, all_lines, line_key, lines_of_jobs
from afflux.lab.results.run_folder import create_run_folder, locked, remove_run_files
from afflux.lab.results.run_history import JobProgress
from afflux.lab.results.run_result import Evaluated, SeedStatistics, seed_statistics
from afflux.lab.runs.compare import compare, default_processes, inputs_of_jobs
from afflux.lab.runs.library import run_in_folder
from afflux.lab.runs.workers import Workers
from afflux.ops.errors import ConfigError
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import TrainingError, errors_of_writing, require
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from afflux.sim.workload.task import Task


@dataclass(frozen=True)
class Page:
    """The result of one reproduction."""

    name: str
    markdown: str
    content: dict[str, Any]  #: numbers, texts, lists and dicts, written as JSON
    draw: Callable[[Path], None] | None = None  #: writes a figure to the given path
    results: object = None  #: what the page shows, for callers in Python


#: File of a folder with the arguments of the command that has made its page.
COMMAND = "command.json"

#: Called with the titles of runs and the most arrivals of one: a block in which `compare` calls what it yields.
Show = Callable[[Sequence[str], int], AbstractContextManager[JobProgress]]
#: Runs all jobs, which must have the same number of arrivals, and returns their outcomes in the same order.
Measure = Callable[..., list[Outcome]]


def measure(
    jobs: Sequence[Job],
    folder: Path,
    processes: int | None = None,
    at_most: int | None = None,
    workers: Workers = 1,
    task: Task | None = None,
    show: Show | None = None,
    run_folder: str = "",
) -> list[Outcome]:
    """Run the jobs that are not finished yet, in parallel; each result is written to `folder` when its run is finished.

    After a KeyboardInterrupt the next call continues.

    Args:
        jobs: the jobs.
        folder: holds the results of finished runs.
        processes: number of processes; default one per CPU, or fewer if each run has workers.
        at_most: run at most so many jobs.
        workers: processes of each run that train; see `run`.
        task: see `run`.
        show: shows the progress of the runs while they are made; default nothing.
        run_folder: the name of a run folder in `folder`, in which all files of these runs are written; default none.

    Returns:
        The outcomes, in the order of `jobs`.

    Raises:
        ConfigError: some jobs are not finished after `at_most` runs, or finished ones began with other data.
    """
    require("torch", "matplotlib")
    path, config = folder / run_folder / FILE, jobs[0].config or SimConfig()
    with ExitStack() as screen:
        watch = screen.enter_context(show([job.title for job in jobs], config.arrivals)) if show else None
        options: dict[str, Any] = {"processes": processes or default_processes(workers), "workers": workers}
        options |= {"watch": watch, "task": task}
        if run_folder:
            _remove_other_runs(path, jobs)
            with suppress(TrainingError):  # no run has a result
                run_in_folder(jobs, config, path.parent / AUDIT, **options)
        else:
            inputs = inputs_of_jobs(jobs, config, task)
            ended: dict[int, Any] = {index: [one] for index, one in load_outcomes(path, jobs, inputs).items()}
            finished = FinishedRuns(path, jobs, inputs, ended=ended)
            compare(jobs, config, finished=finished, most=at_most, **options)
            if len(finished) < len(jobs):
                raise ConfigError(f"{len(finished)} of {len(jobs)} runs have ended")
    lines = lines_of_jobs(all_lines([path]), jobs, finished=False)
    return [Outcome.of_line(lines[index]) for index in range(len(jobs))]


def _remove_other_runs(path: Path, jobs: Sequence[Job]) -> None:
    """Remove the runs from a record that are no longer those of the best settings, and their files."""
    lines = all_lines([path])
    own = {line_key(line) for line in lines_of_jobs(lines, jobs, finished=False).values()}
    if others := [line for line in lines if line_key(line) not in own]:
        text = "".join(json.dumps(line) + "\n" for line in lines if line_key(line) in own)
        path.write_text(text, encoding="utf-8")
        remove_run_files(path.parent, [Job(RuleSpec("", (), line["rule"]), line["seed"]) for line in others])


def write_page(page: Page, folder: Path) -> None:
    """Write a page into a folder: NAME.md, NAME.json and, if it has a figure, NAME.png.

    Raises:
        ConfigError: a file cannot be written.
    """
    text = json.dumps(page.content, indent=2, allow_nan=False) + "\n"
    with errors_of_writing(folder):
        (folder / f"{page.name}.md").write_text(page.markdown, encoding="utf-8")
        (folder / f"{page.name}.json").write_text(text, encoding="utf-8")
        if page.draw is not None:
            page.draw(folder / f"{page.name}.png")


def publish(
    out: Path | None, make: Callable[[Measure], Page], command: Mapping[str, Any], **options: Any
) -> tuple[Page, Path]:
    """Write the page that `make` returns into a folder.

    After an error an empty folder is removed; a folder with finished runs is named on standard error.

    Args:
        out: a new folder, or one with finished runs of the same command, perhaps with fewer seeds or rules; default a
            new one.
        make: makes the page; called with a `Measure`.
        command: what is made, as numbers, texts, lists and dicts: all that the page depends on.
        options: of `measure`.

    Returns:
        The page and the folder.

    Raises:
        ConfigError: `out` holds something else, perhaps the results of another command; see `measure`.
    """
    if out is not None and any((out / name).is_file() for name in (COMMAND, FILE)):
        folder = out
        _refuse_other_command(folder, command)
    else:
        folder = create_run_folder(out)
    try:
        with locked(folder):
            page = make(partial(measure, folder=folder, **options))
            # With the page, not before: a command that fails or is interrupted must not stop the next one.
            (folder / COMMAND).write_text(json.dumps(command, indent=2) + "\n", encoding="utf-8")
            write_page(page, folder)
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        if (folder / FILE).exists():
            print(
                f"the finished runs are in {folder}/; the same command with --out {folder} continues", file=sys.stderr
            )
        raise
    return page, folder


def _refuse_other_command(folder: Path, command: Mapping[str, Any]) -> None:
    """Raise ConfigError if the new page would lack results of the folder's page, which the new page overwrites.

    A command with more rules, values or seeds continues the earlier one.
    """
    path = folder / COMMAND
    if not path.exists():  # the folder is of a version that did not write it
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}; choose another --out") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no command; choose another --out")
    wanted = json.loads(json.dumps(command))
    if other := [name for name in {**wanted, **content} if not _extends(wanted.get(name), content.get(name))]:
        raise ConfigError(
            f"{folder} holds the results of a command with other {', '.join(other)} (see {path}); choose another --out"
        )


def _extends(new: Any, old: Any) -> bool:
    """Return whether `new` equals `old`, except for lists: those of `new` may hold more."""
    if isinstance(new, dict) and isinstance(old, dict):
        return new.keys() == old.keys() and all(_extends(new[name], old[name]) for name in old)
    if isinstance(new, list) and isinstance(old, list):
        return all(item in new for item in old)
    return bool(new == old)


def or_none(value: float) -> float | None:
    """Return a number, or None in the place of nan, which JSON does not have."""
    return None if isnan(value) else float(value)


def final_score(runs: Sequence[Outcome]) -> SeedStatistics:
    """Return the score after the last arrival over seeds."""
    return seed_statistics([run.final_score for run in runs])


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"


def draw_scores(
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[Evaluated]]]]],
    path: Path,
    metric: Metric = CLASSIFICATION[0],
    points: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> None:
    """Write a PNG with the score over the arrivals, one panel beside the other.

    Args:
        panels: the title of each, and its curves: a label and the runs of each seed. If there are more curves than
            colours, the last ones are grey.
        path: of the file.
        metric: the score.
        points: of a paper, for a curve by the panel's title, a comma and its label: arrivals and score. Beyond the
            curve's end they are drawn there.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from afflux.lab.results.figures import draw_curve, style_axes

    figure = Figure(figsize=(5.5 * len(panels), 4.7), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes)
        for index, (label, runs) in reversed(list(enumerate(curves))):  # the first on top
            named = index < len(COLOURS)
            line = curve(runs, "arrivals", metric.name)
            draw_curve(axes, line, label if named else "", index if named else None)
            for x, y in points.get(f"{title}, {label}", ()):
                colour = COLOURS[index].picture if named else "#bbbbbb"
                axes.plot(min(x, line.x[0][-1]), y, "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False)
        if metric.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(*(None if isinf(end) else end for end in metric.bounds))
        axes.set_xlabel("arrivals")
        axes.set_ylabel(metric.words if metric.is_share else metric.title(), parse_math=False)
        more = len(curves) - len(COLOURS)
        axes.set_title(title + (f" (grey: {more} more)" if more > 0 else ""), fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], fontsize=8, loc="upper right" if metric.lower_is_better else "lower right"
        )
    figure.savefig(path, dpi=120)
