"""`afflux demo`: a rule of each paper on handwritten digits, and a run that is killed and resumed to the same bits."""

import multiprocessing
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afflux.cli.common import parse_rules, report_errors
from afflux.cli.lab.settings import OutFolder, parse_seeds
from afflux.cli.lab.simulate import make_runs, print_results
from afflux.ops.errors import AffluxError
from afflux.rules.specs import RuleSpec
from afflux.sim.errors import EXTRA, require
from afflux.sim.workload.config import SimConfig

if TYPE_CHECKING:
    from afflux.lab.results.run_history import RunProgress

#: Each server_lr is the best of four or five on a validation part with a seed that no demo uses: docs/start/demo.md.
RULES = (
    "fedbuff:server_lr=10",
    "afa_cs:server_lr=0.3",
    "fadas:server_lr=0.01",
    "wkafl:server_lr=0.3",
    "ca2fl:server_lr=3",
    "mf_ca2fl:bits=4:server_lr=3",
)
#: The rule with the most state: params, a sum, and a row of four bits an element for each client.
KILLED = RULES[-1]

#: Seconds between two checkpoints of the run that is killed.
CHECKPOINT_SECONDS = 0.1

DEMO_HELP = f"""Show a rule of each paper on handwritten digits, and a run that is killed and resumed.

Runs {", ".join(rule.partition(":")[0] for rule in RULES)} with stale and heterogeneous clients. Then runs the last \
rule again with its server in a store, kills the process with SIGKILL halfway, resumes the run in this process, and \
compares final params and audit log with those of the run that was never killed. It takes under a minute on two cores. \
Exit code 1: they differ.

\b
Examples:
  afflux demo
  afflux demo --seeds 0 --arrivals 400 --out runs/short
"""


def kill_and_resume(folder: Path, spec: RuleSpec, seed: int, config: SimConfig, after: int) -> tuple[Path, int]:
    """Make a run with its server in a store in a process that kills itself, and continue it in this process.

    Args:
        folder: the folder for the store and the run folder, `store` and `run`, which must not exist yet.
        spec: the rule.
        seed: of the run.
        config: the settings.
        after: number of arrivals after which the process gets SIGKILL; smaller than that of the run.

    Returns:
        The audit log of the run after its end, and the arrivals before the checkpoint from which it was continued.

    Raises:
        AffluxError: the process has ended in another way.
    """
    from afflux.lab.results.audit_log import FOLDER, file_stem
    from afflux.store import info

    arguments = folder, spec, seed, config, after
    process = multiprocessing.get_context("spawn").Process(target=run_until, args=arguments, daemon=True)
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise AffluxError(f"the process was to be killed, but ended with exit code {process.exitcode}")
    joins = info(folder / "store").joins
    run_until(folder, spec, seed, config, config.arrivals + 1)
    return folder / "run" / FOLDER / f"{file_stem(spec.label, seed)}.jsonl", joins


def run_until(folder: Path, spec: RuleSpec, seed: int, config: SimConfig, after: int) -> None:
    """Make or continue a run in a store; this process sends itself SIGKILL, which it cannot handle, after arrivals."""
    from afflux.lab.runs.library import Simulation

    def watch(index: int, run: "RunProgress") -> None:
        if run.arrivals >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, Any] = {"out": folder / "run", "store": folder / "store"}
    Simulation.of(config, [spec], [seed]).run(**places, checkpoint_every=CHECKPOINT_SECONDS, watch=watch)


def demo(
    seeds: Annotated[str, typer.Option(help="Separated by commas; the first one's run is killed.")] = "0,1,2",
    arrivals: Annotated[int, typer.Option(min=20, help="Client results of each run.")] = 1000,
    out: OutFolder = None,
) -> None:
    """Compare six rules, then kill and resume a run (see DEMO_HELP)."""
    with report_errors():
        require(*EXTRA)
        from afflux.lab.runs.compare import default_processes

        config = SimConfig(model="logreg", arrivals=arrivals, eval_every=20)
        specs, numbers = parse_rules(list(RULES)), parse_seeds(seeds)
        folder, results = make_runs(specs, numbers, config, out, processes=default_processes(1))
        print_results(folder, results)
        spec, seed = specs[RULES.index(KILLED)], numbers[0]
        typer.echo(f"\nThe run of {spec.label}, seed {seed}, again, in a process that is killed ...")
        after = arrivals // 2
        log, resumed_from = kill_and_resume(folder / "killed", spec, seed, config, after)
        typer.echo(f"  SIGKILL after {after} of {arrivals} arrivals; resumed from arrival {resumed_from}")
        if not print_comparison(folder / log.relative_to(folder / "killed" / "run"), log):
            typer.echo("error: the resumed run has other bits than the run that was never killed", err=True)
            raise typer.Exit(1)


def print_comparison(whole: Path, resumed: Path) -> bool:
    """Print the digests of the audit logs of two runs; return whether they are equal."""
    digests = [sha256(log.read_bytes()).hexdigest() for log in (whole, resumed)]
    same = digests[0] == digests[1]
    what = "audit log: each arrival, decision and weight, and the digest of the final params"
    typer.echo(f"{what}, SHA-256: {'the same' if same else 'different'}")
    for name, digest in zip(("never killed", "resumed"), digests, strict=True):
        typer.echo(f"  {name:<12} {digest}")
    return same
