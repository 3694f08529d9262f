"""Errors and warnings for frameworks that are not installed, or whose version was not tested."""

from typing import NoReturn
from warnings import warn


def missing(package: str, extra: str, error: ImportError) -> NoReturn:
    """Raise the error of an adapter whose framework is not installed."""
    raise ImportError(
        f"afflux.integrations.{extra} needs {package}: pip install 'afflux[{extra}]' ({error})", name=error.name
    ) from error


def warn_of_version(package: str, tested: str, found: str) -> None:
    """Warn about a version of a framework with which its adapter was not tested."""
    if not f"{found}.".startswith(f"{tested}."):
        warn(
            f"afflux.integrations.{package} is tested with {package} {tested}; {found} is installed", RuntimeWarning, 3
        )
