"""Peers are optional: their modules are imported when a row that needs them runs, and only then."""

import functools
import importlib
import warnings
from typing import Any


@functools.cache
def find(module: str) -> Any:
    """A peer's module; their imports warn about many things, and one of them changes how warnings look."""
    form = warnings.formatwarning
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    finally:
        warnings.formatwarning = form


@functools.cache
def absent(*modules: str) -> str | None:
    """Why one of these modules cannot be had here; None if all can."""
    for module in modules:
        try:
            find(module)
        except Exception as reason:  # whatever a peer's import raises, the others run
            return f"{type(reason).__name__}: {reason}"
    return None
