"""Cached rows of a `ShardedPlane`: each part has the rows of its elements, and a caller sees whole ones."""

from collections.abc import Iterable, Sequence

import numpy as np

from afflux._engine import SUPERBLOCK
from afflux.aggregation.cache.rows import RowMemory
from afflux.aggregation.cache.staging import EncodedRow, NewRows
from afflux.aggregation.cache.table import RowPlan
from afflux.ops.codecs import Codec

#: The difference of keys between the random bits of two runs (engine/formula/random).
_KEY_STEP = 0x9E3779B97F4A7C15
#: The bytes of d and of the key in the head of a row (docs/reference/codecs.md).
_SIZE, _KEY = slice(8, 16), slice(16, 24)


def key_at(codec: Codec, key: int, begin: int) -> int:
    """Return the key with which a slice that begins at element `begin` has the random bits of the whole row."""
    return (key + begin // codec.run * _KEY_STEP) % 2**64


def plan_at(plan: RowPlan, codec: Codec, begin: int) -> RowPlan:
    """Return the plan of the rows of a part that begins at element `begin`."""
    return plan._replace(facts=[facts._replace(key=key_at(codec, facts.key, begin)) for facts in plan.facts])


def whole_row(rows: Sequence[EncodedRow], codec: Codec, size: int) -> EncodedRow:
    """Return the encoded row of `size` elements whose parts have these encoded rows."""
    pieces, head = [np.asarray(row).view(np.uint8) for row in rows], codec.row_bytes(0)
    whole = np.concatenate([pieces[0][:head], *(piece[head:] for piece in pieces)])
    if head:
        whole[_SIZE].view("<i8")[:] = size
    return whole.view(codec.row_dtype)


def row_piece(row: EncodedRow, codec: Codec, begin: int, size: int) -> EncodedRow:
    """Return the encoded row of the part with these elements, from a whole one."""
    codes, bytes_to, head = np.asarray(row).view(np.uint8), codec.row_bytes, codec.row_bytes(0)
    assert begin % SUPERBLOCK == 0  # so that the codes of a part are contiguous
    piece = np.concatenate([codes[:head], codes[bytes_to(begin) : bytes_to(begin + size)]])
    if head:
        piece[_SIZE].view("<i8")[:] = size
        key = int(piece[_KEY].view("<u8")[0])
        piece[_KEY].view("<u8")[:] = key_at(codec, key, begin)
    return piece.view(codec.row_dtype)


class ShardedRows(RowMemory):
    """The rows of all parts, by slot."""

    def __init__(self, parts: Sequence[RowMemory], begins: Sequence[int]) -> None:
        """`begins` are the first elements of the parts."""
        super().__init__(sum(part.size for part in parts), parts[0].codec)
        self.parts = parts
        self._begins = begins

    @property
    def sum(self) -> EncodedRow:
        """The sum of all rows, (d,), a copy."""
        return np.concatenate([part.sum for part in self.parts])

    def row(self, slot: int) -> EncodedRow:
        """Return a copy of the row in a slot, encoded."""
        return whole_row([part.row(slot) for part in self.parts], self.codec, self.size)

    def publish(self, new: Sequence[NewRows]) -> None:
        """Make these rows the current ones. May be repeated."""
        for part, rows in zip(self.parts, new, strict=True):
            part.publish(rows)

    def loaded(self, rows: Iterable[EncodedRow], total: EncodedRow) -> "ShardedRows":
        """Return other rows, with copies of these."""
        rows, codec = [*rows], self.codec
        parts = [
            part.loaded([row_piece(row, codec, begin, part.size) for row in rows], total[begin : begin + part.size])
            for part, begin in zip(self.parts, self._begins, strict=True)
        ]
        return ShardedRows(parts, self._begins)
