"""Peers are optional: their modules are imported when a row that needs them runs, and only then."""

import functools
import importlib
import warnings
from typing import Any


@functools.cache
def find(module: str) -> Any:
    """Import a peer's module, without its warnings; one peer changes the format of warnings, which is restored."""
    form = warnings.formatwarning
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    finally:
        warnings.formatwarning = form


@functools.cache
def absent(*modules: str) -> str | None:
    """Return the reason why one of these modules cannot be imported here; None if all can."""
    for module in modules:
        try:
            find(module)
        except Exception as reason:  # any error of a peer's import must not stop the other peers
            return f"{type(reason).__name__}: {reason}"
    return None
