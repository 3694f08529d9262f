"""`torch`, or None if it is not installed: it is a baseline of the benchmark, and not a dependency."""

from collections.abc import Callable
from typing import Any

torch: Any
try:
    import torch
except ModuleNotFoundError:
    torch = None

Tensor = Any  #: torch.Tensor; in formulas that CuPy uses, too, also CuPy's array
Formula = Callable[..., Tensor]


def set_threads(num_threads: int) -> None:
    if torch is not None:
        torch.set_num_threads(num_threads)
