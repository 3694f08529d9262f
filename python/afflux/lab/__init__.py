"""Experiments with `afflux.sim`: runs in folders, comparisons, tuning, logs, reports, presets; needs `afflux[lab]`.

The names below are loaded at first use, because most of them import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from afflux.sim.data import LAYOUTS

if TYPE_CHECKING:
    from afflux.lab.grid import tune as tune
    from afflux.lab.results.audit_log import read_audit_log as read_audit_log
    from afflux.lab.results.simulation_results import read_results as read_results
    from afflux.lab.runs.library import Simulation as Simulation

_MODULES = {
    "grid": ("tune",),
    "results.audit_log": ("read_audit_log",),
    "results.simulation_results": ("read_results",),
    "runs.library": ("Simulation",),
}
LAYOUTS.setdefault("femnist", "afflux.lab.tasks.leaf:FEMNIST")
LAYOUTS.setdefault("shakespeare", "afflux.lab.tasks.text_set:LAYOUTS")

__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"afflux.lab.{module}"), name)
    raise AttributeError(f"module 'afflux.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
