"""The task of FADAS's Table 6: LoRA adapters of a transformer classifier, on a task of GLUE (docs/papers.md)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from afflux.sim.data.glue import read_glue
from afflux.sim.errors import ConfigError, known
from afflux.sim.models import lora
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Classification
from afflux.sim.workload.task import Partitioned, Task

if TYPE_CHECKING:
    from torch import nn


def lora_task(
    settings: SimConfig,
    dataset: str = "rte",
    checkpoint: str = "bert-base-uncased",
    rank: int = 1,
    scale: float = 8.0,
    length: int = 128,
    head: bool = False,
) -> Task:
    """Return the task of a data set and a checkpoint; only the adapters are trained, pushed and aggregated.

    The training part is divided among `num_clients` clients by the partition of the settings.

    Args:
        settings: data_dir, num_clients, partition, alpha and classes.
        dataset: rte, mrpc or sst2.
        checkpoint: folder of the model and its tokenizer, as given or below data_dir.
        rank: r of the adapters.
        scale: alpha_LoRA, the factor of the adapters' product.
        length: tokens of an example.
        head: whether the classification layer is trained and pushed, too.

    Raises:
        ConfigError: no or damaged files, or options out of range.
        MissingExtraError: transformers or peft is not installed.
    """
    lora.require_lora()
    for name, value in (("rank", rank), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale is {scale}, must be positive and finite")
    known("data", dataset, ("rte", "mrpc", "sst2"))
    given = settings.data_dir or os.environ.get("AFFLUX_DATA")
    if not given:
        raise ConfigError(
            f"data {dataset!r} is read from files: give their folder with --data-dir or AFFLUX_DATA (docs/data.md)"
        )
    data = read_glue(dataset, Path(given))
    folder = lora.checkpoint_folder(checkpoint, Path(given))

    import torch

    def model() -> "nn.Module":
        return lora.lora_classifier(folder, data.num_classes, rank, scale, head)

    x_train, x_test = (
        torch.from_numpy(lora.encode(folder, part.sentences, length)) for part in (data.train, data.test)
    )
    y_train, y_test = (torch.tensor(part.labels) for part in (data.train, data.test))
    clients = Partitioned(x_train, y_train, settings.num_clients, settings.partition, settings.heterogeneity)
    return Task(model, clients, Classification(x_test, y_test), validation=(x_train, y_train))
