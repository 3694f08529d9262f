"""A reader of stores that does not need the rule, and does not write to the store."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from afflux.aggregation.cache.rows import decoded
from afflux.aggregation.sharded_rows import whole_row
from afflux.ops.codecs import named
from afflux.ops.errors import StoreError
from afflux.store.checksums import damage, raise_if_damaged, row_crc
from afflux.store.files import UnreadableError, refuse_irregular
from afflux.store.index import Index
from afflux.store.lock import locked
from afflux.store.metadata import INDEX, LostMetadataError, Shape, check_group, damage_as_store_error, folder_of
from afflux.store.segments import Place, Row, Segments
from afflux.store.shards import parts_in


@contextmanager
def locked_reader(path: "str | PathLike[str]", *, shared: bool = True) -> "Iterator[StoreReader]":
    """Yield a reader with a lock.

    No other process writes to the store at the same time. If not `shared`, no other process reads it either.

    Raises:
        StoreError: see `StoreReader`; or a server has the store open.
    """
    with locked(folder_of(path), shared=shared), closing(StoreReader(Path(path), alone=True)) as store:
        yield store


class StoreReader:
    """A reader of the last commit of a store."""

    def __init__(self, path: Path, *, alone: bool) -> None:
        """Open the index and the arrays' metadata.

        With `alone`, no other process may write at the same time.

        Raises:
            StoreError: there is no store, or it has no commit, or it is damaged.
        """
        self.path = folder_of(path)
        refuse_irregular(path)
        self.index = Index(path / INDEX, read_only=True, alone=alone)
        with ExitStack() as undo, damage_as_store_error(path):
            undo.callback(self.index.close)
            facts = self.index.facts()
            committed = self.index.committed(facts)
            if committed is None:
                raise StoreError(f"[store] {path} holds no server: the process that was making it has ended")
            self.committed = committed
            self.facts: dict[str, Any] = facts
            self.server: dict[str, Any] = facts["server"]
            self.d: int = facts["server"]["d"]
            self.codec = named(facts["server"]["codec"])
            self.parts = parts_in(facts)
            self.shapes = {name: Shape(*shape) for name, shape in facts["shapes"].items()}
            #: Damage to Zarr's metadata of an array, or of the group (""), that `repair` can write again.
            self.lost: dict[str, str] = {}
            #: The parts of each array by its name, one of each vector; and all of them by their folders.
            self.arrays: dict[str, list[Segments]] = {}
            self.segments: dict[str, Segments] = {}
            for name in self.shapes:
                self._add_array(name)
            try:
                check_group(self.path)
            except LostMetadataError as error:
                self.lost[""] = error.what
            undo.pop_all()

    def _add_array(self, folder: str) -> None:
        name = folder.rpartition("/")[2]
        size = next(part.size for part in self.parts if f"{part.folder}{name}" == folder)
        size = self.codec.row_size(size) if name == "rows" and self.codec is not None else size
        shape, last = self.shapes[folder], self.committed.last_slots.get(name, -1)
        try:
            array = Segments(self.path / folder, size, shape, mapped=False, last=last)
        except LostMetadataError as error:
            self.lost[folder] = error.what
            array = Segments(self.path / folder, size, shape, mapped=False, lost=True)
        self.segments[folder] = array
        self.arrays.setdefault(name, []).append(array)

    @property
    def oversized(self) -> list[str]:
        """Describes the segment files that are too long."""
        return [line for array in self.segments.values() for line in array.oversized().values()]

    def slot_bytes(self, name: str) -> int:
        """Return the bytes of a vector of this array."""
        return sum(array.slot_bytes for array in self.arrays[name])

    def missing_slot(self, name: str, slot: int) -> str | None:
        """Describe why a slot to which the commit refers is missing; None if it is not missing."""
        problems = (array.missing_slot(slot) for array in self.arrays[name])
        return next((problem for problem in problems if problem is not None), None)

    def damage(self, name: str, place: Place) -> str | None:
        """Describe the damage of a vector; None if it is sound."""
        pairs = zip(self.parts, self.arrays[name], strict=True)
        problems = (damage(array, part.place(place), 1) for part, array in pairs)
        return next((problem for problem in problems if problem is not None), None)

    def vector(self, name: str, slot: int) -> Row:
        """Return the vector in a slot, (d,)."""
        parts = [array.array(slot) for array in self.arrays[name]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row; 0 for rules that cache no rows."""
        return 0 if self.codec is None else self.codec.row_bytes(self.d)

    @property
    def clients(self) -> int:
        """The number of clients that have a row."""
        return int(self.committed.meta["rows"][0]) if self.codec is not None else 0

    def sound_row(self, place: Place) -> Row | None:
        """Return the encoded row in a slot; None if the row is missing, or does not match its checksum.

        Raises:
            UnreadableError: the system does not open the row's file.
        """
        if self.codec is None or place.slot < 0:
            return None
        pieces = list[Row]()
        try:
            for part, array in zip(self.parts, self.arrays["rows"], strict=True):
                pieces.append(array.array(place.slot))
                if row_crc(pieces[-1], self.codec) != part.place(place, self.codec).crc:
                    return None
        except UnreadableError:
            raise
        except StoreError:
            return None
        return pieces[0] if len(pieces) == 1 else whole_row(pieces, self.codec, self.d)

    def params(self) -> Row:
        """Return the params of the last commit, (d,).

        Raises:
            StoreError: they are missing, or do not match their checksum.
        """
        place = self.committed.vectors["params"]
        for part, array in zip(self.parts, self.arrays["params"], strict=True):
            raise_if_damaged(array, part.place(place), 1)
        return self.vector("params", place.slot)

    def decoded(self, row: Row) -> Row:
        """Return a row, decoded: (d,) float32 or float64."""
        assert self.codec is not None
        vector: Row = decoded(row, self.d, self.codec)
        return vector

    def close(self) -> None:
        """Close the index."""
        self.index.close()
