"""`afflux rules` and `afflux backends`: the presets, and the engine's instruction sets and devices."""

from typing import Annotated

import typer

from afflux import ops
from afflux.cli.common import report_errors

RULES_HELP = """Print the presets: their formulas, options and defaults.

[bold]Examples[/bold]

  afflux rules

  afflux rules wkafl
"""
BACKENDS_HELP = """Print the instruction sets and devices that the engine was compiled for, and which of them run here.

[bold]Examples[/bold]

  afflux backends

  AFFLUX_ISA=avx2 afflux backends
"""


def rules(name: Annotated[str | None, typer.Argument(help="A rule; default: all, two lines each.")] = None) -> None:
    """Print presets (see RULES_HELP)."""
    from afflux.sim.workload.rule_help import describe_all_rules, describe_rule

    with report_errors():
        for line in describe_all_rules() if name is None else describe_rule(name):
            typer.echo(line)


def backends() -> None:
    """Print instruction sets (see BACKENDS_HELP)."""
    with report_errors():
        for backend in ops.backends():
            state = "chosen" if backend.chosen else "runs here" if backend.runs else backend.why_not
            typer.echo(f"{backend.name:<10}{backend.device:<6}{state}")
