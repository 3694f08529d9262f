"""Settings that a task does not read: giving one of them is an error, and config.json leaves them out."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from afflux.ops.errors import ConfigError
from afflux.rules import SYNCHRONOUS
from afflux.rules.specs import RuleSpec
from afflux.sim.workload.config import (
    IMAGES,
    MADE_IN_PYTHON,
    OF_CLIENTS,
    OF_PRESENCE,
    PAPERS,
    SETTINGS,
    UNLIMITED,
    SimConfig,
    keyword_settings,
    unread_settings,
)
from afflux.sim.workload.task import Partitioned, Task, fedprox, scaffold

#: Settings that only the function of a task reads.
OF_DIVISION = ("num_clients", "partition", "alpha", "classes")
OF_FUNCTION = ("data_dir", *OF_DIVISION)
#: Settings that only the built-in training reads. client_lr is not one of them: the server divides updates by it, too.
OF_TRAINING = tuple(name for name in {**scaffold(drop_last=True).settings, **fedprox().settings} if name != "client_lr")


def ignored_settings(config: SimConfig, task: Task, function: Callable[..., Any] | None) -> list[str]:
    """Return the settings that nothing reads in runs of this task.

    Args:
        config: the settings; its task is python:NAME if `Simulation` made the task, whose training function then gets
            no other settings than those that it takes.
        task: the task.
        function: the function that has returned the task; None: unknown, and taken to read all of its settings.
    """
    if function is None and not config.task.startswith(f"{MADE_IN_PYTHON}:"):
        return []  # the training may read settings that it does not take, by a function inside the unknown one
    of_function = OF_FUNCTION if function is None else inspect.signature(function).parameters
    taken = {*keyword_settings(task.training), *of_function}
    taken |= {*SETTINGS} if "settings" in taken else set()  # a parameter of this name is given all of them
    return [name for name in (*OF_FUNCTION, *(OF_TRAINING if task.training is not None else ())) if name not in taken]


def settings_read(config: SimConfig, task: Task, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the settings that runs of this task read, with their values, for config.json.

    A function that takes `settings`, or an unknown function, may read any setting. Settings that only this function
    reads are left out if they have their defaults.
    """
    left_out = {"arrivals"} if config.arrivals >= UNLIMITED else set()
    left_out |= {*OF_CLIENTS} if task.evaluate_client is None else set()
    left_out |= {"attack", *OF_PRESENCE}.difference(config.changed())
    taken = {*keyword_settings(task.training), *(() if function is None else inspect.signature(function).parameters)}
    if config.task != IMAGES:
        left_out |= {*ignored_settings(config, task, function)} - {"num_clients"}
        if function is None or "settings" in taken:
            perhaps = {*OF_FUNCTION, *(OF_TRAINING if function is None and task.training is not None else ())}
            left_out |= perhaps - {"num_clients", *config.changed(), *taken}
    left_out |= unread_settings(asdict(config)).keys() - {*config.changed(), *taken}
    return {name: value for name, value in asdict(config).items() if name not in left_out}


def unread_by_rules(rules: Iterable[RuleSpec]) -> dict[str, str]:
    """Return the settings that none of these rules reads, by name, and what would read them."""
    specs = list(rules)
    are_synchronous = all(spec.name in SYNCHRONOUS for spec in specs)
    score_updates = any(spec.build().needs.handed_in for spec in specs)
    table = {
        "a rule that is not synchronous": ("concurrency", "refill", "stale_models") if are_synchronous else (),
        "a rule that scores updates": () if score_updates else ("validation", "refresh_every"),
    }
    return {name: reader for reader, names in table.items() for name in names}


def refuse_ignored_settings(
    config: SimConfig, given: Iterable[str], task: Task, function: Callable[..., Any] | None
) -> None:
    """Raise ConfigError if one of the settings that were given is not read in runs of this task.

    Args:
        config: the settings.
        given: names of the settings that were given.
        task: the task.
        function: the function that has returned the task; None: unknown.
    """
    ignored = ignored_settings(config, task, function)
    checked = SETTINGS if task.count != config.num_clients else [name for name in SETTINGS if name != "num_clients"]
    unread: dict[str, str] = {}
    if task.training is None and (function is None or "settings" not in inspect.signature(function).parameters):
        unread = {name: reader for name, reader in unread_settings(asdict(config)).items() if name in OF_TRAINING}
    if config.task.partition(":")[0] == PAPERS and not isinstance(task.clients, Partitioned):
        unread |= dict.fromkeys(OF_DIVISION, "a data set without owners")
    if task.evaluate_client is None:
        unread |= dict.fromkeys(OF_CLIENTS, "a task with evaluate_client=")
    config.refuse((name for name in config.changed() if name in checked), unread)
    for name in given:
        if name not in ignored or name not in checked:
            continue
        if name in OF_TRAINING:
            what = f"the training function {_name(task.training)} of task {config.task}"
            taken = keyword_settings(task.training)
        else:
            what = f"the function {_name(function)} of task {config.task}"
            taken = list(inspect.signature(function).parameters) if function is not None else []
        raise ConfigError(
            f"{name} is {getattr(config, name)}, but {what} does not take it; "
            f"it takes {', '.join(taken) or 'no settings'}"
        )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
