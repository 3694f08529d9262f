"""`afflux compare`, `run` and `replay`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import (
    BufferSize,
    OutFolder,
    Paper,
    Processes,
    ServerLr,
    is_on_command_line,
    parse_rules,
    parse_seeds,
    refuse_other_options,
    report_errors,
    rule_of_preset,
    split_rules,
    with_config_options,
)
from afflux.rules import RULES
from afflux.sim import interrupts
from afflux.sim.errors import EXTRA, ConfigError, require
from afflux.sim.workload.config import IMAGES, UNLIMITED, SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

if TYPE_CHECKING:
    from afflux.sim.results.audit_log import AuditOutput
    from afflux.sim.results.run_progress import Progress
    from afflux.sim.results.run_result import RunResult
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.library import Simulation

COMPARE_HELP = f"""Compare aggregation rules in one simulation.

With one seed every rule sees the same clients, delays and batches. \
A rule is written NAME or NAME:OPTION=VALUE:OPTION=VALUE; `afflux rules` explains each. \
NAME may be path/to/file.py:FUNCTION: that file is executed, as your own code.

[bold]Rules[/bold]  {", ".join(RULES)}

[bold]Examples[/bold]

  afflux compare --rules fedbuff,fedasync,ca2fl --data digits

  afflux compare --rules 'fedbuff,fedbuff:staleness=hinge(10,4)' --seeds 0,1,2

  afflux compare --rules fedbuff,ca2fl --model logreg --alpha 0.3

  afflux compare --rules fedbuff,wkafl,fadas --paired

  afflux compare --rules fedbuff,fadas --grid client_lr=.01,.1,1 --grid server_lr=.1,1 --seeds 0,1,2 --out runs/tuned

  afflux compare --rules fedbuff,ca2fl --task my_tasks.py:function --rounds 200
"""
RUN_HELP = """Simulate one aggregation rule with one seed.

[bold]Examples[/bold]

  afflux run --rule fedbuff

  afflux run --rule fedasync:alpha=0.3 --delays fadas-mild --seed 7 --out runs/mild

  afflux run --rule mf_ca2fl:bits=2:codec=rotated

  afflux run --paper ca2fl-cnn --data-dir ~/data --rounds 100

  afflux run --rule fedbuff --keep-updates --out runs/kept

  afflux run --rule ca2fl --store runs/ca2fl.store

  afflux run --resume runs/ca2fl.store
"""
REPLAY_HELP = """Replay the kept updates of a run with other rules.

LOG is an audit log, audit/RULE-seedK.jsonl in the folder of a run with --keep-updates. \
A client that was dispatched after k arrivals pulls each rule's version as of k arrivals, so staleness is each rule's \
own; but it trained from the model of the log's rule. Only the aggregation differs. \
The log's own rule gives the log's own params, bit for bit. \
A log never makes a rule file run: name it with --rule if you trust that file.

[bold]Examples[/bold]

  afflux replay runs/kept/audit/fedbuff-seed0.jsonl

  afflux replay runs/kept/audit/fedbuff-seed0.jsonl --rule ca2fl --rule fadas:server_lr=0.01
