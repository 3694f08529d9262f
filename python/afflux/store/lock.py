"""The lock of a store's folder, and whether its file system guarantees allocated space."""

import errno
import fcntl
import os
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

from afflux._engine import children, close_descriptor, close_in_children, forks
from afflux.ops.errors import StoreError
from afflux.store.files import open_regular, reason

#: File systems on which allocated space stays allocated, also for writes through a map.
PROMISING = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs"})

LOCK = "lock"  #: in a store's folder

#: Seconds for which a writer waits for readers, and seconds between two attempts.
PATIENCE, INTERVAL = 1.0, 0.002

#: The errors of file systems that have no locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

#: `forks` in the process that holds a lock for writing, by the lock's file: this process, or an ancestor of it.
_WRITERS: dict[tuple[int, int], int] = {}


class InUseError(StoreError):
    """Another process, or another server of this process, holds a store's lock."""


class Lock:
    """A lock that one writer or several readers hold. The end of a process releases its lock.

    A forked child keeps no descriptor of the lock's file: the system would keep the lock until that is closed too.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        """Lock the folder, for reading if `shared`, else for writing.

        Several readers may hold the lock at once. A writer waits for readers for `PATIENCE` seconds.

        Raises:
            InUseError: another process holds the lock.
            StoreError: the file system has no locks, or the lock's file cannot be opened.
        """
        try:
            self._descriptor = _open_here(folder / LOCK, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreError(f"[store] cannot lock {folder / LOCK}: {reason(error)}") from None
        status = os.fstat(self._descriptor)
        self._file, self._shared = (status.st_dev, status.st_ino), shared
        self._forks, self._held = forks[0], False
        end = monotonic() + (0 if shared or self._is_ours else PATIENCE)
        try:
            while True:
                try:
                    fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    self._held = True
                    _try_record_lock(self._descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                    self.refuse_removed(folder)
                    if not shared:
                        _WRITERS[self._file] = self._forks
                    return
                except BlockingIOError:
                    if monotonic() >= end:
                        raise
                sleep(INTERVAL)
        except BlockingIOError:
            self.close()
            alone = "" if shared else "one process at a time writes to a store, and "
            holder = "this process has a server there: close() it" if self._is_ours else _holder(*self._file)
            raise InUseError(f"[store] {folder} is in use: {alone}{holder}") from None
        except OSError as error:
            self.close()
            if error.errno in _NO_LOCKS:
                raise StoreError(f"[store] {folder}: {lacks(folder, 'locks')}") from None
            raise StoreError(f"[store] cannot lock {folder / LOCK}: {reason(error)}") from None
        except BaseException:
            self.close()
            raise

    def refuse_removed(self, folder: Path) -> None:
        """Check that the lock's file was not removed, for example while this process waited for it.

        Another process may lock the file that replaces it.

        Raises:
            StoreError: the file was removed or replaced.
        """
        try:
            status = (folder / LOCK).lstat()
        except OSError as error:
            raise StoreError(f"[store] {folder / LOCK} has vanished: {error.strerror}") from None
        if (status.st_dev, status.st_ino) != self._file:
            raise StoreError(f"[store] {folder / LOCK} was replaced")

    @property
    def _is_ours(self) -> bool:
        """Whether this process holds the lock for writing."""
        return _WRITERS.get(self._file) == forks[0]

    def close(self) -> None:
        """Release the lock. A forked child does nothing: the lock is its parent's, and its descriptor is closed."""
        if self._forks != forks[0]:
            return
        if self._held:
            if not self._shared:
                _WRITERS.pop(self._file, None)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # another program that starts just now has a copy until `exec`
        self._held = False
        close_descriptor(self._descriptor)
        self._descriptor = -1


def locked(folder: Path, *, shared: bool = False) -> "closing[Lock]":
    """Lock a folder for a block, see `Lock`."""
    return closing(Lock(folder, shared=shared))


def _open_here(path: Path, flags: int) -> int:
    """Open a regular file, and return a descriptor that no forked child keeps."""
    while True:
        children_before = children[0]
        descriptor = open_regular(path, flags)
        close_in_children(descriptor)
        if children[0] == children_before:
            return descriptor
        close_descriptor(descriptor)  # a child that another thread forked meanwhile has the file, and would keep a lock


def _try_record_lock(descriptor: int, kind: int) -> None:
    """Take and release the other kind of lock, which SQLite uses.

    Without such locks, SQLite reports that another program has locked the index.

    Raises:
        OSError: the file system has no such locks.
    """
    with suppress(BlockingIOError, PermissionError):  # NFS has one kind for both, and it is held
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _holder(device: int, inode: int) -> str:
    """Describe the process that has locked a file, if the system shows it."""
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
    """Return whether the file system guarantees space for writes through a map of an allocated file."""
    return _file_system(folder) in PROMISING


def lacks(folder: Path, need: str) -> str:
    """Return the message for a store on a file system that has no locks, or nothing else that a store needs."""
    return f"this file system ({_file_system(folder) or 'type unknown'}) has no {need}: put the store on a local disk"


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder, as Linux names it; "" if it is unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        real, best, kind = str(folder.resolve()), "", ""
    except (OSError, RuntimeError):  # no such list, or a loop of links
        return ""
    for line in lines:
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind
