"""The errors that afflux raises; after any of them nothing has changed."""

from afflux._engine import AffluxError, UnavailableError

__all__ = ["AffluxError", "BusyError", "StoreError", "UnavailableError"]


class BusyError(AffluxError):
    """All slots are taken: push again later."""


class StoreError(AffluxError):
    """The folder of a store cannot be used as asked; what was committed last is still there."""

    joined: bool | None = None  #: of a `Server.push`: whether the arrival has joined, and must not be pushed again
