"""What `afflux rules` prints: every preset with its formula and options, from docstrings and signatures."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_args

from afflux.rules import RULES
from afflux.rules.staleness import StalenessLaw
from afflux.sim.config import LAWS, choices, parameters, written
from afflux.sim.rulefile import maker


def overview() -> Iterator[str]:
    """Yield three lines a preset: its name and formula, its options with their defaults, and an empty one."""
    for name in RULES:
        formula, _ = _docstring(name)
        options = (f"{option}={written(p.default)}" for option, p in parameters(name).items())
        yield f"{name:<12}{formula}"
        yield f"{'':<12}{' '.join(options)}"
        yield ""


def details(name: str) -> Iterator[str]:
    """Yield all there is to say about one rule; raises ConfigError for an unknown one."""
    taken = parameters(name)
    formula, more = _docstring(name)
    paper = (sys.modules[maker(name).__module__].__doc__ or "").partition("\n")[0]
    yield from (f"{name}    {paper}".rstrip(), "", formula, *(["", more] if more else []), "", "options:")
    for option, parameter in taken.items():
        default = "" if parameter.default is parameter.empty else written(parameter.default)
        yield f"  {option:<18}{default:<18}{_kind(parameter.annotation)}".rstrip()


def _docstring(name: str) -> tuple[str, str]:
    formula, _, more = (inspect.getdoc(maker(name)) or "").partition("\n")
    return formula, more.strip()


def _kind(annotation: Any) -> str:
    """What a person may type."""
    kinds = (annotation, *get_args(annotation))
    laws = [f"{' | '.join(LAWS)}, with numbers as in hinge(10,4)"] if StalenessLaw in kinds else []
    numbers = [kind.__name__ for kind in (int, float) if kind in kinds]
    return " | ".join([*numbers, *map(written, choices(annotation)), *laws])
