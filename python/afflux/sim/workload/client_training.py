"""The clients' training by one of the built-in optimizers, for `Simulation`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClientTraining:
    """Settings of the clients' training, by the names that `SimConfig` has for them."""

    settings: Mapping[str, Any]


def sgd(
    lr: float = 0.1,
    *,
    steps: int = 3,
    epochs: int = 0,
    batch_size: int = 16,
    weight_decay: float = 0.0,
    steps_law: str = "constant",
    examples: str = "data",
    drop_last: bool = False,
) -> ClientTraining:
    """Return training by mini-batch SGD on the mean loss.

    The data of a client are a pair (x, y) of arrays or torch tensors, or a torch Dataset of such pairs. x may also be a
    tuple or a dict of arrays: the arguments of the model. Items that are dicts, as in a Dataset of Hugging Face, have y
    under the name label or labels, and x under the others.

    Args:
        lr: learning rate.
        steps: mini-batch steps.
        epochs: if not 0, whole epochs instead of steps.
        batch_size: of a mini-batch.
        weight_decay: added to the gradient, times the params.
        steps_law: constant: `steps` each; uniform: drawn from 1 to twice as many.
        examples: the number of examples that a client reports: of its data ("data"), or of a batch ("batch").
        drop_last: whether the last batch of an epoch is left out if it is smaller; a batch of one example has no
            statistics for BatchNorm.

    Returns:
        The training, for `Simulation`.
    """
    settings: dict[str, Any] = {"client_optimizer": "sgd", "client_lr": lr, "local_steps": steps}
    settings |= {"local_epochs": epochs, "batch_size": batch_size, "weight_decay": weight_decay}
    settings |= {"steps_law": steps_law, "examples": examples} | ({"drop_last": drop_last} if drop_last else {})
    return ClientTraining(settings)


def fedprox(lr: float = 0.1, *, mu: float = 0.1, **options: Any) -> ClientTraining:
    """Return training by SGD with the proximal term mu |y - x|^2 / 2, x the pulled model (FedProx, FedAsync).

    Other arguments as for `sgd`.
    """
    return ClientTraining({**sgd(lr, **options).settings, "client_optimizer": "fedprox", "mu": mu})


def scaffold(lr: float = 0.1, *, control_codec: str = "float32", **options: Any) -> ClientTraining:
    """Return training by SGD with SCAFFOLD's control variates, which the server stores in `control_codec`.

    Other arguments as for `sgd`.
    """
    settings = {"client_optimizer": "scaffold", "control_codec": control_codec}
    return ClientTraining({**sgd(lr, **options).settings, **settings})
