"""Facts and rows of a store, read without its rule: `afflux store info` and `export`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afflux.aggregation.cache.rows import decoded_dtype
from afflux.ops.errors import StoreError
from afflux.ops.validation import brief, plain_id
from afflux.rules.rule import ClientId
from afflux.store.constants_file import constants_of
from afflux.store.files import reason
from afflux.store.lock import InUseError, locked
from afflux.store.metadata import folder_of
from afflux.store.reader import StoreReader, locked_reader
from afflux.store.segments import Place, Row
from afflux.store.stored_state import layout_of


@dataclass(frozen=True, slots=True)
class Info:
    """Facts about a store; sizes in bytes."""

    path: str
    rule: str  #: the name of the rule
    rule_config: Mapping[str, Any]  #: the result of `Rule.to_config`, for `rules.from_config`
    kind: str  #: the kind of vector that clients push
    d: int
    dtype: str  #: of params
    slot_dtype: str  #: of arrivals
    version: int  #: of the last commit
    joins: int  #: the number of decisions about pushes until the last commit
    waiting: int  #: arrivals in the buffer
    counts: Mapping[str, int]  #: pushes by status
    shards: int  #: the number of shards of the vectors; 1: in one piece
    num_clients: int | None  #: N, if the rule needs it
    clients: int  #: the number of clients that have a row
    codec: str | None  #: the codec of the rows; None if the rule keeps none
    bits: int | None  #: bits of an element of a row, without scales
    bytes_per_client: int  #: bytes of a row
    disk_bytes: Mapping[str, int]  #: bytes allocated for each array, and bytes of the index
    durability: str  #: of the last commit: process or power
    commit_every: int | None  #: a version is committed if this number divides it; None: only checkpoints commit
    repairs: tuple[Mapping[str, Any], ...]  #: repairs, each with the version after which the bits may differ
    in_use: bool  #: whether a process has the store open for writing
    problems: tuple[str, ...]  #: damaged metadata, missing files, files of a wrong size; `check` also reads contents
    notes: Any  #: of the last checkpoint


def info(path: "str | PathLike[str]") -> Info:
    """Return facts about a store.

    This reads the index, and the sizes of all files. It works while the store is in use.

    Raises:
        StoreError: there is no store, or it is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from afflux import Server
    >>> from afflux.rules import ca2fl
    >>> folder = TemporaryDirectory()
    >>> with Server(ca2fl(buffer_size=1), np.zeros(3), num_clients=9, store=f"{folder.name}/store") as server:
    ...     _ = server.push(client="ann", update=np.ones(3), version=0)
    >>> found = info(f"{folder.name}/store")
    >>> found.rule, found.version, found.clients, found.codec, found.bytes_per_client, found.problems
    ('ca2fl', 1, 1, 'float32', 12, ())
    >>> folder.cleanup()
    """
    with _reader(Path(path)) as (store, in_use):
        meta, server, codec = store.committed.meta, store.server, store.codec
        sizes = {name: sum(array.disk_bytes for array in parts) for name, parts in store.arrays.items()}
        sizes["index"] = sum(file.stat().st_size for file in store.path.glob(f"{store.index.path.name}*"))
        return Info(
            path=str(path),
            **{name: server[name] for name in ("rule", "kind", "d", "dtype", "slot_dtype", "num_clients")},
            **{name: meta[name] for name in ("version", "joins", "counts", "durability")},
            rule_config=store.facts["rule"],
            waiting=len(store.committed.arrivals),
            shards=len(server.get("cuts", ())) + 1,
            clients=store.clients,
            codec=None if codec is None else codec.name,
            bits=None if codec is None else codec.bits,
            bytes_per_client=store.row_bytes,
            disk_bytes=sizes,
            commit_every=store.facts["commits"]["commit_every"],
            repairs=tuple(store.facts["repairs"]),
            in_use=in_use,
            problems=(*store.lost.values(), *missing(store), *store.oversized),
            notes=None if store.committed.notes is None else json.loads(store.committed.notes),
        )


@contextmanager
def _reader(path: Path) -> Iterator[tuple[StoreReader, bool]]:
    """Yield a reader of a store that a server may have open, and whether a server has it open."""
    with ExitStack() as undo:
        try:
            undo.enter_context(locked(folder_of(path), shared=True))
            in_use = False
        except InUseError:
            in_use = True
        yield undo.enter_context(closing(StoreReader(path, alone=not in_use))), in_use


def missing(store: StoreReader, but: Sequence[str] = ()) -> Iterator[str]:
    """Describe missing or truncated files that the last commit refers to, and a damaged file of constants."""
    try:
        constants_of(store.path, layout_of(store.path, store.server, store.committed.buffers))
    except StoreError as error:
        yield str(error).removeprefix("[store] ")
    for name, slot in store.committed.last_slots.items():
        lack = None if name in but else store.missing_slot(name, slot)
        if lack is not None:
            yield lack


def export(
    path: "str | PathLike[str]", out: "str | PathLike[str]", clients: Sequence[ClientId] | None = None
) -> list[ClientId]:
    """Write clients' rows, decoded, to a file that NumPy reads without pickle; return the clients.

    Args:
        path: the store's folder; nothing is written there.
        out: `.npy`: the rows, (n, d) float32 or float64; `.npz`: `rows`, and `clients`, (n,) int64, uint64 or text. If
            no such array holds all the ids (for example 7 and "7"), `clients_json` (n,) holds each id as JSON. An
            existing file is replaced after all data are written.
        clients: the clients, in the order of the output; None: all with a stored vector, in the order of their
            first push.

    Raises:
        StoreError: there is no store, it is in use or has no rows, a client has no row or a damaged one, or `out`
            cannot be written.
        AffluxError: a client is neither an int in 64 bits nor a str.

    Cost: the rows are read and written once. Memory for one row, and some for each client.

    >>> from tempfile import TemporaryDirectory
    >>> from afflux import Server
    >>> from afflux.rules import ca2fl
    >>> folder = TemporaryDirectory()
    >>> with Server(ca2fl(buffer_size=2), np.zeros(3), num_clients=9, store=f"{folder.name}/store") as server:
    ...     for client in (7, 5):
    ...         _ = server.push(client=client, update=np.full(3, client, np.float32), version=0)
    >>> export(f"{folder.name}/store", f"{folder.name}/rows.npy")
    [5, 7]
    >>> np.load(f"{folder.name}/rows.npy").tolist()
    [[5.0, 5.0, 5.0], [7.0, 7.0, 7.0]]
    >>> folder.cleanup()
    """
    out = _checked_out(out)
    with locked_reader(path) as store:
        if store.codec is None:
            raise StoreError(f"[export] {path} has no rows: {store.server['rule']} keeps none")
        places = list(store.index.rows()) if clients is None else [_place(store, client_id) for client_id in clients]
        ids = [client_id for client_id, _ in places]
        rows = _Array("rows", np.dtype(decoded_dtype(store.codec)).str, (len(ids), store.d), _decoded(store, places))
        _write(out, [rows] if out.suffix == ".npy" else [_ids_array(ids), rows])
        return ids


def export_params(path: "str | PathLike[str]", out: "str | PathLike[str]") -> int:
    """Write params of the last commit to a file that NumPy reads without pickle; return their version.

    Args:
        path: the store's folder; nothing is written there.
        out: `.npy`: the flat vector, (d,); `.npz`: the model's arrays by their names, if the server was made with a
            tree, else `params`. The model's statistics are float64. An existing file is replaced after all data are
            written.

    Raises:
        StoreError: there is no store, it is in use, its params are damaged, or `out` cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> from afflux import Server
    >>> from afflux.rules import fedbuff
    >>> folder = TemporaryDirectory()
    >>> Server(fedbuff(), {"w": np.ones((1, 2)), "b": np.zeros(1)}, store=f"{folder.name}/store").close()
    >>> export_params(f"{folder.name}/store", f"{folder.name}/model.npz")
    0
    >>> with np.load(f"{folder.name}/model.npz") as model:
    ...     {name: array.tolist() for name, array in model.items()}
    {'w': [[1.0, 1.0]], 'b': [0.0]}
    >>> folder.cleanup()
    """
    out = _checked_out(out)
    with locked_reader(path) as store:
        params = store.params()
        model = [("params", params)] if out.suffix == ".npy" else _model(store, params)
        _write(out, (_Array(name, array.dtype.str, array.shape, [array]) for name, array in model))
        return int(store.committed.meta["version"])


def _model(store: StoreReader, params: Row) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the names of the model's arrays, and the arrays; without a layout, the flat vector."""
    layout = layout_of(store.path, store.server, store.committed.buffers)
    if layout is None:
        yield "params", params
        return
    buffers = np.frombuffer(store.committed.buffers or b"", np.float64)
    values = [(field.name, array) for field, array in layout._pieces_of(params, buffers if buffers.size else None)]
    for name, array in (*values, *constants_of(store.path, layout).items()):
        if "/" in name or "\\" in name:  # names in an archive are paths
            raise StoreError(f"[export] {brief(name)} cannot be a name in a .npz: give a .npy")
        yield name or "params", array


