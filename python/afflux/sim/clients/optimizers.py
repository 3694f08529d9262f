"""Client-side optimizers: terms that are added to the stochastic gradient before y <- y - client_lr * gradient.

sgd        weight_decay * y
fedprox    mu * (y - x), x the pulled model: the gradient of mu |y - x|^2 / 2 (Li et al., 2020)
fedasync   the same term, which FedAsync (Xie et al., 2019) calls its proximal rho
scaffold   c - c_i, constant during one local training (see `control_variates`)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

GradientTerm: TypeAlias = Callable[["Tensor", "Tensor"], object]
"""Called with the gradient (d,), to which it adds in place, and the local model y (d,)."""


def weight_decay_term(weight: float) -> GradientTerm:
    """Return the term of weight decay: gradient += weight * y."""
    return lambda gradient, local: gradient.add_(local, alpha=weight)


def proximal_term(mu: float, pulled: "Tensor") -> GradientTerm:
    """Return the proximal term, FedProx's mu or FedAsync's rho: gradient += mu * (y - pulled)."""
    return lambda gradient, local: gradient.add_(local - pulled, alpha=mu)


def shift_term(shift: "Tensor") -> GradientTerm:
    """Return SCAFFOLD's term: gradient += shift, which is c - c_i."""
    return lambda gradient, local: gradient.add_(shift)
