"""Rows that are kept on the host, for rounds on a GPU. A client's row is uploaded when the client pushes, and copied
back after the sweep that has written it.

    push    starts the upload: from pinned memory itself, or through a pinned copy (arrays.gpu.Gpu.upload)
    round   waits for the rows of its clients; its sweep reads the uploaded rows and overwrites them
    end     the new rows are copied to the host, before the new version is published

An uploaded row belongs to one client and one version of its row. When a sweep begins that writes the row, earlier
uploads become invalid; pushes until the end of the round use the rows that the sweep has written on the GPU.
"""

from collections.abc import Callable, Collection, Mapping
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from afflux.aggregation.cache.new_rows import NewRows, Row
from afflux.arrays.gpu import Gpu, Upload
from afflux.arrays.interop import bring
from afflux.rules.rule import ClientId


class StagedRow:
    """The row of one client on the GPU. The client's arrivals refer to it: it is freed with the last arrival."""

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
        self._staged: WeakValueDictionary[ClientId, StagedRow] = WeakValueDictionary()
        self._written: Collection[ClientId] = ()  # the clients whose rows a sweep writes, until its round ends

    def start_upload(self, client_id: ClientId, row_on_host: Callable[[ClientId], Row | None]) -> StagedRow:
        """Start to upload a client's row, unless it is on the GPU already. Return the staged row."""
        claim = object()
        with self._lock:  # first: a sweep that begins after this reads the claim
            staged = self._staged.get(client_id)
            if staged is None:
                staged = self._staged[client_id] = StagedRow()
            if staged.row is not None or client_id in self._written:
                return staged
            staged.claim = claim
        row = row_on_host(client_id)
        if row is not None:
            upload = self.device.upload(row, pinned=self._pinned)
            with self._lock:
                if staged.claim is claim:
                    staged.row = upload
        return staged

    def uploaded_rows(
        self, old: Mapping[ClientId, Row | None], new: NewRows, unaliased: Collection[ClientId]
    ) -> Mapping[ClientId, Any]:
        """Return the rows `old` on the GPU, for a sweep to read. Set `new.staged`, to which the sweep writes.

        A new row overwrites the old row that is read; for the clients in `unaliased` it has separate memory.
        """
        read = {client_id: None if row is None else self._uploaded(client_id, row) for client_id, row in old.items()}
        for client_id, row in new.items():
            own = None if client_id in unaliased else read[client_id]
            new.staged[client_id] = self.device.empty(row.size, row.dtype.name) if own is None else own
        return read

    def _uploaded(self, client_id: ClientId, row: Row) -> Any:
        with self._lock:
            staged = self._staged.get(client_id)
            upload = None if staged is None else staged.row
        if upload is None:  # its arrival was loaded with a state, or two pushes of its client overlapped
            upload = self.device.upload(row, pinned=self._pinned)
        upload.wait()  # on the host: after this any stream may read it
        return upload.array

    def begin_sweep(self, rows: NewRows) -> None:
        """Make earlier uploads of these rows invalid, before the sweep that writes the rows. May be repeated."""
        with self._lock:
            self._written = rows.keys()
            for client_id in rows:
                if (staged := self._staged.get(client_id)) is not None:
                    staged.row = staged.claim = None

    def copy_back(self, rows: NewRows) -> None:
        """Copy to the host the rows that a sweep has written. May be repeated."""
        for client_id, row in rows.staged.items():
            bring(row, rows[client_id])

    def end_round(self, rows: NewRows) -> None:
        """End the round: the rows that it has written on the GPU are now the clients' rows. May be repeated."""
        with self._lock:
            for client_id, row in rows.staged.items():
                if (staged := self._staged.get(client_id)) is not None:
                    staged.row = Upload(row)
            self._written = ()