"""
PAIRED = (
    "All rules get the same updates: clients train from the params of the first rule. Shows what the aggregation alone "
    "does with these updates, not how clients would learn under the other rules."
)
KEEP_UPDATES = "Keep all update vectors beside the audit log, 4 d bytes each, for `afflux replay`."
RULE = "The rule; options follow it after colons: mf_ca2fl:bits=2:server_lr=1."
STORE = "New folder in which the server is kept, with all that --resume needs to continue an interrupted run."
RESUME = (
    "Continue an interrupted run in its run folder (give --out if that has moved), to the same bits. "
    "A rule file is executed only if you name it again: --rule FILE.py:FUNCTION."
)
CHECKPOINT_EVERY = "With --store: seconds between two checkpoints; 0: after every event. Also on Ctrl-C and SIGTERM."

TENSORBOARD = (
    "Write TensorBoard's event files into the run folder while the run goes on; needs the package tensorboard."
)
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD)]
GRID = (
    "NAME=VALUE,VALUE,...: a setting such as client_lr, an option of the rules that have it such as server_lr, or "
    "RULE.OPTION; may be given several times. Each rule is run with all combinations and the first seed on a "
    "validation part, and its best one then with all seeds on the test part. The same command with --out continues."
)
WORKERS = (
    "Processes of each run that train, with the same bits; 1: that of the run itself. Trainings that are known and not "
    "yet needed are made beside the server's work."
)
WorkerCount = Annotated[int, typer.Option("--workers", min=1, help=WORKERS)]
KeepUpdates = Annotated[bool, typer.Option("--keep-updates", help=KEEP_UPDATES)]


@with_config_options
def compare(
    config: SimConfig,
    rules: Annotated[str, typer.Option(help="Separated by commas.")] = "fedbuff,fedasync,ca2fl",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    paired: Annotated[bool, typer.Option("--paired", help=PAIRED)] = False,
    jobs: Processes = None,
    workers: WorkerCount = 1,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    keep_updates: KeepUpdates = False,
    tensorboard: TensorBoard = False,
    grid: Annotated[list[str] | None, typer.Option(help=GRID)] = None,
    out: OutFolder = None,
) -> None:
    """Compare rules (see COMPARE_HELP)."""
    specs = parse_rules(split_rules(rules), buffer_size=buffer_size, server_lr=server_lr)
    if grid:
        if paired or keep_updates or tensorboard or workers > 1:
            others = "--paired, --keep-updates, --tensorboard and --workers"
            raise ConfigError(f"--grid makes runs of their own: it goes without {others}")
        _tune(specs, grid, parse_seeds(seeds), config, jobs, out)
        return
    _simulate(specs, parse_seeds(seeds), config, jobs, out, keep_updates, tensorboard, workers, paired=paired)


@with_config_options
def run(
    config: SimConfig,
    context: typer.Context,
    rule: Annotated[str | None, typer.Option(help=RULE)] = None,
    paper: Paper = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    workers: WorkerCount = 1,
    keep_updates: KeepUpdates = False,
    tensorboard: TensorBoard = False,
    store: Annotated[Path | None, typer.Option(help=STORE)] = None,
    resume: Annotated[Path | None, typer.Option(help=RESUME)] = None,
    checkpoint_every: Annotated[float, typer.Option(min=0, help=CHECKPOINT_EVERY)] = 10.0,
    out: OutFolder = None,
) -> None:
    """Simulate one rule (see RUN_HELP)."""
    if resume is not None:
        refuse_other_options(
            context, "--resume", "resume", "checkpoint_every", "out", "rule", "task", "tensorboard", "workers"
        )
        task = config.task if is_on_command_line(context, "task") else None
        _resume(
            resume, checkpoint_every, out, None if rule is None else parse_rules([rule])[0], task, tensorboard, workers
        )
        return
    if store is None and is_on_command_line(context, "checkpoint_every"):
        raise ConfigError("--checkpoint-every was given, but without --store there are no checkpoints")
    if paper is not None:
        rule, buffer_size, server_lr = rule_of_preset(paper, rule, buffer_size, server_lr)
    if rule is None:
        raise ConfigError("give --rule or --paper, or --resume to continue a run")
    specs = parse_rules([rule], buffer_size=buffer_size, server_lr=server_lr)
    if store is None:
        _simulate(specs, [seed], config, 1, out, keep_updates, tensorboard, workers)
    else:
        _start_in_store(store, specs[0], seed, config, checkpoint_every, out, keep_updates, tensorboard, workers)


def replay(
    log: Annotated[Path, typer.Argument(help="The audit log.")],
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule; may be given several times; default: the log's own.")
    ] = None,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of mnist.npz, if it is not the log's.")] = None,
    task: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION of the log's task, if it is in a file.")] = None,
    out: OutFolder = None,
) -> None:
    """Replay kept updates (see REPLAY_HELP)."""
    with report_errors():
        _replay(log, rule, {"buffer_size": buffer_size, "server_lr": server_lr}, data_dir, task, out)


def _simulate(
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
) -> None:
    _require(tensorboard)
    from rich.console import Console

    from afflux.sim.results.progress import show_progress
    from afflux.sim.runs.compare import available_cpus
    from afflux.sim.runs.library import Simulation

    simulation = Simulation.of(config, specs, seeds, paired=paired)
    jobs = simulation.jobs
    finished: dict[int, list[RunResult]] = {}
    with _run_folder(out, jobs, config, finished) as folder:
        output = _audit_folder(folder, simulation, keep_updates, tensorboard)
        with show_progress([job.title for job in jobs], config.arrivals, Console(stderr=True)) as watch:
            results = simulation.run_into(
                output,
                processes=processes or max(1, available_cpus() // workers),
                workers=workers,
                watch=watch,
                finished=finished,
            )
        results.write(folder)
    _print_results(folder, list(results), config)


def _require(tensorboard: bool) -> None:
    require(*EXTRA)
    if tensorboard:
        from afflux.sim.results.tensorboard import require_tensorboard

        require_tensorboard()


def _tune(
    specs: list[RuleSpec], grid: list[str], seeds: list[int], config: SimConfig, jobs: int | None, out: Path | None
) -> None:
    require(*EXTRA)
    from afflux.sim.papers.grid import parse_grid, tune
    from afflux.sim.papers.publishing import publish

    axes = parse_grid(grid)
    with interrupts.deferred():
        page, folder = publish(out, lambda measure: tune(specs, axes, seeds, config, measure), jobs)
    typer.echo(page.markdown)
    typer.echo(f"wrote {folder}/")


def _audit_folder(folder: Path, simulation: "Simulation", keep_updates: bool, tensorboard: bool) -> "AuditOutput":
    from afflux.sim.results import run_folder

    d = simulation.num_parameters() if keep_updates and simulation.config.task != IMAGES else None
    announce = partial(typer.echo, err=True)
    runs = len(simulation.jobs)
    output = run_folder.create_audit_folder(folder, simulation.config, runs, keep_updates, announce, d)
    return _with_event_files(output, tensorboard)


def _with_event_files(output: "AuditOutput", tensorboard: bool) -> "AuditOutput":
    from afflux.sim.results.tensorboard import FOLDER

    return output._replace(tensorboard=output.folder.parent / FOLDER) if tensorboard else output


def _start_in_store(
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
    _require(tensorboard)
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


def _resume(
    store: Path,
    seconds: float,
    out: Path | None,
    typed: RuleSpec | None,
    task: str | None,
    tensorboard: bool,
    workers: int,
) -> None:
    _require(tensorboard)
    from afflux.sim.runs.compare import Job
    from afflux.sim.runs.resume import resume
    from afflux.sim.runs.run_checkpoint import InterruptedRun

    interrupted = InterruptedRun.of(store, out, typed, task)
    if interrupted.finished:
        typer.echo(f"the run in {store} is finished; its results are written again", err=True)
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
        typer.echo(f"continue with: afflux run --resume {store}{again}", err=True)
        raise
    run_folder.write_results(folder, results, config)
    _print_results(folder, results, config)


def _replay(
    path: Path,
    rules: list[str] | None,
    common: dict[str, Any],
    data_dir: str | None,
    task: str | None,
    out: Path | None,
) -> None:
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
        typer.echo(f"{path} was cut off{lacks}", err=True)
    jobs = [Job(specs[0], log.header.seed, tuple(specs[1:]))]
    with _run_folder(out, jobs, config, {}) as folder:
        output = run_folder.create_audit_folder(folder, config, 1)
        with show_progress([job.title for job in jobs], config.arrivals, Console(stderr=True)) as watch:
            results = replay(log, specs, config, partial(watch, 0), output.folder)
        run_folder.write_results(folder, results, config)
    _print_results(folder, results, config)
    for result in results:
        same = ", as in the log" if log.end is not None and result.digest == log.end.params_sha256 else ""
        typer.echo(f"params of {result.spec.label}: sha256 {result.digest}{same}")
    if not rules and log.end is not None and results[0].digest != log.end.params_sha256:
        typer.echo(f"error: the log says {log.end.params_sha256}: the rule or the software has changed", err=True)
        raise typer.Exit(1)


@contextmanager
def _run_folder(
    out: Path | None, jobs: "list[Job]", config: SimConfig, finished: "dict[int, list[RunResult]]"
) -> Iterator[Path]:
    """Create the run folder; after an error, write the finished results into it, or remove it if there are none."""
    from afflux.sim.results import run_folder

    folder = run_folder.create_run_folder(out)
    try:
        yield folder
    except BaseException:
        results = [result for index in sorted(finished) for result in finished[index]]
        if results:
            run_folder.write_results(folder, results, config)
        if run_folder.remove_empty_logs(folder):
            typer.echo(f"{len(finished)} of {len(jobs)} runs were finished; kept {folder}/", err=True)
        raise


def _print_results(folder: Path, results: "list[RunResult]", config: SimConfig) -> None:
    from rich.console import Console

    from afflux.sim.results import run_folder, terminal_output

    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=200)
    screen.print(run_folder.describe_setting(config, results), highlight=False)
    screen.print(terminal_output.results_table(results, config))
    screen.print(f"wrote {folder}/", highlight=False, soft_wrap=True)
