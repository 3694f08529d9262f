"""`afflux rules`, `papers` and `backends`: rules, settings of the papers, and the engine's instruction sets and
devices.
"""

from typing import Annotated

import typer

from afflux import ops
from afflux.cli.common import report_errors

RULES_HELP = """Print the presets: their formulas, options and defaults.

\b
Examples:
  afflux rules
  afflux rules wkafl
"""
PAPERS_HELP = """Print the presets of the papers' experiments, for `afflux run --paper`.

\b
Examples:
  afflux papers
  afflux papers ca2fl-cnn
"""
BACKENDS_HELP = """Print the instruction sets and devices that the engine was compiled for, and which of them run here.

The last two lines are the default number of threads (the CPUs that this process may use, by its affinity and its
container's quota) and the policy: how sweeps on the CPU use memory. Neither changes a bit of a result.

\b
Examples:
  afflux backends
  AFFLUX_ISA=avx2 afflux backends
  AFFLUX_POLICY=prefetch=512,stream=never afflux backends
"""


def rules(name: Annotated[str | None, typer.Argument(help="A rule; default: all, two lines each.")] = None) -> None:
    """Print presets (see RULES_HELP)."""
    from afflux.sim.workload.rule_help import describe_all_rules, describe_rule

    with report_errors():
        for line in describe_all_rules() if name is None else describe_rule(name):
            typer.echo(line)


def papers(
    name: Annotated[
        str | None, typer.Argument(help="A preset: all values with their sources; default: all presets.")
    ] = None,
) -> None:
    """Print the papers' experiments (see PAPERS_HELP)."""
    from afflux.sim.papers.presets import registry

    with report_errors():
        for line in registry.describe_all() if name is None else registry.describe(registry.find_preset(name)):
            typer.echo(line)


def backends() -> None:
    """Print instruction sets, the number of threads and the policy (see BACKENDS_HELP)."""
    with report_errors():
        for backend in ops.backends():
            state = "chosen" if backend.chosen else "runs here" if backend.runs else backend.why_not
            typer.echo(f"{backend.name:<10}{backend.device:<6}{state}")
        typer.echo(f"threads   cpu   {ops.default_threads()} by default")
        typer.echo(f"policy    cpu   {ops.policy()} ({ops.processor_family()})")
