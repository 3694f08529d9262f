"""The model and the metric of the example, for APPFL's configuration."""

import numpy as np
import torch


class Digits(torch.nn.Sequential):
    """One hidden layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))


def accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    return float((outputs.argmax(1) == labels).mean())
