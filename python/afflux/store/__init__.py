"""A server's state in a folder that survives the process: plain Zarr arrays, and an index in SQLite."""

from afflux.store.extract import export
from afflux.store.health import Health, Repair, check, repair
from afflux.store.tools import Info, info

__all__ = ["Health", "Info", "Repair", "check", "export", "info", "repair"]
