"""The functions of `afflux compare`, `run` and `replay`: they make runs, and write them into a run folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from afflux.cli.common import echo, parse_rules
from afflux.ops.validation import printable
from afflux.rules import RULES
from afflux.sim import interrupts
from afflux.sim.errors import EXTRA, ProcessKilledError, require
from afflux.sim.workload.config import IMAGES, UNLIMITED, SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

if TYPE_CHECKING:
    from afflux.sim.results.audit_log import AuditOutput
    from afflux.sim.results.run_history import Progress
    from afflux.sim.results.run_result import RunResult
    from afflux.sim.results.simulation_results import SimulationResults
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.library import Simulation


def make_runs(
    specs: list[RuleSpec],
    seeds: list[int],
    config: SimConfig,
    processes: int | None,
    out: Path | None,
    keep_updates: bool,
    tensorboard: bool,
    workers: int,
    *,
    paired: bool = False,
) -> "tuple[Path, SimulationResults]":
    """Make all runs, write their results into `out`, and return the run folder and the results."""
    _require_packages(tensorboard)
    from rich.console import Console

    from afflux.sim.results.progress import show_progress
    from afflux.sim.runs.compare import default_processes
    from afflux.sim.runs.library import Simulation

    simulation = Simulation.of(config, specs, seeds, paired=paired)
    jobs = simulation.jobs
    finished: dict[int, list[RunResult]] = {}
    with _run_folder(out, jobs, config, finished, (jobs, config, keep_updates, tensorboard)) as folder:
        output = _audit_folder(folder, simulation, keep_updates, tensorboard)
        with show_progress([job.title for job in jobs], config.arrivals, Console(stderr=True)) as watch:
            results = simulation.run_into(
                output,
                processes=processes or default_processes(workers),
                workers=workers,
                watch=watch,
                finished=finished,
            )
        results.write(folder)
    return folder, results


def _require_packages(tensorboard: bool) -> None:
    require(*EXTRA)
    if tensorboard:
        from afflux.sim.results.tensorboard import require_tensorboard

        require_tensorboard()


def tune_rules(
    specs: list[RuleSpec],
    grid: list[str],
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
            lambda measure: grid_page(run_grid(specs, axes, seeds, config, measure)),
            command(specs, axes, seeds, config),
            processes=jobs,
            workers=workers,
        )
    echo(page.markdown)
    echo(f"wrote {folder}/")


def _audit_folder(folder: Path, simulation: "Simulation", keep_updates: bool, tensorboard: bool) -> "AuditOutput":
    from afflux.sim.results import run_folder

    d = simulation.num_parameters() if keep_updates and simulation.config.task != IMAGES else None
    announce = partial(echo, err=True)
    runs = len(simulation.jobs)
    output = run_folder.create_audit_folder(folder, simulation.config, runs, keep_updates, announce, d)
    return _with_event_files(output, tensorboard)


def _with_event_files(output: "AuditOutput", tensorboard: bool) -> "AuditOutput":
    from afflux.sim.results.tensorboard import FOLDER

    return output._replace(tensorboard=output.folder.parent / FOLDER) if tensorboard else output


def run_in_new_store(
    store: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    seconds: float,
    out: Path | None,
    keep_updates: bool,
    tensorboard: bool,
    workers: int,
) -> None:
    """Make one run whose server is kept in a new store, write its results into `out`, and print them."""
    _require_packages(tensorboard)
    from afflux.sim.runs.library import Simulation
    from afflux.sim.runs.resume import run_in_store
    from afflux.sim.runs.run_checkpoint import require_unused_store

    require_unused_store(store)
    simulation = Simulation.of(config, [spec], [seed])
    (job,) = simulation.jobs
    with _run_folder(out, [job], config, {}) as folder:
        output = _audit_folder(folder, simulation, keep_updates, tensorboard)
        work = partial(run_in_store, store, spec, seed, config, output, seconds=seconds, workers=workers)
        _run_with_store(store, folder, job, config, work)


def resume_run(
    store: Path,
    seconds: float,
    out: Path | None,
    typed: RuleSpec | None,
    task: str | None,
    tensorboard: bool,
    workers: int,
) -> None:
    """Continue the run in `store` in its run folder, or in `out` if the folder has moved, and print its results."""
    _require_packages(tensorboard)
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.resume import resume
    from afflux.sim.runs.run_checkpoint import InterruptedRun

    interrupted = InterruptedRun.of(store, out, typed, task)
    if interrupted.finished:
        echo(f"the run in {store} is finished; its results are written again", err=True)
    job, folder = Job(interrupted.spec, interrupted.header.seed), interrupted.output.folder.parent
    interrupted = replace(interrupted, output=_with_event_files(interrupted.output, tensorboard))
    work = partial(resume, interrupted, seconds=seconds, workers=workers)
    _run_with_store(store, folder, job, interrupted.config, work)


def _run_with_store(
    store: Path,
    folder: Path,
    job: "Job",
    config: SimConfig,
    work: "Callable[[Progress], RunResult]",
) -> None:
    from rich.console import Console

    from afflux.sim.results import run_folder
    from afflux.sim.results.progress import show_progress

    try:
        with (
            interrupts.deferred(),
            interrupts.sigterm_as_interrupt(),
            show_progress([job.title], config.arrivals, Console(stderr=True)) as watch,
        ):
            results = [work(partial(watch, 0))]
    except KeyboardInterrupt:
        spec = job.spec
        again = "" if spec.name in RULES else f" --rule {quote(spec.text)}"
        again += f" --task {quote(config.task)}" if ".py" in config.task else ""
        echo(f"continue with: afflux run --resume {store}{again}", err=True)
        raise
    run_folder.write_results(folder, results, config)
    print_results(folder, results, config)


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
    from rich.console import Console

    from afflux.sim.results import audit_log, run_folder
    from afflux.sim.results.progress import show_progress
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.replay import replay, replay_config

    log = audit_log.read_audit_log(path)
    specs = parse_rules(rules, **common) if rules else [log.spec()]
    config = replay_config(log, data_dir, task)
    if (missing := log.planned - config.arrivals) > 0:
        lacks = f": it lacks {missing} of {log.planned} arrivals" if log.planned < UNLIMITED else ""
        echo(f"{path} was cut off{lacks}", err=True)
    jobs = [Job(specs[0], log.header.seed, tuple(specs[1:]))]
    with _run_folder(out, jobs, config, {}) as folder:
        output = run_folder.create_audit_folder(folder, config, 1)
        with show_progress([job.title for job in jobs], config.arrivals, Console(stderr=True)) as watch:
            results = replay(log, specs, config, partial(watch, 0), output.folder)
        run_folder.write_results(folder, results, config)
    print_results(folder, results, config)
    for result in results:
        same = ", as in the log" if log.end is not None and result.digest == log.end.params_sha256 else ""
        echo(f"params of {result.spec.label}: sha256 {result.digest}{same}")
    if not rules and log.end is not None and results[0].digest != log.end.params_sha256:
        echo(f"error: the log says {log.end.params_sha256}: the rule or the software has changed", err=True)
        raise typer.Exit(1)


@contextmanager
def _run_folder(
    out: Path | None,
    jobs: "list[Job]",
    config: SimConfig,
    finished: "dict[int, list[RunResult]]",
    command: object = None,
) -> Iterator[Path]:
    """Create the run folder, see `new_run_folder`; after an error, print what it holds and how to continue."""
    from afflux.sim.results import run_folder

    folder = None
    try:
        with run_folder.new_run_folder(out, config, finished, command) as folder:
            yield folder
    except BaseException as error:
        if folder is not None and folder.exists():
            then = ""
            if command is not None and finished and isinstance(error, ProcessKilledError):
                then = "; the same command replaces it"
            elif command is not None and not finished:
                then = f"; the next command with --out {quote(str(folder))} replaces it"
            elif command is not None and len(finished) < len(jobs):
                then = "; make the other runs with another --out"
            echo(f"{len(finished)} of {len(jobs)} runs were finished; kept {folder}/{then}", err=True)
        raise


def print_results(folder: Path, results: "Sequence[RunResult]", config: SimConfig) -> None:
    """Print the settings, the table of results and the name of the run folder."""
    from rich.console import Console

    from afflux.sim.results import run_folder, summary_table

    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=200)
    screen.print(run_folder.describe_setting(config, results), highlight=False)
    screen.print(summary_table.results_table(results, config))
    screen.print(printable(f"wrote {folder}/"), highlight=False, markup=False, soft_wrap=True)
