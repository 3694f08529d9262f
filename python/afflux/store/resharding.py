"""Another number of shards for a store: `afflux store reshard`."""

import ctypes
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.aggregation.sharded_rows import row_piece
from afflux.ops.errors import StoreError
from afflux.ops.validation import brief
from afflux.store.checksums import row_crc
from afflux.store.constants_file import CONSTANTS
from afflux.store.files import reason
from afflux.store.index_entries import fact_entries, guarded_crc, key_of
from afflux.store.lock import locked
from afflux.store.metadata import BACKUP, INDEX, Shape, folder_of, make_arrays, sync
from afflux.store.reader import StoreReader, locked_reader
from afflux.store.schema import FORMAT, FORMAT_OF_SHARDS
from afflux.store.segments import Place, Row, Segments
from afflux.store.shards import shapes_in, stored_parts

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_BLOCK = 4096  #: bytes of a folder, or of a small file


def reshard(path: "str | PathLike[str]", shards: int, progress: Callable[[int, int], None] | None = None) -> bool:
    """Write a store again with this number of shards; 1: in one piece. Later bits do not change.

    The new folder is complete and on the disk before it takes the store's place. A process that ends before leaves the
    store as it was, and next to it a folder `.NAME.reshard-*`, which can be removed.

    Args:
        path: the store's folder.
        shards: the number of shards, as for `ShardedPlane` and `afflux.distributed.RayPlane`.
        progress: is called with the bytes written so far, and the bytes to write.

    Returns:
        Whether the store had other shards.

    Raises:
        StoreError: there is no store, it is in use or damaged, or the disk has less free space than the new folder
            needs, which is checked first. The store is unchanged.

    Cost: reads and writes each vector and row once; until the end both folders need their space.
    """
    plane, path = ShardedPlane(shards), folder_of(path)
    with locked_reader(path, shared=False) as store:
        cuts = plane.cuts(store.d)
        if cuts == tuple(store.server.get("cuts", ())):
            return False
        for line in store.index.damage():
            raise StoreError(f"[reshard] {store.index.path}: {line}; {BACKUP}")
        try:
            new = Path(mkdtemp(prefix=f".{path.resolve().name}.reshard-", dir=path.resolve().parent))
            try:
                new.chmod(path.stat().st_mode)
                with locked(new):
                    _Copy(store, new, cuts, progress).write()
                    _exchange(path.resolve(), new)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except OSError as error:
            raise StoreError(f"[reshard] cannot write {path} again: {reason(error)}; it is unchanged") from None
    return True


