"""The rows of clients by number: which client has a row, in which slot, and which slots are free.

A table holds no vector. It gives the slots out, so that they are the same wherever the vectors are.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

from afflux.ops import RowFacts
from afflux.ops.codecs import Codec
from afflux.rules.rule import Calibrate, ClientId


class SlotCounts(NamedTuple):
    """The slots that are in use, and the free ones."""

    clients: int = 0  #: clients that have a row
    high: int = 0  #: slots from this number on were never used
    free: tuple[int, ...] = ()  #: unused slots below `high`
    retired: tuple[int, ...] = ()  #: slots to which only the last commit of a store refers


NO_SLOTS = SlotCounts()


class RowMoves(NamedTuple):
    """The changes that a round makes to the table."""

    slots: Mapping[ClientId, int]  #: of clients whose row gets its first slot, or another one
    numbers: Mapping[ClientId, int]  #: of new clients, in the order of first pushes
    counts: SlotCounts  #: after the round
    committed: bool = False  #: whether a commit of a store has recorded the changes


_NOTHING: Mapping[ClientId, int] = MappingProxyType({})


class RowPlan(NamedTuple):
    """The rows that a round reads and writes, by slot."""

    how: Calibrate
    divisor: int  #: the number of clients by which the sum is divided
    reads: Sequence[int | None]  #: the slot of the row of each arrival's client; None: it has none
    writes: Sequence[int | None]  #: the slot to which each arrival writes its row; None: it writes none
    facts: Sequence[RowFacts]  #: the key and the range of each arrival; empty for codecs that need none
    high: int  #: all slots are below


class RowTable:
    """The clients that have a row, and the slots of their rows.

    With a store, `slots` has the rows that have changed since its last commit, and its index the others. A round writes
    no slot to which the last commit refers. Between two commits a changed row has one slot, which later rounds update
    in place. Without a store there are no commits, and `slots` has all rows.
    """

    def __init__(self, codec: Codec, num_clients: int, seed: int, counts: SlotCounts) -> None:
        self.codec = codec
        self.num_clients = num_clients
        self.seed = seed
        self.counts = counts
        self.slots: dict[ClientId, int] = {}  #: in the order of the clients' first changes
        self.memory: Any = None  #: of the rows: a handle of the plane that keeps them

    def __contains__(self, client_id: ClientId) -> bool:
        return client_id in self.slots

    def __len__(self) -> int:
        return self.counts.clients

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""
        return list(self.slots)

    @property
    def slot(self) -> Callable[[ClientId], int | None]:
        """The function that returns the slot of a client's row; None if the client has none."""
        return self.slots.get

    def plan(
        self,
        how: Calibrate,
        client_ids: Sequence[ClientId],
        accepted: Sequence[bool],
        version: int,
        extremes: Sequence[tuple[float, float]] = (),
    ) -> tuple[RowPlan, RowMoves]:
        """Return the rows that the round that makes `version` reads and writes, and its changes for `publish`.

        A rejected arrival does not change its client's row. Of a client's accepted arrivals the last one becomes the
        row. If a later arrival still reads the old row, the new row gets another slot. `extremes`, (min, max) of each
        arrival, are for ranged codecs.
        """
        readers = {client_id: i for i, client_id in enumerate(client_ids)}  # the last arrival that reads the row
        last = readers
        if not all(accepted):
            last = {client_id: i for i, client_id in enumerate(client_ids) if accepted[i]}
        slot_of, changed = self.slot, self.slots
        places = {client_id: slot_of(client_id) for client_id in readers}
        reads = [places[client_id] for client_id in client_ids]
        moving = [each for each, i in last.items() if each not in changed or readers[each] > i]
        moves = self._moved(moving, places) if moving else RowMoves(_NOTHING, _NOTHING, self.counts)
        writes: list[int | None] = [None] * len(client_ids)
        for client_id, i in last.items():
            writes[i] = places[client_id]
        divisor = self.num_clients if how.divide_by == "all" else max(moves.counts.clients, 1)
        facts: list[RowFacts] = []
        if self.codec.keyed:
            ranges = zip(client_ids, extremes if self.codec.ranged else [(0.0, 0.0)] * len(client_ids), strict=True)
            facts = [RowFacts(row_key(self.seed, version, client_id), *bounds) for client_id, bounds in ranges]
        return RowPlan(how, divisor, reads, writes, facts, moves.counts.high), moves

    def _moved(self, clients: Sequence[ClientId], places: dict[ClientId, int | None]) -> RowMoves:
        """Give these clients another slot, or their first one; write it into `places`, which has the slots of today."""
        (count, high, *_), free, retired = self.counts, [*self.counts.free], [*self.counts.retired]
        slots, numbers, left = dict[ClientId, int](), dict[ClientId, int](), list[int]()
        for client_id in clients:
            slot = places[client_id]
            if slot is None:
                numbers[client_id] = count
                count += 1
            else:
                (left if client_id in self.slots else retired).append(slot)
            places[client_id] = slots[client_id] = slot = free.pop() if free else high
            high = max(high, slot + 1)
        # A slot to which no commit refers becomes free only at the end of this round, because the round reads it.
        return RowMoves(slots, numbers, SlotCounts(count, high, (*free, *left), tuple(retired)))

    def publish(self, moves: RowMoves) -> None:
        """Make the changes of a round. May be repeated."""
        self.slots.update(moves.slots)
        self.counts = moves.counts


def row_key(seed: int, version: int, client_id: ClientId) -> int:
    """Return the 64-bit key of a row's random bits.

    The key is BLAKE2b of the seed, the version of the row's commit, and the client: docs/reference/codecs.md.

    >>> row_key(0, 1, 7) == row_key(0, 1, "7"), row_key(0, 1, 7) == row_key(0, 2, 7)
    (False, False)
    """
    if isinstance(client_id, str):
        kind, client = b"s", client_id.encode()
    elif client_id < 2**63:
        kind, client = b"i", client_id.to_bytes(8, "little", signed=True)
    else:  # with a prefix of their own: -1 and 2**64 - 1 have the same bytes
        kind, client = b"u", client_id.to_bytes(8, "little")
    numbers = (seed % 2**64).to_bytes(8, "little") + version.to_bytes(8, "little")
    return int.from_bytes(blake2b(numbers + kind + client, digest_size=8).digest(), "little")
