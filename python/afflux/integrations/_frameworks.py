"""Frameworks that are not installed, or in another version than the one that their adapter is tested with."""

from typing import NoReturn
from warnings import warn


def missing(package: str, extra: str, error: ImportError) -> NoReturn:
    """Raises the error of an adapter whose framework is not installed."""
    raise ImportError(
        f"afflux.integrations.{extra} needs {package}: pip install 'afflux[{extra}]' ({error})", name=error.name
    ) from error


def warn_of_version(package: str, tested: str, found: str) -> None:
    """Warns of a version of a framework that its adapter is not tested with."""
    if not f"{found}.".startswith(f"{tested}."):
        warn(
            f"afflux.integrations.{package} is tested with {package} {tested}; {found} is installed", RuntimeWarning, 3
        )