def _checked_out(out: "str | PathLike[str]") -> Path:
    out = Path(out)
    if out.suffix not in (".npy", ".npz"):
        raise StoreError(f"[export] out is {out}, must end in .npy or .npz")
    return out


def _place(store: StoreReader, client_id: ClientId) -> tuple[ClientId, Place]:
    client_id = plain_id(client_id, "export")
    place = store.index.row(client_id)
    if place is None:
        raise StoreError(f"[export] client {brief(client_id)} has no row in {store.path}")
    return client_id, place


def _decoded(store: StoreReader, places: Sequence[tuple[ClientId, Place]]) -> Iterator[Row]:
    for client_id, place in places:
        row = store.sound_row(place)
        if row is None:
            remedy = store.arrays["rows"][0].remedy
            raise StoreError(f"[export] client {brief(client_id)}'s row in {store.path} is damaged; {remedy}")
        yield store.decoded(row)


class _Array(NamedTuple):
    """An array of an output, which is written piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[npt.NDArray[Any]]


def _ids_array(ids: Sequence[ClientId]) -> _Array:
    """Return an array that represents the ids exactly."""
    for kind in ("<i8", "<u8"):
        limits = np.iinfo(kind)
        if all(not isinstance(client_id, str) and limits.min <= client_id <= limits.max for client_id in ids):
            return _Array("clients", kind, (len(ids),), (np.array([client_id], kind) for client_id in ids))
    # NumPy cuts off a NUL at the end of a text.
    are_texts = all(isinstance(client_id, str) and not client_id.endswith("\0") for client_id in ids)
    texts = ids if are_texts else [json.dumps(client_id) for client_id in ids]
    kind = f"<U{max(1, *(len(str(text)) for text in texts))}"
    pieces = (np.array([text], kind) for text in texts)
    return _Array("clients" if are_texts else "clients_json", kind, (len(ids),), pieces)


def _write(out: Path, arrays: Iterable[_Array]) -> None:
    """Write arrays to a `.npz`, or the one array to a `.npy`; replace `out` when all are written."""
    from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

    with _replaced(out) as new, new.open("wb") as file:
        if out.suffix == ".npy":
            (array,) = arrays
            _stream(file, array)
            return
        with ZipFile(file, "w") as archive:
            for array in arrays:
                info = ZipInfo(f"{array.name}.npy")
                # All texts have the width of the longest one.
                info.compress_type = ZIP_DEFLATED if "U" in array.dtype else ZIP_STORED
                with archive.open(info, "w", force_zip64=True) as entry:
                    _stream(entry, array)


@contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """Yield a temporary file for writing. It replaces `out` at the end of the block."""
    new = out.with_name(out.name + ".new")
    try:
        yield new
        new.replace(out)
    except OSError as error:
        raise StoreError(f"[export] cannot write {out}: {reason(error)}") from None
    finally:
        new.unlink(missing_ok=True)


def _stream(file: IO[bytes], array: _Array) -> None:
    header = {"descr": array.dtype, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in array.pieces:
        file.write(np.ascontiguousarray(piece).view(np.uint8).data)
