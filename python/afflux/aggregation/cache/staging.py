"""Rows that are kept on the host, for rounds on a GPU: each is copied there when its client pushes, and comes back
after the sweep that has changed it.

    push    the row begins to come: from pinned memory itself, or through some (devices.Gpu.upload)
    round   waits for the rows of its clients; its sweep reads these copies, and writes over them
    back    the new rows go to the host, before anybody can pull the new version

A copy is of one client and one version of its row: as soon as a sweep begins that writes the row, the copies that were
begun before count no more, and those who push meanwhile get what the sweep has left on the GPU.
"""

from collections.abc import Callable, Collection, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from afflux.arrays.gpu import Gpu, Upload
from afflux.arrays.interop import bring
from afflux.rules.rule import ClientId

if TYPE_CHECKING:
    from afflux.aggregation.cache.rows import Row, Rows


class Stage:
    """Of a client that pushes. Held by its arrivals, so that the copy goes when nobody waits for it any more."""

    __slots__ = ("__weakref__", "claim", "row")

    def __init__(self) -> None:
        self.row: Upload | None = None  #: the row as it is now, on the GPU; None: it is not there
        self.claim: object = None  #: of the push whose copy is to be it


class Stages:
    """Of all clients that push, and of the round that is made."""

    def __init__(self, device: Gpu, *, pinned: bool) -> None:
        """`pinned`: the rows themselves lie in memory that the GPU reads."""
        self.device = device
        self._pinned = pinned
        self._lock = Lock()
        self._of: WeakValueDictionary[ClientId, Stage] = WeakValueDictionary()
        self._written: Collection[ClientId] = ()  # by the sweep that was begun, until its round counts

    def begin(self, client_id: ClientId, lying: Callable[[ClientId], "Row | None"]) -> Stage:
        """Begins to bring a client's row in, unless it is there; `lying` says where it lies on the host."""
        claim = object()
        with self._lock:  # first: a sweep that begins from here on sees the claim
            stage = self._of.get(client_id)
            if stage is None:
                stage = self._of[client_id] = Stage()
            if stage.row is not None or client_id in self._written:
                return stage
            stage.claim = claim
        row = lying(client_id)
        if row is not None:
            upload = self.device.upload(row, pinned=self._pinned)
            with self._lock:
                if stage.claim is claim:
                    stage.row = upload
        return stage

    def places(
        self, old: Mapping[ClientId, "Row | None"], new: "Rows", apart: Collection[ClientId]
    ) -> Mapping[ClientId, Any]:
        """What a sweep reads in the place of `old`; `new` learns where it writes: over what it reads, but for those
        that are to be `apart`. Nothing counts yet.
        """
        read = {client_id: None if row is None else self._come(client_id, row) for client_id, row in old.items()}
        for client_id, row in new.items():
            own = None if client_id in apart else read[client_id]
            new.staged[client_id] = self.device.empty(row.size, row.dtype.name) if own is None else own
        return read

    def _come(self, client_id: ClientId, row: "Row") -> Any:
        with self._lock:
            stage = self._of.get(client_id)
            upload = None if stage is None else stage.row
        if upload is None:  # it waits since before the server was opened, or two pushes of its client have met
            upload = self.device.upload(row, pinned=self._pinned)
        upload.wait()  # the host waits: from here on it is there for any stream
        return upload.array

    def sweeping(self, rows: "Rows") -> None:
        """The sweep begins that writes these rows. May be repeated."""
        with self._lock:
            self._written = rows.keys()
            for client_id in rows:
                if (stage := self._of.get(client_id)) is not None:
                    stage.row = stage.claim = None

    def collect(self, rows: "Rows") -> None:
        """Brings what a sweep has written to the host. May be repeated."""
        for client_id, row in rows.staged.items():
            bring(row, rows[client_id])

    def settle(self, rows: "Rows") -> None:
        """The rows count. May be repeated."""
        with self._lock:
            for client_id, row in rows.staged.items():
                if (stage := self._of.get(client_id)) is not None:
                    stage.row = Upload(row)
            self._written = ()
