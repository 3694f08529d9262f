"""The errors that afflux raises; after any of them nothing has changed."""

from afflux._engine import AffluxError, UnavailableError

__all__ = ["AffluxError", "BusyError", "UnavailableError"]


class BusyError(AffluxError):
    """All slots are taken: push again later."""
