"""Client-side optimizers: what is added to the stochastic gradient before y <- y - client_lr * gradient.

sgd        weight_decay * y
fedprox    mu * (y - x), x the pulled model: the gradient of mu |y - x|^2 / 2 (Li et al., 2020)
fedasync   the same term, which FedAsync (Xie et al., 2019) calls its proximal rho
scaffold   c - c_i, constant during one local training (Karimireddy et al., 2020; `Controls`)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

PROXIMAL = ("fedprox", "fedasync")

Part: TypeAlias = Callable[["Tensor", "Tensor"], object]
"""Adds to the gradient (d,), its first argument, in place; the second is the local model y (d,)."""


def decay(weight: float) -> Part:
    """Weight decay: gradient += weight * y."""
    return lambda gradient, local: gradient.add_(local, alpha=weight)


def proximal(mu: float, pulled: "Tensor") -> Part:
    """FedProx's mu and FedAsync's rho: gradient += mu * (y - pulled)."""
    return lambda gradient, local: gradient.add_(local - pulled, alpha=mu)


def shifted(shift: "Tensor") -> Part:
    """SCAFFOLD: gradient += shift, which is c - c_i."""
    return lambda gradient, local: gradient.add_(shift)
