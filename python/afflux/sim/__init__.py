"""Discrete-event simulation of asynchronous federated learning; needs `afflux[sim]`.

The names below are loaded at first use, because most of them import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afflux.sim.errors import ConfigError, DivergedError, MissingExtraError, TrainingError
    from afflux.sim.papers.grid import TuningResults, tune
    from afflux.sim.results.audit_log import AuditLog, AuditOutput, read_audit_log
    from afflux.sim.results.run_history import RunProgress
    from afflux.sim.results.run_result import Evaluation, RunResult
    from afflux.sim.results.simulation_results import SimulationResults
    from afflux.sim.results.updates_file import read_updates
    from afflux.sim.runs.compare import Job, compare, make_jobs
    from afflux.sim.runs.library import Simulation
    from afflux.sim.runs.replay import replay, replay_config
    from afflux.sim.runs.resume import resume, run_in_store
    from afflux.sim.runs.run_checkpoint import InterruptedRun
    from afflux.sim.runs.simulation import run, run_paired
    from afflux.sim.workload.client_training import fedprox, scaffold, sgd
    from afflux.sim.workload.config import SimConfig
    from afflux.sim.workload.evaluation import classification
    from afflux.sim.workload.rule_specs import RuleSpec, parse_rule
    from afflux.sim.workload.task import Task, partitioned
    from afflux.sim.workload.task_registry import register_task

__all__ = [
    "AuditLog",
    "AuditOutput",
    "ConfigError",
    "DivergedError",
    "Evaluation",
    "InterruptedRun",
    "Job",
    "MissingExtraError",
    "RuleSpec",
    "RunProgress",
    "RunResult",
    "SimConfig",
    "Simulation",
    "SimulationResults",
    "Task",
    "TrainingError",
    "TuningResults",
    "classification",
    "compare",
    "fedprox",
    "make_jobs",
    "parse_rule",
    "partitioned",
    "read_audit_log",
    "read_updates",
    "register_task",
    "replay",
    "replay_config",
    "resume",
    "run",
    "run_in_store",
    "run_paired",
    "scaffold",
    "sgd",
    "tune",
]

_MODULES = {
    "errors": ("ConfigError", "DivergedError", "MissingExtraError", "TrainingError"),
    "papers.grid": ("TuningResults", "tune"),
    "results.audit_log": ("AuditLog", "AuditOutput", "read_audit_log"),
    "results.run_history": ("RunProgress",),
    "results.run_result": ("Evaluation", "RunResult"),
    "results.simulation_results": ("SimulationResults",),
    "results.updates_file": ("read_updates",),
    "runs.compare": ("Job", "compare", "make_jobs"),
    "runs.library": ("Simulation",),
    "runs.replay": ("replay", "replay_config"),
    "runs.resume": ("resume", "run_in_store"),
    "runs.run_checkpoint": ("InterruptedRun",),
    "runs.simulation": ("run", "run_paired"),
    "workload.client_training": ("fedprox", "scaffold", "sgd"),
    "workload.config": ("SimConfig",),
    "workload.evaluation": ("classification",),
    "workload.rule_specs": ("RuleSpec", "parse_rule"),
    "workload.task": ("Task", "partitioned"),
    "workload.task_registry": ("register_task",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"afflux.sim.{module}"), name)
    raise AttributeError(f"module 'afflux.sim' has no attribute {name!r}")
