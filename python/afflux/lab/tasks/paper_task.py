"""The task of a paper: a data set and a network (docs/reference/data.md), images or text."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from afflux.lab.tasks.augmentation import AUGMENTATIONS, augmented
from afflux.lab.tasks.registry import image_set_task, network_of
from afflux.lab.tasks.text_set import TextSet
from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.sim.data import read_data_set
from afflux.sim.data.image_set import ImageSet
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import Tensor

#: Test windows of a text, evenly spaced; Shakespeare has 700,000.
MOST_TEST_WINDOWS = 10_000


def paper_task(
    settings: SimConfig,
    dataset: str = "cifar10",
    network: str = "ca2fl-cnn",
    inputs: str = "standardised",
    server_classes: int = 0,
    augment: str = "none",
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

    Raises:
        ConfigError: unknown names, no or damaged files, a model that cannot take the examples, server_classes of
            another number than the data set has, or with the validation part; or augmented examples that are no images
            to be divided, or whose scale is another.
    """
    known("augment", augment, AUGMENTATIONS)
    data = read_data_set(dataset, settings.data_dir)
    if isinstance(data, TextSet):
        task = text_task(data, network)
    else:
        task = image_set_task(data, network, settings, data, inputs)
    if augment != "none":
        clients = task.clients
        if not (isinstance(data, ImageSet) and isinstance(clients, Partitioned)) or inputs != "standardised":
            raise ConfigError("augment needs images without owners, and standardised inputs")
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


def text_task(data: TextSet, network: str) -> Task:
    """Return the task of a text and a model; each owner of training windows is a client."""
    import torch

    model, shards = network_of(network, data), [shard for shard in data.shards() if len(shard)]
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
