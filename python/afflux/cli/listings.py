"""`afflux rules`, `papers` and `backends`: rules, settings of the papers, and the engine's instruction sets and
devices.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from afflux import ops
from afflux._engine_library import CUDA_STATE
from afflux.cli.common import report_errors
from afflux.cli.options import typer
from afflux.rules import RULES
from afflux.rules.files import rule_function
from afflux.rules.registry import registered_parts
from afflux.rules.specs import format_option, literal_choices, rule_parameters
from afflux.rules.staleness import StalenessLaw

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
            if backend.device == "cuda" and backend.compiled and CUDA_STATE:
                state += f"; {CUDA_STATE}"
            typer.echo(f"{backend.name:<10}{backend.device:<6}{state}")
        typer.echo(f"threads   cpu   {ops.default_threads()} by default")
        typer.echo(f"policy    cpu   {ops.policy()} ({ops.processor_family()})")


def describe_all_rules() -> Iterator[str]:
    """Yield three lines a preset: its name and formula, its options with their defaults, and an empty one."""
    width = max(map(len, RULES)) + 2
    for name in RULES:
        formula, _ = _docstring(name)
        options = (f"{option}={format_option(p.default)}" for option, p in rule_parameters(name).items())
        yield f"{name:<{width}}{formula}"
        yield f"{'':<{width}}{' '.join(options)}"
        yield ""


def describe_rule(name: str) -> Iterator[str]:
    """Yield the description of one rule with all its options; raise ConfigError for an unknown rule."""
    parameters = rule_parameters(name)
    formula, more = _docstring(name)
    paper = (sys.modules[rule_function(name).__module__].__doc__ or "").partition("\n")[0]
    yield from (f"{name}    {paper}".rstrip(), "", formula, *(["", more] if more else []), "", "options:")
    for option, parameter in parameters.items():
        default = "" if parameter.default is parameter.empty else format_option(parameter.default)
        yield f"  {option:<18}{default:<18}{_kind(parameter.annotation)}".rstrip()


def _docstring(name: str) -> tuple[str, str]:
    formula, _, more = (inspect.getdoc(rule_function(name)) or "").partition("\n")
    return formula, more.strip()


def _kind(annotation: Any) -> str:
    """Return the values that an option accepts, for the user."""
    kinds = (annotation, *get_args(annotation))
    names = " | ".join(registered_parts("staleness"))
    laws = [f"{names}, with numbers as in hinge(10,4)"] if StalenessLaw in kinds else []
    numbers = [kind.__name__ for kind in (int, float) if kind in kinds]
    return " | ".join([*numbers, *map(format_option, literal_choices(annotation)), *laws])
