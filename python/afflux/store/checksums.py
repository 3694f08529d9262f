"""The checksums of vectors and rows on disk: computed, taken from a sweep that has computed them, and compared."""

from collections.abc import Mapping
from types import MappingProxyType

from afflux import ops
from afflux._engine import SUPERBLOCK, address
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError
from afflux.store.segments import Place, Row, Segments

#: Checksums of the vectors that a sweep has just written, by address.
SweepChecksums = Mapping[int, bytes]
NO_CHECKSUMS: SweepChecksums = MappingProxyType({})


def sweep_checksums(sweep: ops.Pass, checksums: ops.Checksums) -> SweepChecksums:
    """Return the checksums that the sweep itself has computed, by address."""
    out, total, rows, states, rule_vectors = checksums
    written: list[tuple[ops.Array | None, bytes]] = [(sweep.out, out)]
    if (cache := sweep.calibrate) is not None:
        written += [(cache.sum if cache.sum_out is None else cache.sum_out, total)]
        written += zip(cache.new_rows, rows, strict=True)
    written += zip(sweep.states_out or sweep.states, states, strict=True)
    if rule_vectors and (memory := sweep.rule_vectors) is not None:
        written += zip(memory.outs or memory.vectors, rule_vectors, strict=True)
    return {address(vector): crcs for vector, crcs in written if vector is not None}


def crc(row: Row, num_threads: int, checksums: SweepChecksums = NO_CHECKSUMS) -> bytes:
    """Return the CRC-32C of each superblock of a vector."""
    checksum = checksums.get(address(row))
    return ops.crc32c(row, SUPERBLOCK * row.itemsize, num_threads=num_threads) if checksum is None else checksum


def row_crc(row: Row, codec: Codec, num_threads: int = 1) -> bytes:
    """Return the checksums of an encoded row: of the head, if there is one, and of the code of each superblock."""
    block, head = row_blocks(codec)
    return ops.crc32c(row, block, head=head, num_threads=num_threads)


def row_blocks(codec: Codec) -> tuple[int, int]:
    """Return the bytes of a block of an encoded row, and of its head. Each block and the head have a checksum."""
    head = codec.row_bytes(0)
    return codec.row_bytes(SUPERBLOCK) - head, head


def damage(segments: Segments, place: Place, num_threads: int) -> str | None:
    """Describe the damage of the vector in a slot that a commit refers to; return None if the vector is sound."""
    problem = segments.missing_slot(place.slot)
    if problem is not None:
        return problem
    row = segments.array(place.slot)
    segments.populate([place.slot])
    if crc(row, num_threads) == place.crc:
        return None
    return f"{segments.folder} is damaged: slot {place.slot} does not agree with its checksum"


def raise_if_damaged(segments: Segments, place: Place, num_threads: int) -> None:
    """Check the vector in a slot to which a commit refers.

    Raises:
        StoreError: the vector is missing, or does not match its checksum.
    """
    problem = damage(segments, place, num_threads)
    if problem is not None:
        raise StoreError(f"[store] {problem}; {segments.remedy}")
