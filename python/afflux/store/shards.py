"""The parts of a store's vectors: one, in the store's own folder; or those of a server in shards, each in a folder.

The slots of a vector have the same number in all parts, and its checksums are those of the parts one after the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from afflux._engine import SUPERBLOCK
from afflux.aggregation.checkpoint import STORED
from afflux.aggregation.sharded_plane import parts_of
from afflux.ops.codecs import Codec
from afflux.store.metadata import MOST_WAITING, Shape, shape_of
from afflux.store.segments import Place

#: The bytes of a checksum.
_CRC_BYTES = 4


class StoredPart(NamedTuple):
    """A part of each vector of a store."""

    folder: str  #: with "/" at its end, in the store's folder; "": the store's folder itself
    begin: int  #: the first element
    size: int  #: elements
    number: int  #: counted from 0
    last: bool

    def place(self, whole: Place, codec: Codec | None = None) -> Place:
        """Return the place of this part of a vector, or of a row in `codec`, each of whose parts may have a head."""
        heads = codec is not None and codec.row_bytes(0) > 0
        first = self.begin // SUPERBLOCK + self.number * heads
        end = None if self.last else _CRC_BYTES * (first + heads + self.size // SUPERBLOCK)
        return whole._replace(crc=whole.crc[_CRC_BYTES * first : end])


def stored_parts(size: int, cuts: Sequence[int]) -> list[StoredPart]:
    """Return the parts of vectors of `size` elements; `cuts` are the superblocks with which later shards begin."""
    if not cuts:
        return [StoredPart("", 0, size, 0, last=True)]
    parts = parts_of(size, cuts)
    begins = [*(part.first * SUPERBLOCK for part in parts), size]
    return [
        StoredPart(f"shard-{part.shard}/{part.first}/", begins[i], begins[i + 1] - begins[i], i, i + 1 == len(parts))
        for i, part in enumerate(parts)
    ]


def shapes_in(
    server: Mapping[str, Any],
    options: Mapping[str, Any],
    cuts: Sequence[int],
    rule_vectors: Iterable[str],
    buffer_size: int,
    codec: Codec | None,
) -> dict[str, Shape]:
    """Return the shapes of the arrays of a store with these facts, by folder."""
    dtype, waiting = server["dtype"], min(buffer_size, MOST_WAITING)
    shapes = dict[str, Shape]()
    for folder, _, size, *_ in stored_parts(server["d"], cuts):
        shapes[f"{folder}params"] = shape_of(dtype, size, 4)
        shapes[f"{folder}arrivals"] = shape_of(STORED[server["slot_dtype"]], size, waiting)
        shapes |= {f"{folder}rule_vector.{name}": shape_of(dtype, size, 2) for name in rule_vectors}
        if options["accumulate"]:
            shapes[f"{folder}total"] = shape_of("float64", size, 2)
        if codec is not None:
            rows = (server["num_clients"] or 0) + waiting
            shapes[f"{folder}sum"] = shape_of("float64", size, 2)
            shapes[f"{folder}rows"] = shape_of(codec.row_dtype, codec.row_size(size), rows)
    return shapes


def parts_in(facts: Mapping[str, Any]) -> list[StoredPart]:
    """Return the parts of the vectors of a store with these facts."""
    return stored_parts(facts["server"]["d"], facts["server"].get("cuts", ()))


def joined(places: Sequence[Place]) -> Place:
    """Return the place of a vector, from those of its parts."""
    (slot,) = {place.slot for place in places}  # see VectorSlots: each part has made the same calls
    return places[0]._replace(slot=slot, crc=b"".join(place.crc for place in places))
