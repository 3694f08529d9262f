"""The tasks of a data set and a model (docs/data.md): of the settings data and model, or of the options of `papers`."""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from afflux.sim.data.image_set import ImageSet
from afflux.sim.data.registry import DataSet, read_data_set
from afflux.sim.data.text_set import TextSet
from afflux.sim.errors import ConfigError
from afflux.sim.models.registry import build_model
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.inputs import content_digest
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
) -> Task:
    """Return the task of a data set and a model.

    Images without owners are divided among `num_clients` clients by the partition of the settings. With owners
    (femnist, shakespeare) each owner of training examples is a client.

    Args:
        settings: data_dir, num_clients, partition, alpha and classes.
        dataset: a data set of `afflux.sim.data.registry`.
        network: a model of `afflux.sim.models.registry`.
        inputs: the scale of images, see `ImageSet.scaled`.
        server_classes: the server's examples for rules that score updates (Zeno++) are images of so many classes, the
            first ones; 0: of all.

    Raises:
        ConfigError: unknown names, no or damaged files, a model that cannot take the examples, or server_classes of
            another number than the data set has, or with the validation part.
    """
    data = read_data_set(dataset, settings.data_dir)
    task = _task(data, network, settings, inputs=inputs)
    if not server_classes:
        return task
    if isinstance(data, TextSet) or not 1 <= server_classes <= data.num_classes:
        raise ConfigError(f"server_classes is {server_classes}, must be 0 or a number of classes of {dataset}'s images")
    if settings.part == "validation":
        raise ConfigError("server_classes: the server's examples would be those of the validation part, too")
    x, y = task.validation
    own = y < server_classes
    return replace(task, validation=(x[own], y[own]))


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
