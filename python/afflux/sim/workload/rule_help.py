"""The text of `afflux rules`: every preset with its formula and options, from docstrings and signatures."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_args

from afflux.rules import RULES
from afflux.rules.registry import registered_parts
from afflux.rules.staleness import StalenessLaw
from afflux.sim.workload.rule_files import rule_function
from afflux.sim.workload.rule_specs import format_option, literal_choices, rule_parameters


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
    taken = rule_parameters(name)
    formula, more = _docstring(name)
    paper = (sys.modules[rule_function(name).__module__].__doc__ or "").partition("\n")[0]
    yield from (f"{name}    {paper}".rstrip(), "", formula, *(["", more] if more else []), "", "options:")
    for option, parameter in taken.items():
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
