"""Stands for piq 0.8, which APPFL's reports on image data import: it needs torchvision, which is not there beside the
CPU build of torch. Tests and the example's process put this folder on sys.path; nothing calls these functions.
"""


def brisque(images: object) -> None:
    """Not here."""
    raise NotImplementedError("piq.brisque is not in this environment")


def total_variation(images: object) -> None:
    """Not here."""
    raise NotImplementedError("piq.total_variation is not in this environment")
