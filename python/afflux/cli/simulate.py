"""`afflux compare`, `run` and `replay`."""

from pathlib import Path
from typing import Annotated, Any

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
    rules_of_preset,
    settings_for_task,
    split_rules,
    with_config_options,
)
from afflux.cli.make_runs import make_runs, print_results, replay_log, resume_run, tune_rules
from afflux.rules import RULES
from afflux.sim.errors import ConfigError
from afflux.sim.workload.config import SimConfig

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
  afflux compare --rules fedbuff,ca2fl --model logreg --alpha 0.3
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

\b
Examples:
  afflux replay runs/kept/audit/fedbuff-seed0.jsonl
  afflux replay runs/kept/audit/fedbuff-seed0.jsonl --rule ca2fl --rule fadas
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
KEEP_UPDATES = "Keep all update vectors beside the audit log, 4 d bytes each, for `afflux replay`."
RULE = "The rule; options follow it after colons: mf_ca2fl:bits=2:server_lr=1."
STORE = "New folder in which the server is kept, with all that --resume needs to continue an interrupted run."
RESUME = (
    "Continue an interrupted run in its run folder (give --out if the folder has moved), to the same bits. "
    "A rule file is executed only if you name it again: --rule FILE.py:FUNCTION."
)
CHECKPOINT_EVERY = "With --store: seconds between two checkpoints; 0: after every event. Also on Ctrl-C and SIGTERM."

TENSORBOARD = "Write TensorBoard's event files into the run folder during the run; needs the package tensorboard."
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD, hidden=True)]
GRID = (
    "NAME=VALUE,VALUE,...: a setting such as client_lr, an option of the rules that have it such as server_lr, or "
    "RULE.OPTION; may be given several times. Each rule is run with all combinations and the first seed on a "
    "validation part, and its best one then with all seeds on the test part. The same command with --out continues."
)
TRIALS = (
    "With --grid: so many random settings of each rule, not all combinations. NAME=LOW..HIGH is a range: a float is "
    "drawn log-uniformly if LOW > 0, any other number uniformly; of NAME=VALUE,VALUE,... each value has the same "
    "chance. All rules have the same draws."
)
WORKERS = "Processes of each run that train, with the same bits; 1: the run's own process."
TrainingWorkers = Annotated[int, typer.Option("--workers", min=1, help=WORKERS)]
KeepUpdates = Annotated[bool, typer.Option("--keep-updates", help=KEEP_UPDATES)]


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
    keep_updates: KeepUpdates = False,
    tensorboard: TensorBoard = False,
    grid: Annotated[list[str] | None, typer.Option(help=GRID)] = None,
    trials: Annotated[int, typer.Option(min=0, help=TRIALS)] = 0,
    out: OutFolder = None,
) -> None:
    """Compare rules (see COMPARE_HELP)."""
    chosen = DEFAULT_RULES if rules is None else split_rules(rules)
    if paper is not None:
        chosen, buffer_size = rules_of_preset(paper, chosen, rules is None, buffer_size, server_lr)
    specs = parse_rules(chosen, buffer_size=buffer_size, server_lr=server_lr)
    config = settings_for_task(context, config, specs)
    if grid:
        if paired or keep_updates or tensorboard:
            raise ConfigError("--grid makes runs of its own, without --paired, --keep-updates and --tensorboard")
        tune_rules(specs, grid, trials, parse_seeds(seeds), config, jobs, workers, out)
        return
    if trials:
        raise ConfigError("--trials is the number of settings of a grid; give --grid")
    from afflux.sim.runs.compare import default_processes

    options = {"processes": jobs or default_processes(workers), "workers": workers}
    options |= {"keep_updates": keep_updates, "tensorboard": tensorboard}
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
    keep_updates: KeepUpdates = False,
    tensorboard: TensorBoard = False,
    store: Annotated[Path | None, typer.Option(help=STORE)] = None,
    resume: Annotated[Path | None, typer.Option(help=RESUME)] = None,
    checkpoint_every: Annotated[float, typer.Option(min=0, help=CHECKPOINT_EVERY, hidden=True)] = 10.0,
    out: OutFolder = None,
) -> None:
    """Simulate one rule (see RUN_HELP)."""
    if resume is not None:
        refuse_other_options(
            context, "--resume", "resume", "checkpoint_every", "out", "rule", "task", "tensorboard", "workers"
        )
        task = config.task if is_on_command_line(context, "task") else None
        typed = None if rule is None else parse_rules([rule])[0]
        shared = {"checkpoint_every": checkpoint_every, "tensorboard": tensorboard, "workers": workers}
        resume_run(resume, out, typed, task, **shared)
        return
    if store is None and is_on_command_line(context, "checkpoint_every"):
        raise ConfigError("--checkpoint-every was given, but without --store there are no checkpoints")
    if paper is not None:
        rule, buffer_size, server_lr = rule_of_preset(paper, rule, buffer_size, server_lr)
    if rule is None:
        raise ConfigError("give --rule or --paper, or --resume to continue a run")
    specs = parse_rules([rule], buffer_size=buffer_size, server_lr=server_lr)
    config = settings_for_task(context, config, specs)
    options: dict[str, Any] = {"workers": workers, "keep_updates": keep_updates, "tensorboard": tensorboard}
    options |= {"store": store, "checkpoint_every": checkpoint_every}
    print_results(*make_runs(specs, [seed], config, out, **options))


def replay(
    log: Annotated[Path, typer.Argument(help="The audit log.")],
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule; may be given several times; default: the log's own.")
    ] = None,
    buffer_size: BufferSize = None,
    server_lr: ServerLr = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data sets, if it is not the log's.")] = None,
    task: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION of the log's task, if it is in a file.")] = None,
    out: OutFolder = None,
) -> None:
    """Replay kept updates (see REPLAY_HELP)."""
    with report_errors():
        replay_log(log, rule, {"buffer_size": buffer_size, "server_lr": server_lr}, data_dir, task, out)