class _Copy:
    """A copy of a store with other shards."""

    def __init__(
        self, store: StoreReader, new: Path, cuts: tuple[int, ...], progress: Callable[[int, int], None] | None
    ) -> None:
        self._store, self._new, self._cuts = store, new, cuts
        self._progress = progress or (lambda done, total: None)
        self._done, self._parts = 0, stored_parts(store.d, cuts)
        self._arrays: dict[str, list[Segments]] = {}  # the parts of each array

    def write(self) -> None:
        """Write all files, and wait until they are on the disk itself."""
        store, new = self._store, self._new
        names = [name.removeprefix("rule_vector.") for name in store.arrays if name.startswith("rule_vector.")]
        rule = names, store.facts["rule"]["buffer_size"], store.codec
        shapes = shapes_in(store.server, store.facts["options"], self._cuts, *rule)
        self._require_space(shapes)
        make_arrays(new, shapes)
        for part in self._parts:
            for name in store.arrays:
                size = store.codec.row_size(part.size) if name == "rows" and store.codec else part.size
                array = Segments(new / part.folder / name, size, shapes[part.folder + name], mapped=False)
                array.reserve(self._slots(name))
                self._arrays.setdefault(name, []).append(array)
        for name, place in self._vectors():
            self._copy_vector(name, place)
        self._write_index(shapes, self._copied_rows())
        if (store.path / CONSTANTS).exists():
            shutil.copyfile(store.path / CONSTANTS, new / CONSTANTS)
            sync(new / CONSTANTS)
        for arrays in self._arrays.values():
            for array in arrays:
                array.flush(range(0, array.slots, array.shape.per_segment))
        sync(new)

    def _slots(self, name: str) -> int:
        return self._store.committed.last_slots.get(name, -1) + 1

    def _require_space(self, shapes: Mapping[str, Shape]) -> None:
        """Raise StoreError if the new folder needs more bytes than are free."""
        store = self._store
        # The index is written twice: as a copy, and with the changes before they are committed.
        needed = sum(2 * file.stat().st_size for file in store.path.iterdir() if file.is_file())
        for part in self._parts:
            for name in store.arrays:
                shape = shapes[part.folder + name]
                segments = -(-self._slots(name) // shape.per_segment)
                needed += segments * (shape.segment_bytes + _BLOCK) + 4 * _BLOCK  # with folders and zarr.json
        free = shutil.disk_usage(self._new).free
        if needed > free:
            raise StoreError(
                f"[reshard] the new folder next to {store.path} needs {needed:,} bytes, and {free:,} are free on its "
                "disk: free some, or move the store to a larger disk; it is unchanged"
            )

    def _vectors(self) -> Iterator[tuple[str, Place]]:
        """Yield the name of the array, and the place, of each vector of the commit, but for rows."""
        last = self._store.committed
        yield from ((name.partition(":")[0], place) for name, place in last.vectors.items())
        yield from (("arrivals", waiting.place) for waiting in last.arrivals if waiting.place is not None)

    def _copy_vector(self, name: str, place: Place) -> None:
        """Copy a vector to the same slot; its checksums are those of superblocks, in whatever part these are."""
        problem = self._store.damage(name, place)
        if problem is not None:
            raise StoreError(f"[reshard] {problem}; {BACKUP}")
        vector = self._store.vector(name, place.slot)
        self._add(name, place.slot, [vector[part.begin : part.begin + part.size] for part in self._parts])

    def _add(self, name: str, slot: int, pieces: list[Row]) -> None:
        for array, piece in zip(self._arrays[name], pieces, strict=True):
            array.write(slot, piece)
            self._done += piece.nbytes
        store = self._store
        total = sum(store.slot_bytes(name) for name, _ in self._vectors()) + store.clients * store.row_bytes
        self._progress(min(self._done, total), total)

    def _copied_rows(self) -> Iterator[tuple[bytes, Any]]:
        """Copy the rows to the same slots; yield their entries' checksums, and the clients, as SQLite has them."""
        store, codec = self._store, self._store.codec
        if codec is None:
            return
        for client_id, place in store.index.rows_by_slot():
            row = store.sound_row(place)
            if row is None:
                raise StoreError(f"[reshard] client {brief(client_id)}'s row is damaged: repair {store.path} first")
            pieces = [row]
            if self._cuts:
                pieces = [row_piece(row, codec, part.begin, part.size) for part in self._parts]
            self._add("rows", place.slot, pieces)
            crc = b"".join(row_crc(piece, codec) for piece in pieces)
            yield guarded_crc(client_id, place._replace(crc=crc)), key_of(client_id)

    def _write_index(self, shapes: Mapping[str, Shape], rows: Iterator[tuple[bytes, Any]]) -> None:
        """Copy the index, and write the new cuts, shapes and checksums of rows."""
        index = self._new / INDEX
        with closing(sqlite3.connect(index)) as connection:
            self._store.index.copy_to(connection)
            connection.execute("PRAGMA synchronous = FULL")
            texts = connection.execute("SELECT name, value FROM facts WHERE name != 'crc'")
            facts = {name: json.loads(text) for name, text in texts}
            facts["server"].pop("cuts", None)
            facts["server"] |= {"cuts": [*self._cuts]} if self._cuts else {}
            facts["shapes"] = shapes
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", fact_entries(facts))
            connection.executemany("UPDATE rows SET crc = ? WHERE client = ?", rows)
            connection.execute(f"PRAGMA user_version = {FORMAT_OF_SHARDS if self._cuts else FORMAT}")
            connection.commit()
        sync(index)


def _exchange(path: Path, new: Path) -> None:
    """Let two folders exchange their names: at once where the system can, else in two steps."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        names = _AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(new)
        is_exchanged = renameat2(*names, ctypes.c_uint(_RENAME_EXCHANGE)) == 0
    except AttributeError:
        is_exchanged = False
    if not is_exchanged:
        before = new.with_name(f"{new.name}.before")
        path.rename(before)
        new.rename(path)
        before.rename(new)
    sync(path.parent)
