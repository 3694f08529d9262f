"""The entries of a store's index: writing them, reading them, and their checksums."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import convert

from afflux.rules.rule import ClientId
from afflux.store.segments import Place


class StoredArrival(NamedTuple):
    """An arrival in the buffer."""

    join: int  #: the number of its join
    place: Place | None  #: the place of its vector; None if the vector is in a sum
    record: Sequence[Any]  #: see checkpoint.arrival_record
    buffers: bytes | None


class ListUpdate(NamedTuple):
    """The entries of a growing list from index `start` on; they replace the stored entries from `start` on."""

    start: int
    entries: Sequence[Any]


def arrival_entries(arrivals: Iterable[StoredArrival]) -> Iterator[tuple[Any, ...]]:
    """Yield, for each of these arrivals, the columns of the table `arrivals`."""
    for number, (join, place, record, buffers) in enumerate(arrivals):
        slot, crc = (None, None) if place is None else (place.slot, place.crc)
        yield number, join, slot, crc, json.dumps(record), buffers


def key_of(client_id: ClientId) -> int | str | bytes:
    """Return the client id as SQLite stores it.

    SQLite's ints are signed: an int from 2**63 on is stored as 8 bytes, most significant byte first.
    """
    return client_id.to_bytes(8, "big") if isinstance(client_id, int) and client_id >= 2**63 else client_id


def record_of(text: str) -> list[Any]:
    """Return the record of a stored arrival, decoded and checked; see checkpoint.arrival_record.

    Raises:
        ValueError, msgspec.ValidationError: the record is invalid.
    """
    from afflux.store.index_types import ArrivalRecord

    record: list[Any] = json.loads(text)
    convert(record, ArrivalRecord)
    return record


def guarded_crc(client_id: ClientId, place: Place) -> bytes:
    """Return a row's checksums as they are stored: followed by a checksum of the entry itself."""
    return place.crc + crc_of(client_id, place.slot, place.crc).to_bytes(4, "little")


def row_of(key: Any, slot: Any, crc: Any, rank: Any) -> tuple[ClientId, Place]:
    """Return a client, and the place of its row. If the entry is damaged, the place does not match any row."""
    client_id: ClientId = int.from_bytes(key, "big") if isinstance(key, bytes) and len(key) == 8 else key
    if not isinstance(client_id, int | str):
        raise ValueError(f"{key!r} is not a client's id")
    if isinstance(crc, bytes) and isinstance(slot, int) and isinstance(rank, int) and min(slot, rank) >= 0:
        place = Place(slot, crc[:-4], rank)
        if guarded_crc(client_id, place) == crc:
            return client_id, place
    return client_id, Place(0, b"", rank if isinstance(rank, int) else 0)


def fact_entries(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and JSON of each fact, and their checksum."""
    texts = {name: json.dumps(facts[name], default=np.generic.item) for name in sorted(facts)}
    return [*texts.items(), ("crc", str(crc_of(texts)))]


def list_entry(number: int, entry: Any = None, text: str = "") -> str:
    """Return an entry of a list, preceded by its checksum."""
    text = text or json.dumps(entry)
    return f"{crc_of(number, text):08x}{text}"


def crc_of(*parts: Any) -> int:
    """Return a checksum of plain values."""
    return zlib.crc32(repr(parts).encode("utf-8", "surrogatepass"))
