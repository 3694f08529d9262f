"""What can be said of a store, and taken out of it, without its rule: `afflux store info` and `export`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from afflux.ops.errors import StoreError
from afflux.store.reading import Reading, reading


@dataclass(frozen=True, slots=True)
class Info:
    """What a store says of itself; sizes in bytes."""

    path: str
    rule: str  #: its name
    recipe: Mapping[str, Any]  #: its parts and their options, as far as they are afflux's own
    kind: str  #: what clients push
    d: int
    dtype: str  #: of params
    slot_dtype: str  #: of the arrivals that wait
    version: int  #: of the last commit
    joins: int  #: decisions about pushes until then
    waiting: int  #: arrivals that wait in it
    counts: Mapping[str, int]  #: pushes by what became of them
    num_clients: int | None  #: N, if the rule needs it
    clients: int  #: those that have a row
    id_type: str | None  #: of client ids: int or str; None before the first one
    codec: str | None  #: of the rows; None if the rule keeps none
    bits: int | None  #: of an element of a row, scales apart
    bytes_per_client: int  #: a row
    disk_bytes: Mapping[str, int]  #: of each array, allocated, and of the index
    durability: str  #: of the last commit: process or power
    #: Versions that this divides are committed; None: only checkpoints are; "unknown": an older afflux did not keep it.
    commit_every: int | Literal["unknown"] | None
    repairs: tuple[Mapping[str, Any], ...]  #: where bit continuity ended
    in_use: bool  #: a process holds the store
    problems: tuple[str, ...]  #: files that are missing, or not of their size; what is in them `check` reads
    notes: Any  #: of the last checkpoint


def info(path: "str | PathLike[str]") -> Info:
    """What a store says of itself. Reads the index, and the sizes of all files, whatever the number of clients, also
    while it is in use.

    Raises:
        StoreError: there is no store, or it is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from afflux import Server
    >>> from afflux.rules import ca2fl
    >>> folder = TemporaryDirectory()
    >>> with Server(ca2fl(buffer_size=1), np.zeros(3), num_clients=9, store=f"{folder.name}/store") as server:
    ...     _ = server.push("ann", np.ones(3), version=0)
    >>> found = info(f"{folder.name}/store")
    >>> found.rule, found.version, found.clients, found.codec, found.bytes_per_client, found.problems
    ('ca2fl', 1, 1, 'float32', 12, ())
    >>> folder.cleanup()
    """
    with _lightly(Path(path)) as (store, in_use):
        meta, server, codec = store.committed.meta, store.server, store.codec
        sizes = {name: array.disk_bytes for name, array in store.arrays.items()}
        sizes["index"] = sum(file.stat().st_size for file in store.path.glob(f"{store.index.path.name}*"))
        return Info(
            path=str(path),
            rule=server["rule"],
            recipe=store.facts["rule"],
            kind=server["kind"],
            d=store.d,
            dtype=server["dtype"],
            slot_dtype=server["slot_dtype"],
            version=meta["version"],
            joins=meta["joins"],
            waiting=len(store.committed.arrivals),
            counts=meta["counts"],
            num_clients=server["num_clients"],
            clients=store.clients,
            id_type=meta["id_type"],
            codec=None if codec is None else codec.name,
            bits=None if codec is None else codec.bits,
            bytes_per_client=store.row_bytes,
            disk_bytes=sizes,
            durability=meta["durability"],
            commit_every=store.facts.get("commits", {"commit_every": "unknown"})["commit_every"],
            repairs=tuple(store.facts.get("repairs", ())),
            in_use=in_use,
            problems=(*store.lost.values(), *missing(store), *store.too_long),
            notes=None if store.committed.notes is None else json.loads(store.committed.notes),
        )


@contextmanager
def _lightly(path: Path) -> Iterator[tuple[Reading, bool]]:
    """The store, also if a server is at work in it, and whether one is."""
    with ExitStack() as undo:
        try:
            store, in_use = undo.enter_context(reading(path)), False
        except StoreError:
            store, in_use = undo.enter_context(Reading(path, alone=False)), True
        yield store, in_use


def missing(store: Reading, but: Sequence[str] = ()) -> Iterator[str]:
    """Files that are not there, or cut off, and that the last commit needs."""
    for name, slot in store.committed.last_slots.items():
        lack = None if name in but else store.arrays[name].lack(slot)
        if lack is not None:
            yield lack
