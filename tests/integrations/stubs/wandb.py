"""Stands for wandb, which APPFL's trainer imports and uses if `enable_wandb` is set: it reports to a server, and brings
a dozen packages. Tests and the example's process put this folder on sys.path; nothing calls these functions.
"""


def define_metric(*names: object, **options: object) -> None:
    """Not here."""
    raise NotImplementedError("wandb is not in this environment")


def log(*metrics: object, **options: object) -> None:
    """Not here."""
    raise NotImplementedError("wandb is not in this environment")


init = log
run = None  # no run is under way
