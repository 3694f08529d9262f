"""The task of the setting `task`: a registered name, or a function in a file of the user, which is executed.

`images` and `papers` are the tasks of a data set and a model (docs/reference/data.md).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.lab.tasks.ignored_settings import refuse_ignored_settings
from afflux.lab.tasks.inputs import content_digest
from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief, known
from afflux.rules.files import file_function, imports_beside, split_rule_name
from afflux.rules.specs import read_options
from afflux.sim.data import read_data_set
from afflux.sim.data.image_set import ImageSet
from afflux.sim.errors import note_on_errors
from afflux.sim.models import build_model
from afflux.sim.workload.config import IMAGES, LORA, MADE_IN_PYTHON, PAPERS, SETTINGS, SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.random_streams import restored_globals, seed_globals
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import Tensor, nn


def image_task(settings: SimConfig) -> Task:
    """Return the task of the settings data, model and partition: images that are divided among clients.

    Raises:
        ConfigError: no or damaged files, or a model that cannot take the images.
    """
    data = read_data_set(settings.data, settings.data_dir)
    # In the logs of the setting `data`, the digest of its files names the data.
    return image_set_task(data, settings.model, settings, _digest_of_files(data) or data)


def network_of(name: str, data: Any) -> "Callable[[np.random.Generator], nn.Module]":
    """Return the function that makes the model; raise ConfigError for an unknown name, or one that takes other data."""

    def model(rng: np.random.Generator) -> "nn.Module":
        return build_model(name, data.shape, data.num_classes, rng)

    model(np.random.Generator(np.random.PCG64(0)))  # before the first run
    return model


def image_set_task(
    data: ImageSet, network: str, settings: SimConfig, source: Any, inputs: str = "standardised"
) -> Task:
    """Return the task of images, those of each owner or divided among clients, and a model.

    Args:
        data: the images.
        network: the name of the model.
        settings: num_clients, partition, alpha and classes.
        source: `Task.source`.
        inputs: the scale of the images, see `ImageSet.scaled`.
    """
    model, shards = network_of(network, data), [shard for shard in data.shards() if len(shard)]
    x, y, x_test, y_test = _tensors(data, inputs)

    divided = Partitioned(x, y, settings.num_clients, settings.partition, settings.heterogeneity)
    return Task(
        model,
        (lambda client: (x[shards[client]], y[shards[client]])) if shards else divided,
        Classification(x_test, y_test),
        num_clients=len(shards) or None,
        validation=(x, y),
        seeds_torch=False,
        source=source,
    )


@lru_cache(maxsize=2)
def _tensors(data: ImageSet, inputs: str) -> "tuple[Tensor, ...]":
    """Return scaled training images, their labels, and both of the test part, for all runs of this process."""
    import torch

    x_train, x_test = data.scaled(inputs)
    return torch.from_numpy(x_train), torch.tensor(data.y_train), torch.from_numpy(x_test), torch.tensor(data.y_test)


@lru_cache(maxsize=2)
def _digest_of_files(data: ImageSet) -> str | None:
    return content_digest(data.files()) if data.files else None


#: Functions that make tasks by name, or MODULE:FUNCTION, which is imported at its first use.
TASKS: Mapping[str, Callable[..., Task] | str] = {
    IMAGES: image_task,
    PAPERS: "afflux.lab.tasks.paper_task:paper_task",
    LORA: "afflux.lab.tasks.lora_task:lora_task",
}


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
    function = TASKS[name]
    return resolve_name(function) if isinstance(function, str) else function


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
        with imports_beside(name), note_on_errors(f"while task {config.task} was made"), restored_globals():
            seed_globals(0)
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
    options = {option: getattr(config, option) for option in taken if option in SETTINGS}
    if "settings" in taken:
        options["settings"] = config
    annotations = {option: parameter.annotation for option, parameter in taken.items() if option != "settings"}
    return options | read_options(f"task {config.task}", assignments, name, annotations)
