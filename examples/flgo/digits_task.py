"""Handwritten digits as FLGo's `gen_benchmark_from_file` takes them: data, model, and how the model is evaluated."""

import torch
from sklearn.datasets import load_digits
from torch.utils import data

TEST = 297
pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
train_data = data.TensorDataset(x[:-TEST], y[:-TEST])
test_data = data.TensorDataset(x[-TEST:], y[-TEST:])


def get_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def DataLoader(dataset: data.Dataset, **options: object) -> data.DataLoader:
    return data.DataLoader(dataset, shuffle=True, **options)


def data_to_device(batch: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [part.to(device) for part in batch]


def compute_loss(model: torch.nn.Module, batch: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    inputs, labels = data_to_device(batch, device)
    return {"loss": torch.nn.functional.cross_entropy(model(inputs), labels)}


def eval(model: torch.nn.Module, loader: data.DataLoader, device: torch.device) -> dict[str, float]:
    model.eval()
    right = loss = count = 0.0
    for batch in loader:
        inputs, labels = data_to_device(batch, device)
        outputs = model(inputs)
        right += (outputs.argmax(1) == labels).sum().item()
        loss += torch.nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
        count += len(labels)
    return {"accuracy": right / count, "loss": loss / count}
