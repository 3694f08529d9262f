"""`afflux compare` and `run`: they make runs, show their progress and print results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import echo, parse_rules
from afflux.cli.lab.settings import (
    BufferSize,
    OutFolder,
    Paper,
    Processes,
    ServerLr,
    is_on_command_line,
    parse_seeds,
    rules_of_preset,
    settings_for_task,
    split_rules,
    with_config_options,
)
from afflux.lab import interrupts
from afflux.ops.errors import ConfigError
from afflux.ops.validation import printable
from afflux.rules import RULES
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import EXTRA, require
from afflux.sim.workload.config import SimConfig

if TYPE_CHECKING:
    from afflux.lab.results.simulation_results import SimulationResults

COMPARE_HELP = f"""Compare aggregation rules in one simulation.

With one seed every rule sees the same clients, delays and batches. \
A rule is written NAME or NAME:OPTION=VALUE:OPTION=VALUE; `afflux rules` explains each. \
LABEL=RULE calls it LABEL in tables and figures. \
NAME may be path/to/file.py:FUNCTION: that file is executed, as your own code.

Rules: {", ".join(RULES)}

\b
Examples:
  afflux compare --rules fedbuff,fedasync,ca2fl --data digits
  afflux compare --rules 'fedbuff,fedbuff:staleness=hinge(10,4)' --seeds 0,1,2
  afflux compare --rules fedbuff,wkafl,fadas --paired
  afflux compare --rules fedbuff,fadas --grid client_lr=.01,.1 --out runs/tuned
  afflux compare --rules fedbuff,fadas --grid client_lr=.001..1 --trials 6 --out runs/tuned
  afflux compare --paper ca2fl-cnn --data-dir ~/data --rounds 100
  afflux compare --rules fedbuff,ca2fl --task my_tasks.py:function --rounds 200
"""
RUN_HELP = """Simulate one aggregation rule with one seed.

\b
Examples:
  afflux run --rule fedbuff
  afflux run --rule fedasync:alpha=0.3 --delays fadas-mild --out runs/mild
  afflux run --rule mf_ca2fl:bits=2:codec=rotated
  afflux run --paper ca2fl-cnn --data-dir ~/data --rounds 100
  afflux run --rule ca2fl --store runs/ca2fl.store --out runs/ca2fl
