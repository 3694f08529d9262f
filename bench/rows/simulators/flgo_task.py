"""The parts of FLGo's tasks: the data, the loss, and two loaders of batches."""

from collections.abc import Iterator
from typing import Any

from bench.rows.simulators.workload import data, loss_of
from bench.spec.optional_torch import torch

train_data = torch.utils.data.TensorDataset(*data())


class BatchesByIndex:
    """Shuffled batches of a client's examples; one index operation takes each batch out of the data."""

    def __init__(self, dataset: Any, batch_size: int, **options: Any) -> None:
        self._tensors, self._rows = dataset.dataset.tensors, torch.as_tensor(dataset.indices)
        self._size = batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._rows[torch.randperm(len(self._rows))].split(self._size):
            yield [tensor[batch] for tensor in self._tensors]


def torch_loader(dataset: Any, **options: Any) -> Any:
    """Return torch's own loader, shuffled."""
    return torch.utils.data.DataLoader(dataset, shuffle=True, **options)


def data_to_device(batch: Any, device: Any) -> Any:
    return batch


def compute_loss(model: Any, batch: Any, device: Any) -> dict[str, Any]:
    return {"loss": loss_of(model, *batch)}


def eval(model: Any, loader: Any, device: Any) -> dict[str, float]:
    """Return no metrics; FLGo requires this function, and nothing is evaluated."""
    return {}


def get_model() -> Any:
    """Raise NotImplementedError: FLGo requires this function, but the model is an argument of `flgo.init`."""
    raise NotImplementedError
