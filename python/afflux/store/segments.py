"""One Zarr array of fixed-size slots. Its chunks are segments: uncompressed files of many slots, made before a slot of
theirs is handed out, and worked on where they lie.
"""

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux import _engine
from afflux.errors import StoreError

Row = npt.NDArray[Any]

#: A segment has about so many bytes, or a part of all that may come, so that few files have to be open.
SEGMENT_BYTES, MOST_SEGMENTS, MOST_SLOTS = 64 << 20, 256, 4096
_LINE, _PAGE, _HUGE_PAGE = 64, 4096, 2 << 20
_PIECE = 512 << 10  #: bytes that the system is asked to read at once: of more it may read the beginning alone
_LARGE, _HUGE = 65536, 8 << 20  #: bytes from which on a slot begins on a page, and on a huge one
_DTYPES = ("float64", "float32", "float16", "uint16", "uint8")


class Shape(NamedTuple):
    """What an array's metadata say."""

    dtype: str
    width: int  #: elements from one slot to the next
    per_segment: int  #: slots

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def segment_bytes(self) -> int:
        """Of one file."""
        return self.per_segment * self.slot_bytes

    @property
    def huge(self) -> bool:
        """Whether slots begin on huge pages."""
        return self.slot_bytes % _HUGE_PAGE == 0


