"""The arrays of a store: their shapes, and Zarr's metadata of them (`zarr.json`).

The metadata are written here, as zarr-python writes them. zarr-python itself starts a thread, and never returns if the
system allows no more threads.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from afflux._engine import ORDER_VERSION
from afflux.ops.errors import AffluxError, StoreError
from afflux.store.files import LOSS, UnreadableError, read_bytes, reason, write_new
from afflux.store.lock import LOCK

#: The remedy in errors for damage to anything except rows, their sum, waiting arrivals and Zarr's metadata.
BACKUP = "only a backup of the folder restores it"


@contextmanager
def damage_as_store_error(path: Path) -> Iterator[None]:
    """Convert exceptions that invalid facts raise in the block to a StoreError. An AffluxError is not changed."""
    try:
        yield
    except AffluxError:
        raise
    except DAMAGED as error:
        raise StoreError(f"[store] {path} is damaged: {type(error).__name__}: {error}; {BACKUP}") from None


def _repair_of(path: Path) -> str:
    """Return the command that repairs the store of this file or folder, which may be within the folder of a shard."""
    store = next((parent for parent in path.parents if (parent / INDEX).exists()), path.parent)
    return f"`afflux store repair {quote(str(store))}`"


def remedy(folder: Path) -> str:
    """Return the remedy in errors for damage to the array in this folder of a store."""
    if folder.name in ("rows", "arrivals"):
        return f"{_repair_of(folder)}, when no server has it open, drops the {folder.name} that are lost"
    return f"{_repair_of(folder)} computes it again" if folder.name == "sum" else BACKUP


INDEX = "index.sqlite"  #: in the store's folder
NAME = r"^[\w.-]{1,100}\Z"  #: allowed names of a rule's vectors: they are parts of folders' names
METADATA = "zarr.json"  #: in the folder of each array, and in the store's folder
#: The size of a segment: bytes, a part of all bytes that may be needed (so that few files are open), or slots.
SEGMENT_BYTES, MOST_SEGMENTS, MOST_SLOTS = 64 << 20, 256, 4096
#: The most slots of arrivals that count for the size of a segment, so that a forged buffer_size cannot enlarge it.
MOST_WAITING = 1 << 16
_LIMITS = SEGMENT_BYTES, MOST_SEGMENTS, MOST_SLOTS
#: The largest size of a `zarr.json`, in bytes.
_MOST_METADATA = 1 << 20
#: The exceptions that reading damaged or forged JSON raises.
DAMAGED = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError)
_LINE, _PAGE, _HUGE_PAGE = 64, 4096, 2 << 20
_DTYPES = ("float64", "float32", "float16", "uint16", "uint8")
_LARGE, _HUGE = 65536, 8 << 20  #: a slot of at least this many bytes begins on a page, or on a huge page


def folder_of(path: "str | PathLike[str]") -> Path:
    """Check that a path is a store's folder.

    Raises:
        StoreError: the path is no store's folder; nothing was written there.
    """
    try:
        exists, has_index = Path(path).is_dir(), (Path(path) / INDEX).is_file()
    except OSError as error:
        raise StoreError(f"[store] cannot read {path}: {reason(error)}") from None
    if not exists:
        raise StoreError(f"[store] there is no folder {path}")
    if not has_index:
        killed = ". If a process was killed while it made the store, remove the folder and make it again"
        then = killed if (Path(path) / LOCK).exists() else ""
        raise StoreError(f"[store] {path} holds no store: {INDEX} is missing{then}")
    return Path(path)


class Shape(NamedTuple):
    """The shape of an array's segments."""

    dtype: str
    width: int  #: elements from one slot to the next
    per_segment: int  #: slots

    def __str__(self) -> str:
        return f"{self.per_segment} slots of {self.width} {self.dtype} in a file"

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment file."""
        return self.per_segment * self.slot_bytes

    @property
    def huge(self) -> bool:
        """Whether slots begin on huge pages."""
        return self.slot_bytes % _HUGE_PAGE == 0


def shape_of(dtype: str, size: int, slots: int) -> Shape:
    """Return the shape for about `slots` slots of `size` elements.

    A slot begins on a cache line, a large slot on a page, so that no page holds parts of two large slots.
    """
    width = slot_width(dtype, size)
    stride = width * np.dtype(dtype).itemsize
    file = max(SEGMENT_BYTES, slots * stride // MOST_SEGMENTS)
    return Shape(dtype, width, max(1, min(slots, MOST_SLOTS, file // stride)))


def slot_width(dtype: str, size: int) -> int:
    """Return the number of elements from one slot to the next, for slots of `size` elements."""
    item = np.dtype(dtype).itemsize
    aligned = _HUGE_PAGE if size * item >= _HUGE else _PAGE if size * item >= _LARGE else _LINE
    return max(-(-size * item // aligned) * aligned, aligned) // item


def is_sound(shape: Shape, slots: int) -> bool:
    """Return whether segments of this shape are at most as large as those for `slots` slots.

    A segment is allocated as a whole, so a forged larger shape could fill the disk.
    """
    segment, segments, most = _LIMITS
    largest = max(segment, shape.slot_bytes, slots * shape.slot_bytes // segments)
    return shape.dtype in _DTYPES and 0 < shape.per_segment <= most and shape.segment_bytes <= largest


def make_arrays(
    folder: Path, shapes: Mapping[str, Shape], slots: Mapping[str, int] = MappingProxyType({}), *, group: bool = True
) -> None:
    """Write the metadata of these arrays, which have so many slots, by default none, and those of the Zarr group.

    Raises:
        OSError: a file cannot be written; each file is as before, or complete.
    """
    for name, shape in shapes.items():
        array = folder / name
        array.mkdir(parents=True, exist_ok=True)
        _replace(array / METADATA, _array_metadata(shape, slots.get(name, 0)))
        for path in (array, *array.parents[: len(Path(name).parts) - 1]):
            sync(path)
    if group:
        _replace(folder / METADATA, _GROUP)
    sync(folder)


_GROUP = {
    "attributes": {"afflux": "store", "order_version": ORDER_VERSION},
    "zarr_format": 3,
    "node_type": "group",
}


def _array_metadata(shape: Shape, slots: int) -> dict[str, Any]:
    dtype = np.dtype(shape.dtype)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return {
        "shape": [slots, shape.width],
        "data_type": shape.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shape.per_segment, shape.width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if dtype.kind == "f" else 0,
        "codecs": [{"name": "bytes", **endian}],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


class LostMetadataError(StoreError):
    """`zarr.json` is missing, damaged or wrong. The index holds its contents, so that `repair` can write it again."""

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(f"[store] {problem}; {_repair_of(path)} writes it again")
        self.what = problem


@contextmanager
def _lost_if_damaged(path: Path) -> Iterator[None]:
    """Convert errors of reading this `zarr.json` to LostMetadataError, or to UnreadableError if they show no loss."""
    try:
        yield
    except OSError as error:
        problem = f"cannot read {path}: {reason(error)}"
        if error.errno not in LOSS:
            raise UnreadableError(f"[store] {problem}") from None
        raise LostMetadataError(problem, path) from None
    except DAMAGED as error:
        raise LostMetadataError(f"{path} is damaged: {type(error).__name__}: {error}", path) from None


def read_slots(folder: Path, expected: Shape, last: int = -1) -> int:
    """Return the number of slots of an array; `last` is the last slot that the index refers to.

    Raises:
        LostMetadataError: `zarr.json` is missing or damaged, has another shape than `expected`, or fewer slots.
        UnreadableError: the system does not open the file.
    """
    path = folder / METADATA
    with _lost_if_damaged(path):
        meta = json.loads(_read(path))
        per_segment, width = meta["chunk_grid"]["configuration"]["chunk_shape"]
        shape = Shape(meta["data_type"], int(width), int(per_segment))
        slots = int(meta["shape"][0])
    if shape != expected:
        problem = f"it has {shape}, and the index {expected}"
    elif {**meta, "attributes": {}} != _array_metadata(expected, slots):  # attributes may be those of a user
        problem = "it has no layout of afflux"
    elif slots <= last:
        problem = f"it has {slots} slots, and slot {last} is in use"
    else:
        return slots
    raise LostMetadataError(f"{path} is damaged: {problem}", path)


def check_group(store: Path) -> None:
    """Raise LostMetadataError if the metadata of the group are damaged, UnreadableError if they cannot be read."""
    with _lost_if_damaged(store / METADATA):
        if json.loads(_read(store / METADATA))["node_type"] != "group":
            raise ValueError("not a group")


def _read(path: Path) -> bytes:
    return read_bytes(path, _MOST_METADATA)


def write_slots(folder: Path, slots: int) -> None:
    """Write the new length of the array."""
    meta = json.loads(_read(folder / METADATA))
    meta["shape"][0] = max(slots, meta["shape"][0])
    _replace(folder / METADATA, meta)


def _replace(path: Path, metadata: Mapping[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    write_new(new, json.dumps(metadata, indent=2).encode())
    new.replace(path)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
