"""A store as one reads it who does not go on with it: without the rule, and without writing."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from afflux import ops
from afflux._engine import SUPERBLOCK
from afflux.codecs import Codec
from afflux.errors import StoreError
from afflux.rule import ClientId
from afflux.store.index import INDEX, Index, Place
from afflux.store.lock import Lock
from afflux.store.segments import Row, Segments


@contextmanager
def reading(path: "str | PathLike[str]", *, shared: bool = True) -> "Iterator[Reading]":
    """All of a store, which nobody writes to meanwhile; not `shared`: nor reads.

    Raises:
        StoreError: see `Reading`; or a server is at work in it.
    """
    lock = Lock(_folder(path), shared=shared)
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
        self.path = _folder(path)
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
            self.codec = self._codec() if "rows" in facts["arrays"] else None
            self.arrays = {name: Segments(path / name, self._size(name), mapped=False) for name in facts["arrays"]}
        except BaseException:
            self.index.close()
            raise

    def _codec(self) -> Codec:
        exact = "float64" if self.server["slot_dtype"] == "float64" else "float32"
        return Codec(self.server.get("codec") or exact)

    def _size(self, name: str) -> int:
        if name != "rows" or self.codec is None:
            return self.d
        return self.row_bytes // np.dtype(self.codec.row_dtype).itemsize

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
        if self.codec is None or not 0 <= place.slot < self.arrays["rows"].slots:
            return None
        try:
            row = self.arrays["rows"].array(place.slot)
        except StoreError:
            return None
        return row if ops.crc32c(row, ops.row_bytes(SUPERBLOCK, codec=self.codec)) == place.crc else None

    @property
    def row_dtype(self) -> str:
        """Of rows that are decoded."""
        return "float64" if self.codec is not None and self.codec.name == "float64" else "float32"

    def decoded(self, row: Row) -> Row:
        """(d,) of `row_dtype`."""
        assert self.codec is not None
        vector = np.empty(self.d, self.row_dtype)
        ops.decode(row, vector, codec=self.codec)
        return vector

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.index.close()


def _folder(path: "str | PathLike[str]") -> Path:
    if not Path(path).is_dir():
        raise StoreError(f"[store] there is no folder {path}")
    return Path(path)
