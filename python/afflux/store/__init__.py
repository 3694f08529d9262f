"""What a server keeps per client, in memory or in a folder that survives it."""

from afflux.store.disk import DiskRows
from afflux.store.memory import MemoryRows
from afflux.store.rows import CachedRows, Rows, row_key

__all__ = ["CachedRows", "DiskRows", "MemoryRows", "Rows", "row_key"]
