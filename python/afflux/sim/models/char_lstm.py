"""LEAF's network for Shakespeare, as in Anarchic FL: the next character after a window of characters."""

import torch
from torch import nn

from afflux.sim.errors import ConfigError
from afflux.sim.models.shapes import Shape

EMBEDDING = 8
UNITS = 100
LAYERS = 2


class CharLSTM(nn.Module):
    """An embedding of 8 dimensions, two LSTM layers of 100 units, and a linear layer on the last state."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, UNITS, LAYERS, batch_first=True)
        self.output = nn.Linear(UNITS, num_classes)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return (n, num_classes) scores of the next character, from (n, window) int64."""
        states, _ = self.lstm(self.embedding(windows))
        scores: torch.Tensor = self.output(states[:, -1])
        return scores


def char_lstm(shape: Shape, num_classes: int) -> nn.Module:
    """Return Anarchic FL's network (appendix E.1); the classes are the characters."""
    if len(shape) != 1:
        raise ConfigError(f"model 'char-lstm' needs windows of characters, not examples of shape {shape}")
    return CharLSTM(num_classes)