"""
DEFAULT_RULES = ["fedbuff", "fedasync", "ca2fl"]
RULES_OPTION = (
    f"Separated by commas; default {', '.join(DEFAULT_RULES)}. With --paper, all rules have the preset's settings; "
    "its own rule comes first if --rules is not given."
)
PAIRED = (
    "All rules get the same updates, of clients that train from the params of the first rule: compares only the "
    "aggregation, not how clients would learn under the other rules."
)
RULE = "The rule; options follow it after colons: mf_ca2fl:bits=2:server_lr=1."
STORE = "New folder in which the server is kept: the same command continues an interrupted run, bit for bit."
CHECKPOINT_EVERY = "With --store: seconds between two checkpoints; 0: after every event. Also on Ctrl-C and SIGTERM."

GRID = (
    "NAME=VALUE,VALUE,...: a setting such as client_lr, an option of the rules that have it such as server_lr, or "
    "RULE.NAME, which replaces NAME for this rule; repeatable. Each rule is run with all combinations and the first "
    "seed on a validation part, its best one then with all seeds on the test part. The same command continues in --out."
)
TRIALS = (
    "With --grid: so many random settings, the same for all rules. NAME=LOW..HIGH is a range: floats are drawn "
    "log-uniformly if LOW > 0, other numbers uniformly; of NAME=VALUE,... each value has the same chance."
)
WORKERS = "Processes of each run that train; results are the same; ray: tasks of Ray."


def _workers(text: str) -> Any:
    if text != "ray" and int(text) < 1:
        raise ValueError(text)
    return text if text == "ray" else int(text)


TrainingWorkers = Annotated[Any, typer.Option("--workers", parser=_workers, metavar="N", help=WORKERS)]


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
    from afflux.cli.lab.terminal import show_progress
    from afflux.lab.results.run_folder import dated_folder
    from afflux.lab.runs.library import Simulation

    simulation, folder = Simulation.of(config, specs, seeds, paired=paired), out or dated_folder()
    with show_progress([job.title for job in simulation.jobs], config.arrivals) as watch:
        return folder, simulation.run(out=folder, watch=watch, **options)


def print_results(folder: Path, results: "SimulationResults") -> None:
    """Print the settings, the table of results and the name of the run folder."""
    from afflux.cli.lab import terminal
    from afflux.lab.results import run_folder

    screen = terminal.open_console()
    screen.print(run_folder.describe_setting(results.config, results, results.failures))
    screen.print(terminal.results_table(results, results.config, results.failures))
    screen.print(printable(f"wrote {folder}/"), soft_wrap=True)


@with_config_options
def compare(
    config: SimConfig,
    context: typer.Context,
    rules: Annotated[str | None, typer.Option(help=RULES_OPTION)] = None,
    paper: Paper = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    paired: Annotated[bool, typer.Option("--paired", help=PAIRED)] = False,
    jobs: Processes = None,
    workers: TrainingWorkers = 1,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    grid: Annotated[list[str] | None, typer.Option(help=GRID)] = None,
    trials: Annotated[int, typer.Option(min=0, help=TRIALS)] = 0,
    out: OutFolder = None,
) -> None:
    """Compare rules (see COMPARE_HELP)."""
    chosen = None if rules is None else split_rules(rules)
    if paper is not None:
        chosen, buffer_size, server_lr = rules_of_preset(paper, chosen, DEFAULT_RULES, buffer_size, server_lr)
    specs = parse_rules(chosen or DEFAULT_RULES, buffer_size=buffer_size, server_lr=server_lr)
    config = settings_for_task(context, config, specs)
    if grid:
        if paired:
            raise ConfigError("--grid makes runs of its own, without --paired")
        from afflux.cli.lab.terminal import show_progress
        from afflux.lab.grid import parse_grid, publish_grid

        axes, numbers = parse_grid(grid), parse_seeds(seeds)
        options: dict[str, Any] = {"processes": jobs, "workers": workers, "show": show_progress}
        with interrupts.deferred():
            page, folder = publish_grid(out, specs, axes, numbers, config, trials, **options)
        echo(page.markdown)
        echo(f"wrote {folder}/")
        return
    if trials:
        raise ConfigError("--trials is the number of settings of a grid; give --grid")
    from afflux.lab.runs.compare import default_processes

    options = {"processes": jobs or default_processes(workers), "workers": workers}
    print_results(*make_runs(specs, parse_seeds(seeds), config, out, paired=paired, **options))


@with_config_options
def run(
    config: SimConfig,
    context: typer.Context,
    rule: Annotated[str | None, typer.Option(help=RULE)] = None,
    paper: Paper = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    workers: TrainingWorkers = 1,
    store: Annotated[Path | None, typer.Option(help=STORE)] = None,
    checkpoint_every: Annotated[float, typer.Option(min=0, help=CHECKPOINT_EVERY, hidden=True)] = 10.0,
    out: OutFolder = None,
) -> None:
    """Simulate one rule (see RUN_HELP)."""
    if store is None and is_on_command_line(context, "checkpoint_every"):
        raise ConfigError("--checkpoint-every was given, but without --store there are no checkpoints")
    rules = None if rule is None else [rule]
    if paper is not None:
        rules, buffer_size, server_lr = rules_of_preset(paper, rules, [], buffer_size, server_lr)
    if rules is None:
        raise ConfigError("give --rule or --paper")
    if store is not None and out is None:
        raise ConfigError("--store needs --out, the run folder in which the same command continues")
    specs = parse_rules(rules, buffer_size=buffer_size, server_lr=server_lr)
    config = settings_for_task(context, config, specs)
    options: dict[str, Any] = {"workers": workers, "store": store, "checkpoint_every": checkpoint_every}
    print_results(*make_runs(specs, [seed], config, out, **options))
