"""The presets by name, and the text about each of them."""

from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from afflux.lab.presets import afl, ca2fl, fadas, wkafl
from afflux.lab.presets.preset import Preset
from afflux.ops.validation import known

if TYPE_CHECKING:
    from collections.abc import Mapping

PAPERS = (ca2fl, fadas, wkafl, afl)


@cache
def all_presets() -> "Mapping[str, Preset]":
    """Return all presets by name, paper by paper."""
    return MappingProxyType({preset.name: preset for preset in chain(*(paper.presets() for paper in PAPERS))})


def find_preset(name: str) -> Preset:
    """Return a preset; raise ConfigError for an unknown name."""
    known("preset", name, all_presets())
    return all_presets()[name]


def describe_all() -> list[str]:
    """Return a line for each preset: its name, experiment and rule."""
    rows = [(one.name, one.about, one.rule.value.partition(":")[0]) for one in all_presets().values()]
    names, experiments = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name.ljust(names)}  {about.ljust(experiments)}  {rule}" for name, about, rule in rows]


def describe(preset: Preset) -> list[str]:
    """Return the values of a preset, each with its source."""
    values = {name: (f"{given.value}", given.source) for name, given in preset.all_values().items()}
    width = max(map(len, values))
    lines = [f"{preset.name}: {preset.about} ({preset.paper})", ""]
    lines += [f"  {name.ljust(width)}  {value}  [{source}]" for name, (value, source) in values.items()]
    return [*lines, *(["", preset.note] if preset.note else [])]
