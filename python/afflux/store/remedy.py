"""What to do about damage: errors that tell of it end with this."""

from pathlib import Path
from shlex import quote

#: Of all but rows, their sum and what Zarr knows of the arrays.
BACKUP = "only a backup of the folder brings it back"


def remedy(store: Path, array: str) -> str:
    """For what lies in an array of a store."""
    if array == "rows":
        return f"`afflux store repair {quote(str(store))}`, when no server has it open, drops the rows that are lost"
    if array == "sum":
        return f"`afflux store repair {quote(str(store))}` makes it anew"
    return BACKUP
