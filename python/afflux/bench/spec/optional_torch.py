"""torch is a baseline of the benchmark, and not a dependency: `torch` is None if it is not installed."""

from collections.abc import Callable
from typing import Any

torch: Any
try:
    import torch
except ModuleNotFoundError:
    torch = None

Tensor = Any  #: torch.Tensor; in formulas that serve CuPy too, its array
Formula = Callable[..., Tensor]


def set_threads(num_threads: int) -> None:
    if torch is not None:
        torch.set_num_threads(num_threads)
