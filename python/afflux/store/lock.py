"""Who may write to a folder, and what its file system promises."""

import os
from pathlib import Path
from time import monotonic, sleep

from afflux.errors import StoreError, UnavailableError

#: File systems on which allocated space stays allocated, also for pages that are written through a map.
PROMISING = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs"})

#: For so long a writer waits for those who only read in passing; seconds.
PATIENCE, INTERVAL = 0.2, 0.002


class Lock:
    """One process at a time holds it; its end, however it comes about, lets go of it."""

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        """`shared`: with others who only read; else it waits a moment for those that are about to let go.

        Raises:
            StoreError: somebody else has it.
        """
        try:
            import fcntl
        except ModuleNotFoundError:
            raise UnavailableError("[store] this system has no flock, which keeps a second writer out") from None
        path = folder / "lock"
        try:
            self._descriptor = os.open(path, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"[store] cannot lock {folder}: {error.strerror}") from None
        end = monotonic() + (0 if shared else PATIENCE)
        try:
            while True:
                try:
                    fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    return
                except OSError:
                    if monotonic() >= end:
                        raise
                sleep(INTERVAL)
        except OSError:
            self.release()
            raise StoreError(f"[store] {folder} is in use: one process at a time writes to a store") from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets the next one in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def promises_space(folder: Path) -> bool:
    """Whether what is written through a map of an allocated file cannot run out of space."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    real, best, kind = str(folder.resolve()), "", ""
    for line in lines:
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind in PROMISING
