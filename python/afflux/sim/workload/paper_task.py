"""The task of one of the papers' data sets and one of their models (docs/data.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from afflux.sim.data.image_set import ImageSet
from afflux.sim.data.registry import read_data_set
from afflux.sim.data.text_set import TextSet
from afflux.sim.errors import ConfigError
from afflux.sim.models.registry import build_model
from afflux.sim.models.shapes import Shape
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Test windows of a text, evenly spaced; Shakespeare has 700,000.
MOST_TEST_WINDOWS = 10_000


def paper_task(settings: SimConfig, dataset: str = "cifar10", network: str = "ca2fl-cnn") -> Task:
    """Return the task of a data set and a model.

    Images without owners are divided among `num_clients` clients by the partition of the settings. With owners
    (femnist, shakespeare) each owner of training examples is a client.

    Args:
        settings: data_dir, num_clients, partition, alpha and classes.
        dataset: a data set of `afflux.sim.data.registry`.
        network: a model of `afflux.sim.models.registry`.

    Raises:
        ConfigError: unknown names, no or damaged files, or a model that cannot take the examples.
    """
    data = read_data_set(dataset, Path(settings.data_dir) if settings.data_dir else None)
    if isinstance(data, TextSet):
        return _text_task(data, network)
    return _image_task(data, network, settings)


def _image_task(data: ImageSet, network: str, settings: SimConfig) -> Task:
    import torch

    x_train, x_test = (torch.from_numpy(part) for part in data.scaled())
    y_train, y_test = torch.tensor(data.y_train), torch.tensor(data.y_test)
    model = _model(network, data.shape, data.num_classes)
    evaluate = Classification(x_test, y_test)
    if not data.owners:
        clients = Partitioned(x_train, y_train, settings.num_clients, settings.partition, settings.heterogeneity)
        return Task(model, clients, evaluate, validation=(x_train, y_train), seeds_torch=False, source=data)
    shards = _not_empty(data.shards())

    def own_images(client: int) -> "tuple[Tensor, Tensor]":
        return x_train[shards[client]], y_train[shards[client]]

    validation = (x_train, y_train)
    return Task(
        model, own_images, evaluate, num_clients=len(shards), validation=validation, seeds_torch=False, source=data
    )


def _text_task(data: TextSet, network: str) -> Task:
    shards = _not_empty(data.shards())
    if not len(data.test):
        raise ConfigError(f"data {data.name!r} has no test part")
    spaced = np.linspace(0, len(data.test) - 1, min(len(data.test), MOST_TEST_WINDOWS)).astype(np.int64)

    def own_windows(client: int) -> "tuple[Tensor, Tensor]":
        return _tensors(data, data.train[shards[client]])

    model = _model(network, (data.window,), data.num_classes)
    evaluate = Classification(*_tensors(data, data.test[spaced]))
    return Task(model, own_windows, evaluate, num_clients=len(shards), seeds_torch=False, source=data)


def _model(network: str, shape: Shape, num_classes: int) -> Any:
    def build(rng: np.random.Generator) -> "nn.Module":
        return build_model(network, shape, num_classes, rng)

    # Unknown names and wrong shapes before the first run.
    build(np.random.Generator(np.random.PCG64(0)))
    return build


def _tensors(data: TextSet, starts: np.ndarray) -> "tuple[Tensor, Tensor]":
    import torch

    windows, targets = data.examples(starts)
    return torch.from_numpy(windows), torch.from_numpy(targets)


def _not_empty(shards: list[np.ndarray]) -> list[np.ndarray]:
    return [shard for shard in shards if len(shard)]
