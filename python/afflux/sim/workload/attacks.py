"""What hostile clients push in place of their updates: the laws of the setting attack."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from afflux.sim.workload.availability import MOST, NONE, check_range, read_law
from afflux.sim.workload.random_streams import StreamPurpose, random_stream


@dataclass(frozen=True)
class Scaled:
    """A hostile client pushes its update times `factor`. Its buffers, loss and number of examples stay as they are."""

    clients: int  #: the number of hostile clients: those with the lowest numbers, of the ones that hold data
    factor: float = -1.0

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        check_range(self, 1, MOST, "clients")
        check_range(self, -MOST, MOST, "factor")

    def __call__(self, update: np.ndarray, seed: int) -> np.ndarray:
        """Return the (d,) float32 vector that a hostile client pushes in a run with this seed."""
        return np.float32(self.factor) * update


class Copies(Scaled):
    """All hostile clients push one direction, drawn once, at `factor` times the length of their updates."""

    def __call__(self, update: np.ndarray, seed: int) -> np.ndarray:
        """See the base class."""
        direction = random_stream(seed, StreamPurpose.ATTACK).standard_normal(len(update))
        scale = self.factor * np.linalg.norm(update.astype(np.float64)) / np.linalg.norm(direction)
        return np.asarray(scale * direction, np.float32)


#: A dataclass whose fields are the options, and the options that the name sets.
ATTACKS: Mapping[str, Any] = {"sign-flip": (Scaled, {}), "scaled": (Scaled, {"factor": 10.0}), "copies": (Copies, {})}


def attack_law(text: str) -> Scaled | None:
    """Return the law of `NAME:clients=...:factor=...`, a name of `ATTACKS`; None: no client is hostile.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or no number of clients.
    """
    return None if text == NONE else read_law("attack", text, ATTACKS, (NONE,))[0]