def shape_of(dtype: str, size: int, slots: int) -> Shape:
    """For slots of `size` elements, of which there will be about so many.

    A slot begins on a cache line, a large one on a page, so that no page holds parts of two of them.
    """
    item = np.dtype(dtype).itemsize
    aligned = _HUGE_PAGE if size * item >= _HUGE else _PAGE if size * item >= _LARGE else _LINE
    stride = max(-(-size * item // aligned) * aligned, aligned)
    file = max(SEGMENT_BYTES, slots * stride // MOST_SEGMENTS)
    return Shape(dtype, stride // item, max(1, min(slots, MOST_SLOTS, file // stride)))


class _Mapped(NamedTuple):
    rows: Row  #: (slots, width)
    path: Path
    inode: int


class Segments:
    """The array in one folder; `size` elements of a slot are used. Slots are numbered from 0.

    Mapped, `array` is the file's own memory. Else it is a copy, and `put` writes it: for file systems that cannot
    promise space for what is written through a map.
    """

    def __init__(self, folder: Path, size: int, *, mapped: bool) -> None:
        self.folder = folder
        self.size = size
        self.mapped = mapped
        self.shape, slots = _read_shape(folder)
        self._item = np.dtype(self.shape.dtype).itemsize
        if self.shape.width < size:
            raise StoreError(f"[store] {folder} has slots of {self.shape.width} elements, expected {size}")
        self._maps: dict[int, _Mapped] = {}
        self._writable: set[int] = set()
        self._count = 0
        # A segment that the metadata do not know yet was not made to the end.
        while self.slots < slots and _size_of(self._path(self._count)) == self.shape.segment_bytes:
            self._count += 1

    @property
    def slots(self) -> int:
        """Those that there is space for."""
        return self._count * self.shape.per_segment

    @property
    def slot_bytes(self) -> int:
        """Bytes of what a slot holds."""
        return self.size * self._item

    @property
    def disk_bytes(self) -> int:
        """Bytes of all segments."""
        return self._count * self.shape.segment_bytes

    def _path(self, segment: int) -> Path:
        return self.folder / "c" / str(segment) / "0"

    def reserve(self, slots: int) -> None:
        """Makes space for so many slots.

        Raises:
            StoreError: the disk is full, or the folder cannot be written; there are as many slots as before.
        """
        while self.slots < slots:
            path = self._path(self._count)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                with path.open("r+b") as file:
                    _allocate(file.fileno(), self.shape.segment_bytes)
                    file.truncate(self.shape.segment_bytes)  # one that is too long is no segment
                    os.fsync(file.fileno())
                _write_slots(self.folder, (self._count + 1) * self.shape.per_segment)
                for folder in (path.parent, path.parent.parent, self.folder):
                    sync(folder)
            except OSError as error:
                raise StoreError(
                    f"[store] no space for {self.shape.segment_bytes} bytes of {path}: {error.strerror}"
                ) from None
            self._count += 1

    def array(self, slot: int) -> Row:
        """(size,) the slot's elements."""
        if self.mapped:
            segment, place = divmod(slot, self.shape.per_segment)
            return self._map(segment)[place, : self.size]
        out = np.empty(self.size, self.shape.dtype)
        path, offset = self._place(slot)
        try:
            with path.open("rb", buffering=0) as file:
                done, view = 0, out.view(np.uint8).data
                while done < out.nbytes and (count := os.preadv(file.fileno(), [view[done:]], offset + done)):
                    done += count  # 2 GiB at most
        except OSError as error:
            raise StoreError(f"[store] cannot read {path}: {error.strerror}") from None
        if done != out.nbytes:
            raise StoreError(f"[store] {path} is truncated: {done} of {out.nbytes} bytes of slot {slot}")
        return out

    def blank(self, slot: int) -> Row:
        """(size,) memory for what is to come into the slot."""
        return self.array(slot) if self.mapped else np.empty(self.size, self.shape.dtype)

    def put(self, slot: int, array: Row) -> None:
        """The slot holds `array` from now on; nothing is written if it lies there already."""
        if self.mapped:
            own = self.array(slot)
            if own.ctypes.data != array.ctypes.data:
                self.check([slot])
                self.present([slot], write=True)
                own[:] = array
            return
        path, offset = self._place(slot)
        view = np.ascontiguousarray(array).data.cast("B")
        try:
            with path.open("r+b", buffering=0) as file:
                while view:
                    done = os.pwrite(file.fileno(), view, offset)
                    view, offset = view[done:], offset + done
        except OSError as error:
            raise StoreError(f"[store] cannot write {path}: {error.strerror}") from None

    def prefetch(self, slot: int) -> None:
        """Has the system read a slot that is on disk only, and does not wait for it."""
        if self.mapped:
            _engine.prefetch(self.array(slot))
        elif hasattr(os, "posix_fadvise"):
            path, offset = self._place(slot)
            with suppress(OSError), path.open("rb", buffering=0) as file:
                for at in range(0, self.slot_bytes, _PIECE):
                    size = min(_PIECE, self.slot_bytes - at)
                    os.posix_fadvise(file.fileno(), offset + at, size, os.POSIX_FADV_WILLNEED)

    def present(self, slots: Iterable[int], *, write: bool = False) -> None:
        """Brings these slots' pages in, so that what would be a signal amid a sweep is an error here. To be written,
        once: their pages stay.
        """
        for slot in slots if self.mapped and self.size else ():
            if write and slot in self._writable:
                continue
            failed = _engine.populate(self.array(slot), write)
            if failed:
                raise StoreError(
                    f"[store] slot {slot} of {self.folder} cannot be {'written' if write else 'read'}: a segment is "
                    f"truncated, or the disk is full or failing ({os.strerror(failed)})"
                )
            if write:
                self._writable.add(slot)

    def check(self, slots: Iterable[int]) -> None:
        """Refuses segments that have vanished, or were cut off, since they were opened."""
        for segment in sorted({slot // self.shape.per_segment for slot in slots}):
            if segment in self._maps:
                self._checked(segment)

    def flush(self, slots: Iterable[int]) -> None:
        """Returns when these slots are on the disk itself."""
        for segment in sorted({slot // self.shape.per_segment for slot in slots}):
            try:
                with self._path(segment).open("r+b", buffering=0) as file:
                    os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
            except OSError as error:
                raise StoreError(f"[store] cannot flush {self._path(segment)}: {error.strerror}") from None

    def detach(self, slots: Iterable[int]) -> None:
        """Their memory becomes this process's own: others who open the file do not write to it."""
        for segment in {slot // self.shape.per_segment for slot in slots} & self._maps.keys():
            with suppress(StoreError):  # what was cut off cannot be read any more
                self._checked(segment)
                _engine.detach(self._maps[segment].rows)

    def _place(self, slot: int) -> tuple[Path, int]:
        segment, place = divmod(slot, self.shape.per_segment)
        return self._path(segment), place * self.shape.width * self._item

    def _map(self, segment: int) -> Row:
        if segment not in self._maps:
            path = self._path(segment)
            try:
                with path.open("r+b") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if os.fstat(file.fileno()).st_size != self.shape.segment_bytes:
                        raise StoreError(f"[store] {path} is truncated")
                    pages = mmap.mmap(file.fileno(), self.shape.segment_bytes)
                    if self.shape.huge and hasattr(mmap, "MADV_HUGEPAGE"):
                        # What the system has written out it maps anew at the next write: 512 pages at once.
                        with suppress(OSError):
                            pages.madvise(mmap.MADV_HUGEPAGE)
                    # It lives as long as somebody holds a view of it.
                    whole = np.frombuffer(pages, self.shape.dtype)
            except OSError as error:
                raise StoreError(f"[store] cannot map {path}: {error.strerror}") from None
            rows = whole.reshape(self.shape.per_segment, self.shape.width)
            self._maps[segment] = _Mapped(rows, path, inode)
        return self._maps[segment].rows

    def _checked(self, segment: int) -> None:
        _, path, inode = self._maps[segment]
        try:
            now = path.stat()
        except OSError as error:
            raise StoreError(f"[store] {path} has vanished: {error.strerror}") from None
        if now.st_ino != inode or now.st_size != self.shape.segment_bytes:
            raise StoreError(f"[store] {path} was replaced or truncated")


def make_arrays(folder: Path, shapes: dict[str, Shape], attributes: dict[str, Any]) -> None:
    """The Zarr group, and its arrays without a slot yet. zarr-python writes metadata, and never rows: writing fill
    values deletes chunks, rewriting replaces the file under a map.
    """
    import zarr  # half a second, which opening a store need not wait for

    group = zarr.create_group(folder, attributes=attributes)
    for name, shape in shapes.items():
        group.create_array(
            name,
            shape=(0, shape.width),
            chunks=(shape.per_segment, shape.width),
            dtype=shape.dtype,
            compressors=None,
            filters=None,
            fill_value=0,
        )
    for place in (*(folder / name for name in shapes), folder):
        sync(place / "zarr.json")
        sync(place)


def _read_shape(folder: Path) -> tuple[Shape, int]:
    """And how many slots there are."""
    try:
        meta = json.loads((folder / "zarr.json").read_bytes())
        per_segment, width = meta["chunk_grid"]["configuration"]["chunk_shape"]
        shape = Shape(meta["data_type"], int(width), int(per_segment))
        plain = [codec["name"] for codec in meta["codecs"]] == ["bytes"]
        endian = meta["codecs"][0].get("configuration", {}).get("endian", "little")
        sound = shape.dtype in _DTYPES and shape.width > 0 and shape.per_segment > 0
        slots = int(meta["shape"][0])
    except OSError as error:
        raise StoreError(f"[store] cannot read {folder / 'zarr.json'}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StoreError(f"[store] {folder / 'zarr.json'} is damaged: {type(error).__name__}: {error}") from None
    if not (plain and endian == "little" and sound):
        raise StoreError(f"[store] {folder} holds {meta['data_type']} through {meta['codecs']}: not a layout of ours")
    return shape, slots


def _write_slots(folder: Path, slots: int) -> None:
    """The new length of the array. By hand, as importing zarr would hold up a push."""
    meta = json.loads((folder / "zarr.json").read_bytes())
    meta["shape"][0] = max(slots, meta["shape"][0])
    new = folder / "zarr.json.new"
    with new.open("w") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "zarr.json")


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros, done = bytes(1 << 20), 0
    while done < size:
        done += os.pwrite(descriptor, zeros[: size - done], done)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a folder's names, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
