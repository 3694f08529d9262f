"""The task of the setting `task`: a registered name, or a function in a file of the user, which is executed."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from afflux.ops.validation import brief
from afflux.sim.errors import ConfigError, known, note_on_errors
from afflux.sim.workload.config import IMAGES, LORA, MADE_IN_PYTHON, PAPERS, SimConfig
from afflux.sim.workload.data_tasks import image_task, paper_task
from afflux.sim.workload.ignored_settings import refuse_ignored_settings
from afflux.sim.workload.lora_task import lora_task
from afflux.sim.workload.rule_files import file_function, imports_beside, split_rule_name
from afflux.sim.workload.rule_specs import option_value, split_assignments
from afflux.sim.workload.task import Task

TASKS: dict[str, Callable[..., Task]] = {IMAGES: image_task, PAPERS: paper_task, LORA: lora_task}
"""Functions that make tasks, by name; see `register_task`."""


def register_task(name: str, function: Callable[..., Task]) -> None:
    """Register a task under a name, for the setting `task` and the command line's --task.

    Args:
        name: its name, without ':'.
        function: returns a `Task`. A parameter `settings` is given the settings, and one with the name of a setting,
            such as num_clients, that setting; others are options, as in `--task NAME:OPTION=VALUE`.

    Raises:
        ConfigError: the name is taken, or cannot be one.
    """
    if ":" in name or ".py" in name or not name.isprintable() or not name:
        raise ConfigError(f"{brief(name)} cannot be the name of a task")
    if TASKS.setdefault(name, function) is not function:
        raise ConfigError(f"there is a task {brief(name)} already")


def task_function(task: str) -> Callable[..., Task]:
    """Return the function that the setting `task` names; a file is executed.

    Raises:
        ConfigError: an unknown task, file or function, or a task that only its own program can make.
    """
    name, _ = split_rule_name(task)
    if name == MADE_IN_PYTHON:
        raise ConfigError(f"the task {task} was made in Python: continue it in that program")
    if name.partition(":")[0].endswith(".py"):
        return file_function(name, "task")
    known("task", name, TASKS)
    return TASKS[name]


def build_task(config: SimConfig, given: Iterable[str] = ()) -> Task:
    """Return the task that the settings name; a file is executed.

    Args:
        config: the settings.
        given: names of settings that were given, in addition to those that differ from their defaults.

    Raises:
        ConfigError: an unknown task, file, function or option, a task that only its own program can make, or a setting
            that was given, but that the task does not take.
    """
    function = task_function(config.task)
    name, assignments = split_rule_name(config.task)
    options = _options(config, name, function, assignments)
    try:
        with imports_beside(name), note_on_errors(f"while task {config.task} was made"):
            task = function(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {config.task}: {error}") from error
    if not isinstance(task, Task):
        raise ConfigError(f"task {config.task}: it returns {brief(task)}, not an afflux.sim.Task")
    if config.task != IMAGES:
        refuse_ignored_settings(config, [*given, *config.changed()], task, function)
    return task


def _options(config: SimConfig, name: str, function: Callable[..., Any], assignments: list[str]) -> dict[str, Any]:
    taken = inspect.signature(function, eval_str=True).parameters
    settings = {field.name for field in fields(SimConfig)}
    options = {option: getattr(config, option) for option in taken if option in settings}
    if "settings" in taken:
        options["settings"] = config
    own = [option for option in taken if option != "settings"]
    for option, value in split_assignments(f"task {config.task}", assignments, name, own).items():
        try:
            options[option] = option_value(value, taken[option].annotation)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task {config.task}: {option}: {error}") from None
    return options
