"""`afflux rules`, `papers` and `backends`: rules, settings of the papers, and the engine's instruction sets and
devices.
"""

import argparse
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, get_args

from afflux import ops
from afflux._engine_library import CUDA_STATE
from afflux.cli.common import Parser, add_command
from afflux.rules import RULES
from afflux.rules.files import rule_function
from afflux.rules.registry import registered_parts
from afflux.rules.specs import format_option, literal_choices, rule_parameters
from afflux.rules.staleness import StalenessLaw

RULES_HELP = """Print the presets: what each does, its options and defaults; with NAME also its formula.

Examples:
  afflux rules
  afflux rules wkafl
"""
PAPERS_HELP = """Print the presets of the papers' experiments, for `afflux run --paper`.

Examples:
  afflux papers
  afflux papers ca2fl-cnn
"""
BACKENDS_HELP = """Print the instruction sets and devices of the engine, and which of them run here.

The last two lines are the default number of threads (the CPUs that this process
may use, by its affinity and its container's quota) and the policy: how sweeps
on the CPU use memory. Neither changes a bit of a result.

Examples:
  afflux backends
  AFFLUX_ISA=avx2 afflux backends
  AFFLUX_POLICY=prefetch=512,stream=never afflux backends
"""


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the three commands."""
    parser = add_command(commands, rules, RULES_HELP)
    parser.add_argument("name", nargs="?", metavar="NAME", help="A rule; default: all, two lines each.")
    parser = add_command(commands, papers, PAPERS_HELP)
    text = "A preset: all values with their sources; default: all presets."
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    add_command(commands, backends, BACKENDS_HELP)


def rules(arguments: Namespace) -> None:
    """Print presets (see RULES_HELP)."""
    for line in describe_all_rules() if arguments.name is None else describe_rule(arguments.name):
        print(line)


def papers(arguments: Namespace) -> None:
    """Print the papers' experiments (see PAPERS_HELP)."""
    from afflux.lab.presets import registry

    name = arguments.name
    for line in registry.describe_all() if name is None else registry.describe(registry.find_preset(name)):
        print(line)


def backends(arguments: Namespace) -> None:
    """Print instruction sets, the number of threads and the policy (see BACKENDS_HELP)."""
    for backend in ops.backends():
        state = "chosen" if backend.chosen else "runs here" if backend.runs else backend.why_not
        if backend.device == "cuda" and backend.compiled and CUDA_STATE:
            state += f"; {CUDA_STATE}"
        print(f"{backend.name:<10}{backend.device:<6}{state}")
    print(f"threads   cpu   {ops.default_threads()} by default")
    print(f"policy    cpu   {ops.policy()} ({ops.processor_family()})")


def describe_all_rules() -> Iterator[str]:
    """Yield three lines a preset: its name and what it does, its options with their defaults, and an empty one."""
    width = max(map(len, RULES)) + 2
    for name in RULES:
        summary, _ = _docstring(name)
        options = (f"{option}={format_option(p.default)}" for option, p in rule_parameters(name).items())
        yield f"{name:<{width}}{summary}"
        yield f"{'':<{width}}{' '.join(options)}"
        yield ""


def describe_rule(name: str) -> Iterator[str]:
    """Yield the description of one rule with all its options; raise ConfigError for an unknown rule."""
    parameters = rule_parameters(name)
    summary, more = _docstring(name)
    paper = (sys.modules[rule_function(name).__module__].__doc__ or "").partition("\n")[0]
    yield from (f"{name}    {paper}".rstrip(), "", summary, *(["", more] if more else []), "", "options:")
    for option, parameter in parameters.items():
        default = "" if parameter.default is parameter.empty else format_option(parameter.default)
        yield f"  {option:<18}{default:<18}{_kind(parameter.annotation)}".rstrip()


def _docstring(name: str) -> tuple[str, str]:
    summary, _, more = (inspect.getdoc(rule_function(name)) or "").partition("\n")
    return summary, more.strip()


def _kind(annotation: Any) -> str:
    """Return the values that an option accepts, for the user."""
    kinds = (annotation, *get_args(annotation))
    names = " | ".join(registered_parts("staleness"))
    laws = [f"{names}, with numbers as in hinge(10,4)"] if StalenessLaw in kinds else []
    numbers = [kind.__name__ for kind in (int, float) if kind in kinds]
    return " | ".join([*numbers, *map(format_option, literal_choices(annotation)), *laws])
