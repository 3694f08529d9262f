"""Rows that are kept on the host, for rounds on a GPU. A client's row is uploaded when the client pushes, and copied
back after the sweep that has written it.

    push    starts the upload: from pinned memory itself, or through a pinned copy (arrays.gpu.Gpu.upload)
    round   waits for the rows of its clients; its sweep reads the uploaded rows and overwrites them
    end     the new rows are copied to the host, before the new version is published

An uploaded row is a copy of one slot. When a sweep begins that writes a new row, earlier uploads of the old row become
invalid; pushes until the end of the round use the row that the sweep has written on the GPU. If the new row is in
another slot than the old one, as with a store, the staged row moves to that slot at the end of the round.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from afflux.arrays.gpu import Gpu, Upload
from afflux.arrays.interop import bring

#: An array of NumPy, or of the library of the GPU.
EncodedRow = Any


class NewRows(dict[int, EncodedRow]):
    """The rows that a round writes, by slot: the memory that keeps them."""

    sum_out: EncodedRow | None = None  #: the memory to which the sweep writes the sum; None: in place

    staging: "RowStaging | None" = None  #: the staging of `staged`

    def __init__(self, rows: Mapping[int, EncodedRow]) -> None:
        super().__init__(rows)
        #: The memory to which the sweep writes these rows, if they are kept on the host and the sweep runs on a GPU.
        self.staged: dict[int, EncodedRow] = {}
        self.before: dict[int, int] = {}  #: of the staged rows, the slot of the row that is replaced; its own: none was


class StagedRow:
    """The row of one slot on the GPU. The client's arrivals refer to it: it is freed with the last arrival."""

    __slots__ = ("__weakref__", "claim", "row")

    def __init__(self) -> None:
        self.row: Upload | None = None  #: the current row; None: it is not on the GPU
        self.claim: object = None  #: identifies the push whose upload becomes `row`


class RowStaging:
    """The rows of all clients that push, and of the round that is being made."""

    def __init__(self, device: Gpu, *, pinned: bool) -> None:
        """Stage rows on `device`. `pinned`: the rows are in pinned memory, which the GPU reads."""
        self.device = device
        self._pinned = pinned
        self._lock = Lock()
        self._staged: WeakValueDictionary[int, StagedRow] = WeakValueDictionary()  # by slot
        #: The slots of rows that a sweep writes or replaces, until its round ends.
        self._written: Collection[int] = ()

    def start_upload(self, slot: int, row_on_host: Callable[[int], EncodedRow]) -> StagedRow:
        """Start to upload the row in a slot, unless it is on the GPU already. Return the staged row."""
        claim = object()
        with self._lock:  # first: a sweep that begins after this reads the claim
            staged = self._staged.get(slot)
            if staged is None:
                staged = self._staged[slot] = StagedRow()
            if staged.row is not None or slot in self._written:
                return staged
            staged.claim = claim
        upload = self.device.upload(row_on_host(slot), pinned=self._pinned)
        with self._lock:
            if staged.claim is claim:
                staged.row = upload
        return staged

    def uploaded_rows(
        self, reads: Sequence[int | None], writes: Sequence[int | None], old: Mapping[int, EncodedRow], new: NewRows
    ) -> dict[int, EncodedRow]:
        """Return the rows `old` on the GPU, for a sweep to read. Set `new.staged`, to which the sweep writes.

        A new row overwrites the old row, unless a later arrival reads the old row.
        """
        rows, new.staging = {slot: self._uploaded(slot, row) for slot, row in old.items()}, self
        readers = {slot: i for i, slot in enumerate(reads)}  # the last arrival that reads the slot
        for i, (before, slot) in enumerate(zip(reads, writes, strict=True)):
            if slot is not None:
                target = None if before is None or readers[before] > i else rows[before]
                new.staged[slot] = self.device.empty(new[slot].size, new[slot].dtype.name) if target is None else target
                new.before[slot] = slot if before is None else before
        return rows

    def _uploaded(self, slot: int, row: EncodedRow) -> Any:
        with self._lock:
            staged = self._staged.get(slot)
            upload = None if staged is None else staged.row
        if upload is None:  # its arrival was loaded with a state, or two pushes of its client overlapped
            upload = self.device.upload(row, pinned=self._pinned)
        upload.wait()  # on the host: after this any stream may read it
        return upload.array

    def begin_sweep(self, rows: NewRows) -> None:
        """Make earlier uploads of these rows invalid, before the sweep that writes the rows. May be repeated."""
        with self._lock:
            self._written = {*rows.before, *rows.before.values()}
            for slot in self._written:
                if (staged := self._staged.get(slot)) is not None:
                    staged.row = staged.claim = None

    def copy_back(self, rows: NewRows) -> None:
        """Copy to the host the rows that a sweep has written. May be repeated."""
        for slot, row in rows.staged.items():
            bring(row, rows[slot])

    def end_round(self, rows: NewRows) -> None:
        """End the round: the rows that it has written on the GPU are now in their slots. May be repeated."""
        with self._lock:
            for slot, row in rows.staged.items():
                for place in (slot, rows.before[slot]):
                    if (staged := self._staged.pop(place, None)) is not None:
                        staged.row = Upload(row)
                        self._staged[slot] = staged
            self._written = ()
