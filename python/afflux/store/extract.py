"""Rows of a store as plain arrays in a file: `afflux store export`."""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np

from afflux.aggregation.cache.rows import Row, decoded_dtype
from afflux.ops.errors import StoreError
from afflux.rules.rule import ClientId
from afflux.store.index import Place
from afflux.store.reading import Reading, reading


def export(
    path: "str | PathLike[str]", out: "str | PathLike[str]", clients: Sequence[ClientId] | None = None
) -> list[ClientId]:
    """Writes clients' rows, decoded, to a file that NumPy reads without pickle; returns the clients.

    Args:
        path: the store's folder; nothing is written there.
        out: `.npy`: the rows, (n, d) float32 or float64; `.npz`: `rows`, and `clients`, (n,) int64 or text. What is
            there is replaced, as soon as all is written.
        clients: in this order; None: all that have a row, in the order in which they came.

    Raises:
        StoreError: no store, in use, no rows, a client without a row or with a damaged one, or `out` cannot be written.

    Cost: the rows are read and written once; memory for one of them, and some for each client.

    >>> from tempfile import TemporaryDirectory
    >>> from afflux import Server
    >>> from afflux.rules import ca2fl
    >>> folder = TemporaryDirectory()
    >>> with Server(ca2fl(buffer_size=2), np.zeros(3), num_clients=9, store=f"{folder.name}/store") as server:
    ...     for client in (7, 5):
    ...         _ = server.push(client, np.full(3, client, np.float32), version=0)
    >>> export(f"{folder.name}/store", f"{folder.name}/rows.npy")
    [5, 7]
    >>> np.load(f"{folder.name}/rows.npy").tolist()
    [[5.0, 5.0, 5.0], [7.0, 7.0, 7.0]]
    >>> folder.cleanup()
    """
    out = Path(out)
    if out.suffix not in (".npy", ".npz"):
        raise StoreError(f"[export] out is {out}, must end in .npy or .npz")
    with reading(path) as store:
        if store.codec is None:
            raise StoreError(f"[export] {path} has no rows: {store.server['rule']} keeps none")
        places = list(store.index.rows()) if clients is None else [(who, _place(store, who)) for who in clients]
        ids, new = [client_id for client_id, _ in places], out.with_name(out.name + ".new")
        try:
            try:
                _write(new, ids, _decoded(store, places), (len(ids), store.d), decoded_dtype(store.codec))
                new.replace(out)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"[export] cannot write {out}: {error.strerror}") from None
        return ids


def _place(store: Reading, client_id: ClientId) -> Place:
    place = store.index.row(client_id)
    if place is None:
        raise StoreError(f"[export] client {client_id!r} has no row in {store.path}")
    return place


def _decoded(store: Reading, places: Sequence[tuple[ClientId, Place]]) -> Iterator[Row]:
    for client_id, place in places:
        row = store.sound(place)
        if row is None:
            remedy = store.arrays["rows"].remedy
            raise StoreError(f"[export] client {client_id!r}'s row in {store.path} is damaged; {remedy}")
        yield store.decoded(row)


def _write(new: Path, ids: Sequence[ClientId], rows: Iterator[Row], shape: tuple[int, int], dtype: str) -> None:
    header = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape}
    if new.suffixes[-2] == ".npy":
        with new.open("wb") as file:
            _stream(file, header, rows)
        return
    names = np.array(ids, None if ids else np.int64)
    if names.tolist() != ids:
        lost = next(i for i, name in zip(ids, names.tolist(), strict=True) if i != name)
        raise StoreError(f"[export] client {lost!r} ends in a NUL, which text in .npz loses: export to .npy")
    with ZipFile(new, "w") as archive:
        with archive.open("clients.npy", "w") as entry:
            np.lib.format.write_array(entry, names, allow_pickle=False)
        with archive.open("rows.npy", "w", force_zip64=True) as entry:
            _stream(entry, header, rows)


def _stream(file: IO[bytes], header: dict[str, Any], rows: Iterator[Row]) -> None:
    np.lib.format.write_array_header_1_0(file, header)
    for row in rows:
        file.write(row.data)
