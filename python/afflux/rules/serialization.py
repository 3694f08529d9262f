"""A rule as data: its parts by name, as a store keeps them, so that it can be opened without being told the rule."""

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from afflux.ops.errors import AffluxError
from afflux.rules.presets import RULES
from afflux.rules.rule import Rule

#: Where the parts are defined that may stand in a recipe. Nothing else is looked up by a name that was read.
MODULES = (
    "ops.codecs",
    "rules.calibration",
    "rules.optimizers",
    "rules.rule",
    "rules.schedules",
    "rules.staleness",
    "rules.weights",
    "rules.presets.dialects",
    *sorted({preset.__module__.removeprefix("afflux.") for preset in RULES.values()}),
)


def recipe_of(rule: Rule) -> dict[str, Any]:
    """The rule as JSON has it. A part that is not of this package leaves no more than its name: `own`.

    >>> from afflux.rules import fedbuff
    >>> recipe_of(fedbuff(buffer_size=2))["weigh"]["law"]
    {'part': 'rules.staleness.Polynomial', 'a': 0.5}
    """
    content: dict[str, Any] = _content(rule)
    return content


def rule_of(content: Mapping[str, Any]) -> Rule:
    """The rule of a recipe.

    Raises:
        AffluxError: it has a part of somebody's own, or one that this afflux does not know.
    """
    made = _value(content)
    if not isinstance(made, Rule):
        raise AffluxError(f"the recipe makes {made!r}, not a Rule")
    return made


def _content(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("afflux.")
    if (part := _part(name)) is not kind:
        return {"own": getattr(value, "__qualname__", name)}
    return {"part": name} | {field.name: _content(getattr(value, field.name)) for field in fields(part) if field.init}


def _value(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    if "own" in content:
        raise AffluxError(f"its part {content['own']} is not afflux's own")
    part = _part(content["part"])
    if part is None:
        raise AffluxError(f"its part {content['part']} is unknown to this afflux")
    try:
        return part(**{name: _value(value) for name, value in content.items() if name != "part"})
    except TypeError as error:
        raise AffluxError(f"its part {content['part']} is another one in this afflux: {error}") from None


def _part(name: str) -> Any:
    """The class of a part of this package, by its module and name; None if there is none."""
    module, _, own = name.rpartition(".")
    if module not in MODULES:
        return None
    found = getattr(importlib.import_module(f"afflux.{module}"), own, None)
    ours = isinstance(found, type) and is_dataclass(found) and found.__module__ == f"afflux.{module}"
    return found if ours else None
