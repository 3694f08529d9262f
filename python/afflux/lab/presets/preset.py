"""The record of one experiment of a paper: settings, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from afflux.sim.workload.config import ENDS, UNLIMITED, SimConfig

#: Source of a value that no paper and no published code gives.
DECIDED = "decided"


class Sourced(NamedTuple):
    """A value and its source."""

    value: Any
    source: str  #: a table, section or appendix of the paper, the authors' code, or `DECIDED` with the reason


@dataclass(frozen=True)
class Preset:
    """One experiment: one method of one paper on one data set."""

    name: str
    paper: str
    about: str  #: the experiment in one line
    data: str
    model: str
    rule: Sourced  #: as text, without buffer_size and server_lr
    #: Fields of SimConfig; others have their defaults, except arrivals, which has no limit where rounds is given.
    settings: Mapping[str, Sourced]
    buffer_size: Sourced | None = None  #: None: the rule has no buffer
    server_lr: Sourced | None = None  #: None: the rule has no such option
    note: str = ""  #: questions about this experiment that the paper leaves open

    def values(self) -> dict[str, Any]:
        """Return the settings without their sources."""
        values = {name: setting.value for name, setting in self.settings.items()}
        if any(values.get(end) for end in ENDS):
            values.setdefault("arrivals", UNLIMITED)
        return values

    def config(self, **others: Any) -> SimConfig:
        """Return the settings of the simulator; `others` replace those of the preset."""
        return SimConfig(**(self.values() | others))

    def all_values(self) -> dict[str, Sourced]:
        """Return rule, buffer size, server learning rate and settings, with their sources."""
        own = {"rule": self.rule, "buffer_size": self.buffer_size, "server_lr": self.server_lr}
        return {name: value for name, value in own.items() if value is not None} | dict(self.settings)


def sourced(source: str, **values: Any) -> dict[str, Sourced]:
    """Return settings that have the same source."""
    return {name: Sourced(value, source) for name, value in values.items()}


def task_of(data: str, model: str, inputs: str = "standardised") -> str:
    """Return the setting `task` of a data set and a model of the papers, and the scale of its images."""
    scale = "" if inputs == "standardised" else f":inputs={inputs}"
    return f"papers:dataset={data}:network={model}{scale}"
