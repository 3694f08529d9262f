"""Who may write to a folder, and what its file system promises."""

import os
from pathlib import Path
from time import monotonic, sleep

from afflux.ops.errors import StoreError, UnavailableError

#: File systems on which allocated space stays allocated, also for pages that are written through a map.
PROMISING = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs"})

LOCK = "lock"  #: in a store's folder

#: For so long a writer waits for those who only read in passing; seconds.
PATIENCE, INTERVAL = 1.0, 0.002

#: The processes that have taken a lock to write here, this one or those that it was forked from, by its file.
_WRITERS: dict[tuple[int, int], int] = {}


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
        try:
            self._descriptor = os.open(folder / LOCK, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"[store] cannot lock {folder}: {error.strerror}") from None
        status = os.fstat(self._descriptor)
        self._file, self._shared = (status.st_dev, status.st_ino), shared
        self._owner: int | None = None
        end = monotonic() + (0 if shared or self._is_ours else PATIENCE)
        try:
            while True:
                try:
                    fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    self._owner = os.getpid()
                    if not shared:
                        _WRITERS[self._file] = self._owner
                    return
                except OSError:
                    if monotonic() >= end:
                        raise
                sleep(INTERVAL)
        except OSError:
            self.release()
            alone = "" if shared else "one process at a time writes to a store, and "
            who = "this very process has a server there: close() it" if self._is_ours else _holder(*self._file)
            raise StoreError(f"[store] {folder} is in use: {alone}{who}") from None
        except BaseException:
            self.release()
            raise

    @property
    def _is_ours(self) -> bool:
        """Whether this very process writes there."""
        return _WRITERS.get(self._file) == os.getpid()

    def release(self) -> None:
        """Lets the next one in. In a forked child only its own descriptor goes: the lock is its parent's."""
        if self._owner == os.getpid():
            import fcntl

            if not self._shared:
                _WRITERS.pop(self._file, None)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # else a child that still runs would keep it
        self._owner = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _holder(device: int, inode: int) -> str:
    """Who has locked a file, as far as the system tells."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    name = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for fields in map(str.split, lines):
        if fields[1] == "FLOCK" and fields[5] == name:
            return f"process {fields[4]} {'reads' if fields[3] == 'READ' else 'writes to'} it"
    return "another process has it"


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
