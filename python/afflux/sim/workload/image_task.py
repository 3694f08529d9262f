"""The task of the settings data, model and partition: images of one of the data sets, divided among clients."""

from typing import TYPE_CHECKING

import numpy as np

from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.models import build_model
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import nn


def image_task(settings: SimConfig) -> Task:
    """Return the task of the settings; raise ConfigError if the file of the data set is missing."""
    import torch

    data = settings.load_data()

    def model(rng: np.random.Generator) -> "nn.Module":
        return build_model(settings.model, data.shape, data.num_classes, rng)

    x, y = torch.tensor(data.x_train), torch.tensor(data.y_train)
    clients = Partitioned(x, y, settings.num_clients, settings.partition, settings.heterogeneity)
    test = Classification(torch.tensor(data.x_test), torch.tensor(data.y_test))
    return Task(model, clients, test, validation=(x, y), seeds_torch=False, source=data.digest or None)
