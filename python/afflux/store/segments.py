"""One Zarr array of fixed-size slots. Its chunks are segments: uncompressed files of many slots.

A segment is allocated before any of its slots is used.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from pathlib import Path
from stat import S_ISREG
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux._engine import PIECE, address, detach, first_changed, populate, prefetch
from afflux.ops.codecs import named
from afflux.ops.errors import StoreError
from afflux.store.files import LOSS, UnreadableError, opened, reason
from afflux.store.metadata import METADATA, Shape, read_slots, remedy, sync, write_slots

Row = npt.NDArray[Any]

#: The errors of a full disk, an exhausted quota, and a limit of the size of files.
_NO_SPACE = (ENOSPC, EDQUOT, EFBIG)


class Place(NamedTuple):
    """The slot of a vector or row, and its checksums."""

    slot: int
    crc: bytes  #: CRC-32C of each block, uint32 little-endian
    rank: int = 0  #: for a row, the client's rank in the order of first pushes; -1: unchanged


class _Mapped(NamedTuple):
    rows: Row  #: (slots, width)
    file: tuple[bytes, int, int]  #: path, inode and bytes, for `first_changed`


class Segments:
    """The array in one folder. `size` elements of each slot are used. Slots are numbered from 0.

    If `mapped`, `array` returns the mapped file itself. Else `array` returns a copy, and `write` writes it to the file:
    for file systems that do not guarantee space for writes through a map.
    """

    def __init__(
        self, folder: Path, size: int, shape: Shape, *, mapped: bool, last: int = -1, lost: bool = False
    ) -> None:
        """Find the allocated segments.

        `last` is the last slot that the index refers to. With `lost`, `zarr.json` is damaged, and is not read.

        Raises:
            LostMetadataError: `zarr.json` is missing or damaged, or has another shape.
        """
        self.folder = folder
        self.size = size
        self.mapped = mapped
        self.shape = shape
        self._per_segment = shape.per_segment
        slots = maxsize if lost else read_slots(folder, shape, last)
        self._item = np.dtype(self.shape.dtype).itemsize
        if self.shape.width < size:
            raise StoreError(f"[store] {folder} has slots of {self.shape.width} elements, expected {size}")
        self._maps: dict[int, _Mapped] = {}
        self._writable: set[int] = set()
        self._count = 0
        # A segment beyond those of the metadata was not completed.
        while self.slots < slots and self.segment_problem(self._count) is None:
            self._count += 1

    @property
    def remedy(self) -> str:
        """The remedy in errors for damage to this array."""
        return remedy(self.folder)

    @property
    def slots(self) -> int:
        """The number of allocated slots."""
        return self._count * self.shape.per_segment

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot that are in use."""
        return self.size * self._item

    @property
    def disk_bytes(self) -> int:
        """Bytes of all segments."""
        return self._count * self.shape.segment_bytes

    def _path(self, segment: int) -> Path:
        return self.folder / "c" / str(segment) / "0"

    def segment_problem(self, segment: int) -> str | None:
        """Describe a segment file that is missing or too short; return None if it is neither."""
        path, segment_bytes, size = self._path(segment), self.shape.segment_bytes, self._size(segment)
        if size < 0:
            return f"{path} is missing"
        return None if size >= segment_bytes else f"{path} is truncated: {size} of {segment_bytes} bytes"

    def oversized(self) -> dict[Path, str]:
        """Describe the segment files that are too long."""
        most = self.shape.segment_bytes
        sizes = ((self._path(segment), self._size(segment)) for segment in range(self._count))
        return {path: f"{path} is too long: {size} of {most} bytes" for path, size in sizes if size > most}

    def truncate_oversized(self) -> None:
        """Truncate segment files that are too long.

        Raises:
            StoreError: a file cannot be written.
        """
        for path in self.oversized():
            try:
                with opened(path, os.O_RDWR) as descriptor:
                    os.ftruncate(descriptor, self.shape.segment_bytes)
                    os.fsync(descriptor)
            except OSError as error:
                raise StoreError(f"[store] cannot cut {path} to size: {reason(error)}") from None

    def _size(self, segment: int) -> int:
        """Return the bytes of a regular file; -1 if it is missing."""
        try:
            status = self._path(segment).lstat()
        except OSError as error:
            if error.errno not in LOSS:
                raise UnreadableError(f"[store] cannot read {self._path(segment)}: {reason(error)}") from None
            return -1
        return status.st_size if S_ISREG(status.st_mode) else -1

    def missing_slot(self, slot: int) -> str | None:
        """Describe why a slot to which a commit refers is missing; return None if it is not missing."""
        if slot < self.slots:
            return None
        segments = range(slot // self.shape.per_segment + 1)
        problems = (problem for problem in map(self.segment_problem, segments) if problem is not None)
        return next(problems, f"{self.folder / METADATA} has {self.slots} slots, and slot {slot} is in use")

    def reserve(self, slots: int) -> None:
        """Allocate space for this many slots.

        Raises:
            StoreError: the disk is full, or the folder cannot be written; the number of slots is as before.
        """
        while self.slots < slots:
            path = self._path(self._count)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
                    _allocate(descriptor, self.shape.segment_bytes)
                    os.ftruncate(descriptor, self.shape.segment_bytes)  # an existing file may be longer
                    os.fsync(descriptor)
                write_slots(self.folder, (self._count + 1) * self.shape.per_segment)
                for folder in (path.parent, path.parent.parent, self.folder):
                    sync(folder)
            except OSError as error:
                lack = "no space for" if error.errno in _NO_SPACE else "cannot allocate"
                raise StoreError(
                    f"[store] {lack} {self.shape.segment_bytes} bytes of {path}: {reason(error)}"
                ) from None
            self._count += 1

    def array(self, slot: int) -> Row:
        """Return the slot's elements, (size,)."""
        if self.mapped:
            segment, place = divmod(slot, self._per_segment)
            mapped = self._maps.get(segment)
            return (self._map(segment) if mapped is None else mapped.rows)[place, : self.size]
        out = np.empty(self.size, self.shape.dtype)
        path, offset = self._place(slot)
        try:
            with opened(path) as descriptor:
                end, view = 0, out.view(np.uint8).data
                while end < out.nbytes and (count := os.preadv(descriptor, [view[end:]], offset + end)):
                    end += count  # preadv reads 2 GiB at most
        except OSError as error:
            kind = StoreError if error.errno in (*LOSS, EIO) else UnreadableError  # a failing disk damages slots
            raise kind(f"[store] cannot read {path}: {reason(error)}") from None
        if end != out.nbytes:
            raise StoreError(f"[store] {path} is truncated: {end} of {out.nbytes} bytes of slot {slot}; {self.remedy}")
        return out

    def empty(self, slot: int) -> Row:
        """Return memory (size,) for `write` to this slot; its values are arbitrary."""
        return self.array(slot) if self.mapped else np.empty(self.size, self.shape.dtype)

    def write(self, slot: int, array: Row) -> None:
        """Write an array to a slot, unless the array is the slot's own memory."""
        if self.mapped:
            row = self.array(slot)
            if address(row) != address(array):
                self.check([slot])
                self.populate([slot], write=True)
                row[:] = array
            return
        path, offset = self._place(slot)
        view = np.ascontiguousarray(array).data.cast("B")
        try:
            with opened(path, os.O_RDWR) as descriptor:
                while view:
                    count = os.pwrite(descriptor, view, offset)
                    view, offset = view[count:], offset + count
        except OSError as error:
            raise StoreError(f"[store] cannot write {path}: {reason(error)}") from None

    def prefetch(self, slot: int) -> None:
        """Ask the system to start reading a slot from disk."""
        if self.mapped:
            prefetch(self.array(slot))
        elif hasattr(os, "posix_fadvise"):
            path, offset = self._place(slot)
            with suppress(OSError), opened(path) as descriptor:
                for at in range(0, self.slot_bytes, PIECE):
                    size = min(PIECE, self.slot_bytes - at)
                    os.posix_fadvise(descriptor, offset + at, size, os.POSIX_FADV_WILLNEED)

    def populate(self, slots: Iterable[int], *, write: bool = False) -> None:
        """Map the pages of these slots.

        A failing disk then raises an error here, and does not cause a signal during a sweep. Pages for writing are
        mapped once; they stay mapped.
        """
        for slot in slots if self.mapped and self.size else ():
            if write and slot in self._writable:
                continue
            failed = populate(self.array(slot), write)
            if failed:
                raise StoreError(
                    f"[store] slot {slot} of {self.folder} cannot be {'written' if write else 'read'}: a segment is "
                    f"truncated, or the disk is full or failing ({os.strerror(failed)})"
                )
            if write:
                self._writable.add(slot)

    def check(self, slots: Iterable[int]) -> None:
        """Raise StoreError if the file of a mapped segment has vanished or was truncated."""
        per_segment, maps = self._per_segment, self._maps
        mapped = {slot // per_segment for slot in slots} & maps.keys()
        if mapped and first_changed([maps[segment].file for segment in mapped]) >= 0:
            for segment in sorted(mapped):
                self._checked(segment)  # raises an error with the reason

    def flush(self, slots: Iterable[int]) -> None:
        """Wait until these slots are on the disk itself."""
        for segment in sorted({slot // self.shape.per_segment for slot in slots}):
            try:
                with opened(self._path(segment), os.O_RDWR) as descriptor:
                    os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)
            except OSError as error:
                raise StoreError(f"[store] cannot flush {self._path(segment)}: {reason(error)}") from None

    def detach(self, slots: Iterable[int]) -> None:
        """Make the memory of these slots private, so that other processes cannot change it through the file."""
        for segment in {slot // self.shape.per_segment for slot in slots} & self._maps.keys():
            with suppress(StoreError):  # a truncated file cannot be read any more
                self._checked(segment)
                detach(self._maps[segment].rows)

    def _place(self, slot: int) -> tuple[Path, int]:
        segment, place = divmod(slot, self.shape.per_segment)
        return self._path(segment), place * self.shape.width * self._item

    def _map(self, segment: int) -> Row:
        if segment not in self._maps:
            path = self._path(segment)
            try:
                with opened(path, os.O_RDWR) as descriptor:
                    status = os.fstat(descriptor)
                    if status.st_size < self.shape.segment_bytes:
                        raise StoreError(f"[store] {path} is truncated; {self.remedy}")
                    pages = mmap.mmap(descriptor, self.shape.segment_bytes)
                    if self.shape.huge and hasattr(mmap, "MADV_HUGEPAGE"):
                        # After writeback, the next write to a page faults: one fault for a huge page, instead of
                        # 512.
                        with suppress(OSError):
                            pages.madvise(mmap.MADV_HUGEPAGE)
                    # NumPy's views keep the map open.
                    elements = np.frombuffer(pages, self.shape.dtype)
            except OSError as error:
                raise StoreError(f"[store] cannot map {path}: {reason(error)}") from None
            rows = elements.reshape(self.shape.per_segment, self.shape.width)
            self._maps[segment] = _Mapped(rows, (os.fsencode(path), status.st_ino, self.shape.segment_bytes))
        return self._maps[segment].rows

    def _checked(self, segment: int) -> None:
        path, (_, inode, size) = self._path(segment), self._maps[segment].file
        try:
            now = os.lstat(path)
        except OSError as error:
            raise StoreError(f"[store] {path} has vanished: {error.strerror}") from None
        if now.st_ino != inode or now.st_size < size:
            raise StoreError(f"[store] {path} was replaced or truncated")


def open_arrays(path: Path, facts: Mapping[str, Any], last: Mapping[str, int], *, mapped: bool) -> dict[str, Segments]:
    """Return the arrays of a store with these facts, by name; `last` are the last slots that the index refers to."""
    d, codec = facts["server"]["d"], named(facts["server"]["codec"])
    sizes = {} if codec is None else {"rows": codec.row_size(d)}
    return {
        name: Segments(path / name, sizes.get(name, d), Shape(*shape), mapped=mapped, last=last.get(name, -1))
        for name, shape in facts["shapes"].items()
    }


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros, end = bytes(1 << 20), os.fstat(descriptor).st_size  # existing bytes stay
    while end < size:
        end += os.pwrite(descriptor, zeros[: size - end], end)
