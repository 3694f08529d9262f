"""A store as one reads it who does not go on with it: without the rule, and without writing."""

from collections.abc import Iterator
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
from afflux.store.segments import Row, Segments


class Reading:
    """The last commit of a store, until it is closed. Who reads more than the index keeps writers out (`Lock`)."""

    def __init__(self, path: Path) -> None:
        """Opens the index and the arrays' metadata.

        Raises:
            StoreError: there is no store, or none that a server was kept in, or it is damaged.
        """
        if not path.is_dir():
            raise StoreError(f"[store] there is no folder {path}")
        self.path = path
        self.index = Index(path / INDEX, read_only=True)
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
        row = self.arrays["rows"].array(place.slot)
        return row if ops.crc32c(row, ops.row_bytes(SUPERBLOCK, codec=self.codec)) == place.crc else None

    def decoded(self, row: Row) -> Row:
        """(d,) float32 or float64."""
        assert self.codec is not None
        vector = np.empty(self.d, "float64" if self.codec.name == "float64" else "float32")
        ops.decode(row, vector, codec=self.codec)
        return vector

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.index.close()
