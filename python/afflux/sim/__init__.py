"""Discrete-event simulation of asynchronous federated learning; needs `afflux[sim]`.

The names below are loaded at first use, because most of them import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afflux.ops.errors import ConfigError as ConfigError
    from afflux.sim.errors import DivergedError as DivergedError
    from afflux.sim.errors import MissingExtraError as MissingExtraError
    from afflux.sim.errors import TrainingError as TrainingError
    from afflux.sim.workload.evaluation import Metric as Metric
    from afflux.sim.workload.evaluation import classification as classification
    from afflux.sim.workload.task import Task as Task
    from afflux.sim.workload.task import fedprox as fedprox
    from afflux.sim.workload.task import partitioned as partitioned
    from afflux.sim.workload.task import scaffold as scaffold
    from afflux.sim.workload.task import sgd as sgd

_MODULES = {
    "errors": ("ConfigError", "DivergedError", "MissingExtraError", "TrainingError"),
    "workload.evaluation": ("Metric", "classification"),
    "workload.task": ("Task", "fedprox", "partitioned", "scaffold", "sgd"),
}

__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"afflux.sim.{module}"), name)
    raise AttributeError(f"module 'afflux.sim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
