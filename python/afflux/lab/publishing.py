"""Shared by all reproductions: many runs with one progress bar, resumed after an interrupt, and a folder of results."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

from afflux.lab.outcomes import Outcome, load_outcomes
from afflux.lab.results.audit_log import FOLDER as AUDIT
from afflux.lab.results.finished_runs import FILE, FinishedRuns, Job, all_lines, line_key, lines_of_jobs
from afflux.lab.results.run_folder import create_run_folder, locked, remove_run_files, usable_path
from afflux.lab.results.run_history import JobProgress
from afflux.lab.results.run_result import SeedStatistics, seed_statistics
from afflux.lab.runs.compare import compare, default_processes, inputs_of_jobs
from afflux.lab.runs.library import run_in_folder
from afflux.lab.runs.workers import Workers
from afflux.ops.errors import ConfigError
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import TrainingError, errors_of_writing, require
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.task import Task


@dataclass(frozen=True)
class Page:
    """The result of one reproduction."""

    name: str
    markdown: str
    content: dict[str, Any]  #: numbers, texts, lists and dicts, written as JSON
    draw: Callable[[Path], None] | None = None  #: writes a figure to the given path
    results: object = None  #: what the page shows, for callers in Python


#: File of a folder with the parts of the command that has made its page.
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
    out: Path | None, make: Callable[[Measure], Page], command: Sequence[str], **options: Any
) -> tuple[Page, Path]:
    """Write the page that `make` returns into a folder.

    After an error an empty folder is removed; a note of the error names a folder with finished runs.

    Args:
        out: a new folder, or one with finished runs of the same command, perhaps with fewer seeds or rules; default a
            new one.
        make: makes the page; called with a `Measure`.
        command: all parts of which the page is made; a later command may have more.
        options: of `measure`.

    Returns:
        The page and the folder.

    Raises:
        ConfigError: `out` holds something else, perhaps the results of another command; see `measure`.
    """
    if out is not None and any((usable_path(out) / name).is_file() for name in (COMMAND, FILE)):
        folder = out
        _refuse_other_command(folder / COMMAND, command)
    else:
        folder = create_run_folder(out)
    try:
        with locked(folder):
            page = make(partial(measure, folder=folder, **options))
            # With the page, not before: a command that fails or is interrupted must not stop the next one.
            (folder / COMMAND).write_text(json.dumps([*command], indent=2) + "\n", encoding="utf-8")
            write_page(page, folder)
    except BaseException as error:
        with suppress(OSError):
            folder.rmdir()
        if (folder / FILE).exists():
            error.add_note(f"the finished runs are in {folder}/; the same command with --out {folder} continues")
        raise
    return page, folder


def _refuse_other_command(path: Path, command: Sequence[str]) -> None:
    """Raise ConfigError if the new page would lack results of the page of a file's command, which it overwrites."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}; choose another --out") from None
    if isinstance(earlier, list) and not all(part in command for part in earlier):  # an older afflux wrote a dict
        raise ConfigError(f"{path.parent} holds the results of another command; choose another --out")


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
