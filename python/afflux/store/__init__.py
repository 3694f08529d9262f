"""A server's state in a folder: plain Zarr arrays, and an index in SQLite. It survives the process."""

from afflux.store.inspect import Info, export, export_params, info
from afflux.store.repair import Health, Repair, check, repair
from afflux.store.resharding import reshard

__all__ = ["Health", "Info", "Repair", "check", "export", "export_params", "info", "repair", "reshard"]
