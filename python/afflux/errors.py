"""The two kinds of errors that afflux raises; after either of them nothing has changed."""

from afflux._engine import AffluxError, UnavailableError

__all__ = ["AffluxError", "UnavailableError"]
