"""Functions that open files of an untrusted folder: only regular files, and never through a link."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from afflux.ops.errors import StoreError

#: Levels of folders in a store: shard, part of a shard, array, c, segment.
_DEPTH = 5
#: O_NONBLOCK: opening a FIFO returns at once.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC"))
#: The errors after which a file counts as lost. All others are the system's, and the file may be sound.
LOSS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EFBIG})
#: The remedies for errors that users meet with sound files.
_REMEDIES = dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`")
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnreadableError(StoreError):
    """The system does not open or read a file that may be sound."""


def reason(error: OSError) -> str:
    """Return the system's words for an error, and the remedy if there is one."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror}: {remedy}" if remedy else str(error.strerror)


def try_open_files(count: int) -> None:
    """Open this many files, and close them.

    Raises:
        OSError: the process has too many open files.
    """
    with ExitStack() as undo:
        for _ in range(count):
            undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor.

    Raises:
        OSError: the file is a link or of another kind, has a second name and is opened for writing, or cannot be
            opened.
    """
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        status: os.stat_result | None = None
        with suppress(OSError):
            status = os.lstat(path)
        raise OSError(error.errno, error.strerror if status is None else f"it is {kind(status)}", path) from None
    status = os.fstat(descriptor)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if stat.S_ISREG(status.st_mode) and not (writes and status.st_nlink > 1):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {kind(status)}", path)


def kind(status: os.stat_result) -> str:
    """Return the kind of a file that is not a regular file with one name."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a hard link")


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Yield the descriptor of a regular file, and close it after the block; see `open_regular`."""
    descriptor = open_regular(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: see `open_regular`; or the file has more than `most` bytes.
    """
    with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", path)
    return content


def new_file(path: Path) -> int:
    """Make a new file for writing, and return its descriptor.

    An existing entry with its name is removed first. No link is followed.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, and wait until its bytes are on the disk itself."""
    with open(new_file(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def irregular(folder: Path) -> list[str]:
    """Describe the entries of a store's folder that are neither folders nor regular files with one name.

    A file with a second name may also be outside the folder, and SQLite writes to a file beside the index even if
    SQLite only reads.

    Raises:
        StoreError: a folder cannot be read.
    """
    try:
        return [*_irregular(folder, 0)]
    except OSError as error:
        raise StoreError(f"[store] cannot read {error.filename or folder}: {reason(error)}") from None


def _irregular(folder: Path, depth: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            if stat.S_ISDIR(status.st_mode):
                if depth < _DEPTH:
                    yield from _irregular(folder / entry.name, depth + 1)
            elif not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                yield f"{folder / entry.name} is {kind(status)}"


def refuse_irregular(folder: Path) -> None:
    """Check that a store's folder contains only regular files and folders; see `irregular`.

    Raises:
        StoreError: the folder contains something else, through which the store would read or write elsewhere.
    """
    entries = irregular(folder)
    if entries:
        raise StoreError(f"[store] {entries[0]}: {PLAIN}")


#: The requirement for a store's folder, for errors.
PLAIN = "a store holds regular files with one name, and folders; remove it, or copy the folder from its origin"
