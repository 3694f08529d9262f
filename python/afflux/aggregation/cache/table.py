"""The rows of clients by number: which client has a row, in which slot, and which slots are free.

A table holds no vector. It gives the slots out, so that they are the same wherever the vectors are.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from afflux.ops import RowFacts
from afflux.ops.codecs import Codec
from afflux.rules.rule import Calibrate, ClientId


class SlotCounts(NamedTuple):
    """The slots that are in use, and the free ones."""

    clients: int = 0  #: clients that have a row
    high: int = 0  #: slots from this number on were never used
    free: tuple[int, ...] = ()  #: unused slots below `high`
    retired: tuple[int, ...] = ()  #: slots to which only the last commit of a store refers

    def after_commit(self) -> "SlotCounts":
        """Return the counts after a commit: the retired slots are free."""
        return self._replace(free=(*self.free, *self.retired), retired=())


NO_SLOTS = SlotCounts()


class RowPlan(NamedTuple):
    """The rows of a round, by slot, and the changes that it makes to the table. It holds no vector."""

    how: Calibrate
    divisor: int  #: the number of clients by which the sum is divided
    reads: Sequence[int | None]  #: the slot of the row of each arrival's client; None: it has none
    writes: Sequence[int | None]  #: the slot to which each arrival writes its row; None: it writes none
    facts: Sequence[RowFacts]  #: the key and the range of each arrival; empty for codecs that need none
    slots: Mapping[ClientId, int]  #: of clients whose row gets its first slot, or another one
    numbers: Mapping[ClientId, int]  #: of new clients, in the order of first pushes
    counts: SlotCounts  #: after the round; after its commit, once it is `committed`
    committed: bool = False  #: whether a commit of a store has recorded the changes


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

    def __contains__(self, client_id: ClientId) -> bool:
        return client_id in self.slots

    def __len__(self) -> int:
        return self.counts.clients

    @property
    def client_ids(self) -> list[ClientId]:
        """The clients that have a row, in the order of their first push."""
        return list(self.slots)

    def slot(self, client_id: ClientId) -> int | None:
        """Return the slot of a client's row; None if it has none."""
        return self.slots.get(client_id)

    def plan(
        self,
        how: Calibrate,
        client_ids: Sequence[ClientId],
        accepted: Sequence[bool],
        version: int,
        extremes: Sequence[tuple[float, float]] = (),
    ) -> RowPlan:
        """Return the rows that the round that makes `version` reads and writes. Nothing changes.

        A rejected arrival does not change its client's row. Of a client's accepted arrivals the last one becomes the
        row. If a later arrival still reads the old row, the new row gets another slot. `extremes`, (min, max) of each
        arrival, are for ranged codecs.
        """
        last = {client_id: i for i, client_id in enumerate(client_ids) if accepted[i]}
        readers = {client_id: i for i, client_id in enumerate(client_ids)}  # the last arrival that reads the row
        before = {client_id: self.slot(client_id) for client_id in readers}
        (clients, high, *_), free, retired = self.counts, [*self.counts.free], [*self.counts.retired]
        slots, numbers, left = dict[ClientId, int](), dict[ClientId, int](), list[int]()
        writes: list[int | None] = [None] * len(client_ids)
        for client_id, i in last.items():
            slot, changed = before[client_id], client_id in self.slots
            if not changed or readers[client_id] > i:
                if slot is None:
                    numbers[client_id] = clients
                    clients += 1
                else:
                    (left if changed else retired).append(slot)
                slots[client_id] = slot = free.pop() if free else high
                high = max(high, slot + 1)
            writes[i] = slot
        # A slot to which no commit refers becomes free only at the end of this round, because the round reads it.
        counts = SlotCounts(clients, high, (*free, *left), tuple(retired))
        divisor = self.num_clients if how.divide_by == "all" else max(clients, 1)
        facts: list[RowFacts] = []
        if self.codec.keyed:
            ranges = extremes if self.codec.ranged else [(0.0, 0.0)] * len(client_ids)
            keys = [row_key(self.seed, version, client_id) for client_id in client_ids]
            facts = [RowFacts(key, *both) for key, both in zip(keys, ranges, strict=True)]
        return RowPlan(how, divisor, [before[each] for each in client_ids], writes, facts, slots, numbers, counts)

    def publish(self, plan: RowPlan) -> None:
        """Make the changes of a round. May be repeated."""
        self.slots.update(plan.slots)
        self.counts = plan.counts


def row_key(seed: int, version: int, client_id: ClientId) -> int:
    """Return the 64-bit key of a row's random bits.

    The key is BLAKE2b of the seed, the version with which the row is committed, and the client, as in docs/codecs.md.

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
