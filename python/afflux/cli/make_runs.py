"""The functions of `afflux compare`, `run` and `replay`: they make runs, show their progress and print results."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from afflux.cli.common import echo, parse_rules
from afflux.ops.validation import printable
from afflux.sim import interrupts
from afflux.sim.errors import EXTRA, ConfigError, require
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

if TYPE_CHECKING:
    from afflux.sim.results.run_history import JobProgress
    from afflux.sim.results.simulation_results import SimulationResults


def make_runs(
    specs: list[RuleSpec],
    seeds: list[int],
    config: SimConfig,
    out: Path | None,
    *,
    paired: bool = False,
    **options: Any,
) -> "tuple[Path, SimulationResults]":
    """Make all runs into `out`, with `options` of `Simulation.run`; return the run folder and the results."""
    require(*EXTRA)
    from afflux.sim.runs.library import Simulation

    simulation, folder = Simulation.of(config, specs, seeds, paired=paired), new_folder(out)
    titles = [job.title for job in simulation.jobs]
    return folder, _watched(titles, config, lambda watch: simulation.run(out=folder, watch=watch, **options))


def new_folder(out: Path | None) -> Path:
    """Return the run folder: `out`, or runs/<date and time>."""
    return out or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def _watched(
    titles: list[str], config: SimConfig, work: "Callable[[JobProgress], SimulationResults]"
) -> "SimulationResults":
    """Return the result of `work`, while its progress is shown."""
    from rich.console import Console

    from afflux.sim.results.progress import show_progress

    with show_progress(titles, config.arrivals, Console(stderr=True)) as watch:
        return work(watch)


def tune_rules(
    specs: list[RuleSpec],
    grid: list[str],
    trials: int,
    seeds: list[int],
    config: SimConfig,
    jobs: int | None,
    workers: int,
    out: Path | None,
) -> None:
    """Run a grid of settings into `out`, and print its page."""
    require(*EXTRA)
    from afflux.sim.papers.grid import command, grid_page, parse_grid, run_grid
    from afflux.sim.papers.publishing import publish

    axes = parse_grid(grid)
    with interrupts.deferred():
        page, folder = publish(
            out,
            lambda measure: grid_page(run_grid(specs, axes, seeds, config, measure, trials)),
            command(specs, axes, seeds, config, trials),
            processes=jobs,
            workers=workers,
        )
    echo(page.markdown)
    echo(f"wrote {folder}/")


def resume_run(store: Path, out: Path | None, typed: RuleSpec | None, task: str | None, **options: Any) -> None:
    """Continue the run in `store` in its run folder, or in `out` if the folder has moved, and print its results."""
    require(*EXTRA)
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.library import resume
    from afflux.sim.runs.run_checkpoint import InterruptedRun

    run = InterruptedRun.of(store, out, typed, task)
    title = Job(run.spec, run.header.seed).title
    results = _watched([title], run.config, lambda watch: resume(run, watch=watch, **options))
    print_results(run.output.folder.parent, results)


def replay_log(
    path: Path,
    rules: list[str] | None,
    common: dict[str, Any],
    data_dir: str | None,
    task: str | None,
    out: Path | None,
) -> None:
    """Replay an audit log with its own rule, or with others, write the results into `out`, and print them."""
    require(*EXTRA)
    from afflux.sim.results.audit_log import read_audit_log
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.library import replay

    if not rules and any(value is not None for value in common.values()):
        raise ConfigError("--buffer-size and --server-lr are options of the rules that --rule names; give --rule")
    log, folder = read_audit_log(path), new_folder(out)
    specs = parse_rules(rules, **common) if rules else [log.spec()]
    title = Job(specs[0], log.header.seed, tuple(specs[1:])).title
    config = log.header.settings(path)
    results = _watched(
        [title], config, lambda watch: replay(log, specs, data_dir=data_dir, task=task, out=folder, watch=watch)
    )
    print_results(folder, results)
    for result in results:
        same = ", as in the log" if log.end is not None and result.digest == log.end.params_sha256 else ""
        echo(f"params of {result.spec.label}: sha256 {result.digest}{same}")
    if not rules and log.end is not None and results[0].digest != log.end.params_sha256:
        echo(f"error: the log says {log.end.params_sha256}: the rule or the software has changed", err=True)
        raise typer.Exit(1)


def print_results(folder: Path, results: "SimulationResults") -> None:
    """Print the settings, the table of results and the name of the run folder."""
    from rich.console import Console

    from afflux.sim.results import run_folder, summary_table

    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=200)
    screen.print(run_folder.describe_setting(results.config, results), highlight=False)
    screen.print(summary_table.results_table(results, results.config))
    screen.print(printable(f"wrote {folder}/"), highlight=False, markup=False, soft_wrap=True)
