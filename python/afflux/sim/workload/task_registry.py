"""The task of the setting `task`: a registered name, or a function in a file of the user, which is executed.

`images` and `papers` are the tasks of a data set and a model (docs/data.md).
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.ops.validation import brief
from afflux.sim.data import DataSet, read_data_set
from afflux.sim.data.image_set import ImageSet
from afflux.sim.data.text_set import TextSet
from afflux.sim.errors import ConfigError, known, note_on_errors
from afflux.sim.models import build_model
from afflux.sim.workload.augmentation import AUGMENTATIONS, INITIAL_VALUES, augmented, with_initial_values
from afflux.sim.workload.config import IMAGES, LORA, MADE_IN_PYTHON, PAPERS, SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.ignored_settings import refuse_ignored_settings
from afflux.sim.workload.inputs import content_digest
from afflux.sim.workload.lora_task import lora_task
from afflux.sim.workload.rule_files import file_function, imports_beside, split_rule_name
from afflux.sim.workload.rule_specs import read_options
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Test windows of a text, evenly spaced; Shakespeare has 700,000.
MOST_TEST_WINDOWS = 10_000


def image_task(settings: SimConfig) -> Task:
    """Return the task of the settings data, model and partition: images that are divided among clients.

    Raises:
        ConfigError: no or damaged files, a data set with owners, or a model that cannot take the images.
    """
    data = read_data_set(settings.data, settings.data_dir)
    if data.owners:
        raise ConfigError(
            f"data {settings.data!r} has owners, each of which is a client: give task="
            f"papers:dataset={settings.data}:network={settings.model}"
        )
    return _task(data, settings.model, settings, logged=True)


def paper_task(
    settings: SimConfig,
    dataset: str = "cifar10",
    network: str = "ca2fl-cnn",
    inputs: str = "standardised",
    server_classes: int = 0,
    augment: str = "none",
    initial: str = "torch",
) -> Task:
    """Return the task of a data set and a model.

    Images without owners are divided among `num_clients` clients by the partition of the settings. With owners
    (femnist, shakespeare) each owner of training examples is a client.

    Args:
        settings: data_dir, num_clients, partition, alpha and classes.
        dataset: a data set of `afflux.sim.data`.
        network: a model of `afflux.sim.models`.
        inputs: the scale of images, see `ImageSet.scaled`.
        server_classes: the server's examples for rules that score updates (Zeno++) are images of so many classes, the
            first ones; 0: of all.
        augment: crop-flip or randaugment: the clients augment their images, see `augmentation`.
        initial: torch: the initial values of torch's layers; kaiming: those of FADAS's authors.

    Raises:
        ConfigError: unknown names, no or damaged files, a model that cannot take the examples, server_classes of
            another number than the data set has, or with the validation part; or augmented examples that are no images
            to be divided, or whose scale is another.
    """
    known("augment", augment, AUGMENTATIONS)
    known("initial", initial, INITIAL_VALUES)
    data = read_data_set(dataset, settings.data_dir)
    task = _task(data, network, settings, inputs=inputs)
    if initial != "torch":
        task = replace(task, model=partial(_initialised, task.model, initial))
    if augment != "none":
        clients, scale = task.clients, (inputs, settings.part)
        if not (isinstance(data, ImageSet) and isinstance(clients, Partitioned)) or scale != ("standardised", "test"):
            raise ConfigError("augment needs images without owners, standardised inputs and the test part")
        task = replace(task, clients=augmented(clients, data, augment), seeds_torch=True)
    if not server_classes:
        return task
    if isinstance(data, TextSet) or not 1 <= server_classes <= data.num_classes:
        raise ConfigError(f"server_classes is {server_classes}, must be 0 or a number of classes of {dataset}'s images")
    if settings.part == "validation":
        raise ConfigError("server_classes: the server's examples would be those of the validation part, too")
    x, y = task.validation
    own = y < server_classes
    return replace(task, validation=(x[own], y[own]))


def _initialised(model: "Callable[..., nn.Module]", kind: str, rng: np.random.Generator) -> "nn.Module":
    return with_initial_values(model(rng), kind, rng)


def _task(data: DataSet, network: str, settings: SimConfig, logged: bool = False, inputs: str = "standardised") -> Task:
    """Return the task; `logged`: its source is the digest of the data's files, as in the logs of the setting `data`."""
    import torch

    def model(rng: np.random.Generator) -> "nn.Module":
        return build_model(network, data.shape, data.num_classes, rng)

    model(np.random.Generator(np.random.PCG64(0)))  # unknown names and wrong shapes before the first run
    shards = [shard for shard in data.shards() if len(shard)]
    if isinstance(data, TextSet):
        if not len(data.test):
            raise ConfigError(f"data {data.name!r} has no test part")
        spaced = np.linspace(0, len(data.test) - 1, min(len(data.test), MOST_TEST_WINDOWS)).astype(np.int64)

        def examples(starts: np.ndarray) -> "tuple[Tensor, Tensor]":
            x, y = data.examples(starts)
            return torch.from_numpy(x), torch.from_numpy(y)

        def own_windows(client: int) -> "tuple[Tensor, Tensor]":
            return examples(data.train[shards[client]])

        test = Classification(*examples(data.test[spaced]))
        return Task(model, own_windows, test, num_clients=len(shards), seeds_torch=False, source=data)
    x, y, x_test, y_test = _tensors(data, inputs)

    def own_images(client: int) -> "tuple[Tensor, Tensor]":
        return x[shards[client]], y[shards[client]]

    divided = Partitioned(x, y, settings.num_clients, settings.partition, settings.heterogeneity)
    return Task(
        model,
        own_images if shards else divided,
        Classification(x_test, y_test),
        num_clients=len(shards) or None,
        validation=(x, y),
        seeds_torch=False,
        source=(_digest_of_files(data) if logged else None) or data,
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
    annotations = {option: parameter.annotation for option, parameter in taken.items() if option != "settings"}
    return options | read_options(f"task {config.task}", assignments, name, annotations)
