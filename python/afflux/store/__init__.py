"""What a server keeps per client, in memory or in a folder that survives it."""

from afflux.store.disk import DiskRows
from afflux.store.extract import export
from afflux.store.health import Health, Repair, check, repair
from afflux.store.memory import MemoryRows
from afflux.store.rows import CachedRows, Rows, row_key
from afflux.store.tools import Info, info

__all__ = [
    "CachedRows",
    "DiskRows",
    "Health",
    "Info",
    "MemoryRows",
    "Repair",
    "Rows",
    "check",
    "export",
    "info",
    "repair",
    "row_key",
]
