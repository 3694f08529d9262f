"""A server's state in a folder that survives the process: plain Zarr arrays, and an index in SQLite."""

from afflux.store.inspect import Info, export, export_params, info
from afflux.store.repair import Health, Repair, check, repair

__all__ = ["Health", "Info", "Repair", "check", "export", "export_params", "info", "repair"]
