"""What all reproductions share: many runs under one progress bar, which an interrupt does not lose, and a folder with
Markdown and JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from afflux.sim.errors import ConfigError, require
from afflux.sim.papers.finished_runs import FILE, Finished, Outcome, load
from afflux.sim.results import run_folder
from afflux.sim.results.run_result import Spread, spread
from afflux.sim.runs.compare import Job, available_cpus, compare
from afflux.sim.workload.config import SimConfig


@dataclass(frozen=True)
class Page:
    """What one reproduction has to say."""

    name: str
    markdown: str
    content: dict[str, Any]
    """For JSON: numbers, texts, lists and dicts."""
    draw: Callable[[Path], None] | None = None
    """Writes a picture to the given path."""


Measure = Callable[[Sequence[Job]], list[Outcome]]
"""Runs all jobs, whose settings have as many arrivals each, and returns their outcomes in the same order."""


def measure(
    jobs: Sequence[Job], folder: Path, processes: int | None = None, at_most: int | None = None
) -> list[Outcome]:
    """Run the jobs that have not ended yet, in parallel; `folder` keeps each one that ends.

    KeyboardInterrupt stops all of them, and the next call goes on.

    Raises:
        ConfigError: `at_most` runs were not enough.
    """
    require("torch", "matplotlib", "rich")
    from rich.console import Console

    from afflux.sim.results import terminal_output

    ended = load(folder / FILE, jobs)
    wanted = [job for index, job in enumerate(jobs) if index not in ended][:at_most]
    if wanted:
        config = setting(wanted[0])
        finished = Finished(folder / FILE, wanted)
        with terminal_output.progress([job.label for job in wanted], config.arrivals, Console(stderr=True)) as watch:
            compare(wanted, config, processes=processes or available_cpus(), watch=watch, finished=finished)
        ended = load(folder / FILE, jobs)
    if len(ended) < len(jobs):
        raise ConfigError(f"{len(ended)} of {len(jobs)} runs have ended")
    return [ended[index] for index in range(len(jobs))]


def setting(job: Job) -> SimConfig:
    """Return the job's own setting, which each job of a reproduction has."""
    if job.config is None:
        raise ConfigError(f"{job.spec.label} has no setting of its own")
    return job.config


def publish(
    out: Path | None, make: Callable[[Measure], Page], processes: int | None = None, at_most: int | None = None
) -> tuple[Page, Path]:
    """Write what `make` returns into a folder: a new one, or one in which runs have ended before.

    A folder in which nothing was written is removed again; what an interrupt leaves in it is named on standard error.
    """
    folder = out if out is not None and (out / FILE).is_file() else run_folder.new_folder(out)
    try:
        page = make(partial(measure, folder=folder, processes=processes, at_most=at_most))
        (folder / f"{page.name}.md").write_text(page.markdown, encoding="utf-8")
        text = json.dumps(page.content, indent=2, allow_nan=False) + "\n"
        (folder / f"{page.name}.json").write_text(text, encoding="utf-8")
        if page.draw is not None:
            page.draw(folder / f"{page.name}.png")
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        if folder.exists():
            print(f"what has ended is in {folder}/; the same command with --out {folder} goes on", file=sys.stderr)
        raise
    return page, folder


def accuracy(runs: Sequence[Outcome]) -> Spread:
    """Summarise the accuracy after the last arrival over seeds."""
    return spread([run.final_accuracy for run in runs])


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"
