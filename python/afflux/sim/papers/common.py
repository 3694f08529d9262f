"""What all reproductions share: many runs under one progress bar, and a folder with Markdown and JSON."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afflux.sim import report
from afflux.sim.compare import Job, available_cpus, compare
from afflux.sim.config import SimConfig
from afflux.sim.errors import ConfigError, require
from afflux.sim.result import RunResult, Spread, spread


@dataclass(frozen=True)
class Page:
    """What one reproduction has to say."""

    name: str
    markdown: str
    content: dict[str, Any]
    """For JSON: numbers, texts, lists and dicts."""
    draw: Callable[[Path], None] | None = None
    """Writes a picture to the given path."""


def measure(jobs: Sequence[Job], processes: int | None) -> list[RunResult]:
    """Run all jobs, whose settings have as many arrivals each, in parallel; KeyboardInterrupt stops them all."""
    require("torch", "matplotlib", "rich")
    from rich.console import Console

    from afflux.sim import terminal

    config = setting(jobs[0])
    with terminal.progress(jobs, config, Console(stderr=True)) as watch:
        return compare(jobs, config, processes=processes or available_cpus(), watch=watch)


def setting(job: Job) -> SimConfig:
    """Return the job's own setting, which each job of a reproduction has."""
    if job.config is None:
        raise ConfigError(f"{job.spec.label} has no setting of its own")
    return job.config


def publish(out: Path | None, make: Callable[[], Page]) -> tuple[Page, Path]:
    """Write what `make` returns into a new folder; a folder in which nothing was written is removed again."""
    folder = report.new_folder(out)
    try:
        page = make()
        (folder / f"{page.name}.md").write_text(page.markdown, encoding="utf-8")
        text = json.dumps(page.content, indent=2, allow_nan=False) + "\n"
        (folder / f"{page.name}.json").write_text(text, encoding="utf-8")
        if page.draw is not None:
            page.draw(folder / f"{page.name}.png")
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise
    return page, folder


def accuracy(runs: Sequence[RunResult]) -> Spread:
    """Summarise the accuracy after the last arrival over seeds."""
    return spread([run.final_accuracy for run in runs])


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)) + "\n"
