"""A store as one reads it who does not go on with it: without the rule, and without writing."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from afflux.aggregation.cache.rows import Row, decoded, row_crc
from afflux.ops.codecs import named
from afflux.ops.errors import StoreError
from afflux.rules.rule import ClientId
from afflux.store.index import INDEX, Index, Place, folder_of
from afflux.store.lock import Lock
from afflux.store.metadata import LostError, Shape, check_group
from afflux.store.segments import Segments


@contextmanager
def reading(path: "str | PathLike[str]", *, shared: bool = True) -> "Iterator[Reading]":
    """All of a store, which nobody writes to meanwhile; not `shared`: nor reads.

    Raises:
        StoreError: see `Reading`; or a server is at work in it.
    """
    lock = Lock(folder_of(path), shared=shared)
    try:
        with Reading(Path(path), alone=True) as store:
            yield store
    finally:
        lock.release()


class Reading:
    """The last commit of a store, until it is closed."""

    def __init__(self, path: Path, *, alone: bool) -> None:
        """Opens the index and the arrays' metadata; `alone`: nobody writes meanwhile.

        Raises:
            StoreError: there is no store, or none that a server was kept in, or it is damaged.
        """
        self.path = folder_of(path)
        self.index = Index(path / INDEX, read_only=True, alone=alone)
        try:
            facts = self.index.facts()
            committed = self.index.committed()
            if committed is None:
                raise StoreError(f"[store] {path} holds no server: the process that began to make it was ended")
            self.committed = committed
            self.facts: dict[str, Any] = facts
            self.server: dict[str, Any] = facts["server"]
            self.d: int = facts["server"]["d"]
            self.codec = named(facts["server"]["codec"])
            self.shapes = {name: Shape(*shape) for name, shape in facts["shapes"].items()}
            #: What Zarr does not know any more, of an array or of the folder (""), and can be told again.
            self.lost: dict[str, str] = {}
            self.arrays = {name: self._array(name) for name in self.shapes}
            try:
                check_group(self.path)
            except LostError as error:
                self.lost[""] = error.what
        except BaseException:
            self.index.close()
            raise

    def _array(self, name: str) -> Segments:
        size = self.codec.row_size(self.d) if name == "rows" and self.codec is not None else self.d
        shape, last = self.shapes[name], self.committed.last_slots.get(name, -1)
        try:
            return Segments(self.path / name, size, shape, mapped=False, last=last)
        except LostError as error:
            self.lost[name] = error.what
            return Segments(self.path / name, size, shape, mapped=False, lost=True)

    @property
    def too_long(self) -> list[str]:
        """What is wrong with files that have more than their slots."""
        return [line for array in self.arrays.values() for line in array.too_long().values()]

    @property
    def row_bytes(self) -> int:
        """Of an encoded row; 0 for rules that keep none."""
        return 0 if self.codec is None else self.codec.row_bytes(self.d)

    @property
    def clients(self) -> int:
        """Those that have a row."""
        return int(self.committed.meta["rows"][0]) if self.codec is not None else 0

    def rows(self) -> Iterator[tuple[ClientId, Place]]:
        """Where the rows lie that the last commit knows, in the order of their slots."""
        return self.index.by_slot()

    def sound(self, place: Place) -> Row | None:
        """The encoded row in a slot; None if it is not there, or does not agree with its checksum."""
        if self.codec is None or place.slot < 0:
            return None
        try:
            row = self.arrays["rows"].array(place.slot)
        except StoreError:
            return None
        return row if row_crc(row, self.codec) == place.crc else None

    def decoded(self, row: Row) -> Row:
        """(d,) float32 or float64."""
        assert self.codec is not None
        return decoded(row, self.d, self.codec)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.index.close()
