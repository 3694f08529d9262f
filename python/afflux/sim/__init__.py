"""Discrete-event simulation of asynchronous federated learning; needs `afflux[sim]`.

The names below are loaded at first use, because most of them import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afflux.sim.errors import ConfigError, DivergedError, MissingExtraError, TrainingError
    from afflux.sim.papers.grid import tune
    from afflux.sim.results.audit_log import read_audit_log
    from afflux.sim.results.read_results import read_results
    from afflux.sim.runs.library import Simulation, replay, resume
    from afflux.sim.workload.client_training import fedprox, scaffold, sgd
    from afflux.sim.workload.evaluation import classification
    from afflux.sim.workload.task import Task, partitioned
    from afflux.sim.workload.task_registry import register_task

__all__ = [
    "ConfigError",
    "DivergedError",
    "MissingExtraError",
    "Simulation",
    "Task",
    "TrainingError",
    "classification",
    "fedprox",
    "partitioned",
    "read_audit_log",
    "read_results",
    "register_task",
    "replay",
    "resume",
    "scaffold",
    "sgd",
    "tune",
]

_MODULES = {
    "errors": ("ConfigError", "DivergedError", "MissingExtraError", "TrainingError"),
    "papers.grid": ("tune",),
    "results.audit_log": ("read_audit_log",),
    "results.read_results": ("read_results",),
    "runs.library": ("Simulation", "replay", "resume"),
    "workload.client_training": ("fedprox", "scaffold", "sgd"),
    "workload.evaluation": ("classification",),
    "workload.task": ("Task", "partitioned"),
    "workload.task_registry": ("register_task",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"afflux.sim.{module}"), name)
    raise AttributeError(f"module 'afflux.sim' has no attribute {name!r}")
