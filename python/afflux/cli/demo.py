"""`afflux demo`: a rule of each paper on handwritten digits, and a run that is killed and resumed to the same bits."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afflux.cli.common import OutFolder, parse_rules, parse_seeds, report_errors
from afflux.cli.killed_run import kill_and_resume
from afflux.cli.make_runs import make_runs
from afflux.sim.workload.config import SimConfig

if TYPE_CHECKING:
    from afflux.sim.results.run_result import RunResult

#: Each server_lr is the best of four or five on a validation part with a seed that the demo does not use: docs/demo.md.
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

DEMO_HELP = f"""Show a rule of each paper on handwritten digits, and a run that is killed and resumed.

Runs {", ".join(rule.partition(":")[0] for rule in RULES)} with stale and heterogeneous clients. Then runs the last \
rule again with its server in a store, kills the process with SIGKILL halfway, resumes the run in another process, and \
compares final params and audit log with those of the run that was never killed. It takes under a minute on two cores. \
Exit code 1: they differ.

[bold]Examples[/bold]

  afflux demo

  afflux demo --seeds 0 --arrivals 400 --out runs/short
"""


def demo(
    seeds: Annotated[str, typer.Option(help="Separated by commas; the first one's run is killed.")] = "0,1,2",
    arrivals: Annotated[int, typer.Option(min=20, help="Client results of each run.")] = 1000,
    out: OutFolder = None,
) -> None:
    """Compare six rules, then kill and resume a run (see DEMO_HELP)."""
    with report_errors():
        config = SimConfig(model="logreg", arrivals=arrivals, eval_every=20)
        specs, numbers = parse_rules(list(RULES)), parse_seeds(seeds)
        folder, results = make_runs(specs, numbers, config, None, out, False, False, 1)
        _print_results(folder, list(results), config)
        spec, seed = specs[RULES.index(KILLED)], numbers[0]
        typer.echo(f"\nThe run of {spec.label}, seed {seed}, again, in a process that is killed ...")
        after = arrivals // 2
        killed = kill_and_resume(folder / "killed", spec, seed, config, after)
        typer.echo(f"  SIGKILL after {after} of {arrivals} arrivals; resumed from arrival {killed.resumed_from}")
        whole = folder / killed.log.relative_to(folder / "killed" / "run")
        if not print_comparison(whole, killed.log):
            typer.echo("error: the resumed run has other bits than the run that was never killed", err=True)
            raise typer.Exit(1)


def _print_results(folder: Path, results: "list[RunResult]", config: SimConfig) -> None:
    from rich.console import Console

    from afflux.sim.results import run_folder, summary_table

    screen = Console()
    screen.print(run_folder.describe_setting(config, results), highlight=False)
    screen.print(summary_table.table_by_rule(results, config))
    for name in ("curves.png", "report.html"):
        screen.print(f"wrote {folder / name}", highlight=False, soft_wrap=True)


def print_comparison(whole: Path, resumed: Path) -> bool:
    """Print the digests of final params and audit logs of two runs; return whether they are equal."""
    from afflux.sim.results.audit_log import read_audit_log

    logs = (whole, resumed)
    ends = [read_audit_log(log).end for log in logs]
    params = ["" if end is None else end.params_sha256 for end in ends]
    files = [sha256(log.read_bytes()).hexdigest() for log in logs]
    same = True
    for title, digests in (("final params", params), ("audit log: each arrival, decision and weight", files)):
        equal = digests[0] == digests[1] != ""
        same = same and equal
        typer.echo(f"{title}, SHA-256: {'the same' if equal else 'different'}")
        for name, digest in zip(("never killed", "resumed"), digests, strict=True):
            typer.echo(f"  {name:<12} {digest or 'the run has no end'}")
    return same
