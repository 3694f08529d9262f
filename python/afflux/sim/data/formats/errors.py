"""Errors about files: the file, the problem, and the expected value."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile

from afflux.sim.errors import ConfigError

PAGE = "docs/data.md"
"""The page that documents the formats and the folders."""


def bad_file(path: Path, found: str, expected: str) -> ConfigError:
    """Return an error that says how `path` differs from the expected file.

    Args:
        path: the file.
        found: the problem, as "has 3 dimensions".
        expected: the expected value, as "2 dimensions".
    """
    return ConfigError(f"{path} {found}; expected: {expected} (formats: {PAGE})")


#: What readers of formats raise for damaged and forged files.
_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, MemoryError, BadZipFile, zlib.error, UnpicklingError),
)


@contextmanager
def readable(path: Path, expected: str) -> Iterator[None]:
    """Convert errors of reading and decoding into a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except _ERRORS as error:
        raise bad_file(path, f"cannot be read ({type(error).__name__}: {error})", expected) from None
