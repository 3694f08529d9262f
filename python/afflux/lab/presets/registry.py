"""The presets by name, and the text about each of them."""

import re
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
    """Return a table of all presets: name, data, model, rule, settings and the table of the paper."""
    head = ("preset", "data", "model", "rule", "M", "lr", "server lr", "source of the rates")
    lines = [head, *(_row(preset) for preset in all_presets().values())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _row(preset: Preset) -> tuple[str, ...]:
    def shown(value: object) -> str:
        return "-" if value is None else f"{value:g}" if isinstance(value, float) else f"{value}"

    rate = preset.settings["client_lr"]
    sources = [re.split("[:;]", given.source)[0] for given in (rate, preset.server_lr) if given]
    return (
        preset.name,
        preset.data,
        preset.model,
        preset.rule.value.partition(":")[0],
        shown(preset.buffer_size and preset.buffer_size.value),
        shown(rate.value),
        shown(preset.server_lr and preset.server_lr.value),
        ", ".join([preset.paper, *dict.fromkeys(sources)]),
    )


def describe(preset: Preset) -> list[str]:
    """Return the values of a preset, each with its source."""
    values = {name: (f"{given.value}", given.source) for name, given in preset.all_values().items()}
    width = max(map(len, values))
    lines = [f"{preset.name}: {preset.about} ({preset.paper})", ""]
    lines += [f"  {name.ljust(width)}  {value}  [{source}]" for name, (value, source) in values.items()]
    return [*lines, *(["", preset.note] if preset.note else [])]
