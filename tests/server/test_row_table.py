"""Which client has which slot of a row: decided without a vector."""

import numpy as np
import pytest

from afflux.aggregation.cache.rows import MemoryRows, RowCache
from afflux.aggregation.cache.table import NO_SLOTS, RowTable, SlotCounts, row_key
from afflux.ops import RowFacts, codecs
from afflux.rules.calibration import CACHED_MEAN


def table(codec=codecs.float32, clients=5):
    return RowTable(codec, clients, 0, NO_SLOTS)


def plan(rows, client_ids, accepted=None, version=1, extremes=()):
    return rows.plan(CACHED_MEAN, client_ids, accepted or [True] * len(client_ids), version, extremes)


def test_new_clients_get_the_next_slots_and_keep_them():
    rows = table()
    first, moves = plan(rows, ["b", "a"])
    assert (first.reads, first.writes, moves.numbers) == ([None, None], [0, 1], {"b": 0, "a": 1})
    assert (len(rows), "b" in rows, rows.client_ids) == (0, False, [])  # nothing changes before it is published
    for _ in range(2):  # may be repeated
        rows.publish(moves)
    assert (len(rows), rows.client_ids, [rows.slot(client) for client in "abc"]) == (2, ["b", "a"], [1, 0, None])
    again, moves = plan(rows, ["a", "c", "d"], [True, True, False])
    assert (again.reads, again.writes, moves.slots) == ([1, None, None], [1, 2, None], {"c": 2})
    assert moves.counts == SlotCounts(3, 3)


def test_a_row_that_a_later_arrival_reads_gets_another_slot():
    rows = table()
    rows.publish(plan(rows, [7, 8])[1])
    round, moves = plan(rows, [7, 7, 8], [True, False, True])
    assert (round.reads, round.writes) == ([0, 0, 1], [2, None, 1])
    assert moves.counts == SlotCounts(2, 3, free=(0,))
    rows.publish(moves)
    assert (rows.client_ids, rows.slot(7)) == ([7, 8], 2)
    last, _ = plan(rows, [7, 7, 9])
    assert (last.reads, last.writes) == ([2, 2, None], [None, 2, 0])  # of two that are accepted, the last one stays


@pytest.mark.parametrize("codec", [codecs.float32, codecs.affine(4), codecs.affine(4, scope="vector")])
def test_keys_and_ranges_are_those_of_the_clients(codec):
    ranges = [(-1.0, 2.0), (0.0, 5.0)]
    facts = plan(table(codec), [1, 2], version=3, extremes=ranges)[0].facts
    keys = [row_key(0, 3, client) for client in (1, 2)] if codec.keyed else []
    assert facts == [
        RowFacts(key, *(own if codec.ranged else (0.0, 0.0))) for key, own in zip(keys, ranges, strict=codec.keyed)
    ]


def test_memory_of_a_free_slot_is_used_again():
    rows = RowCache(MemoryRows(3, codecs.float32), 5, 0)
    for client_ids, accepted in (([7, 8], None), ([7, 7], [True, False]), ([9], None)):
        chosen, moves = plan(rows, client_ids, accepted)
        old = [rows.memory.row(slot) for slot in range(len(rows.memory._rows))]
        _, new = rows.memory.prepare(chosen)
        for client, slot in zip(client_ids, chosen.writes, strict=True):
            if slot is not None:
                new[slot][:] = client
        rows.commit(new, moves)
    assert new[0] is old[0]
    assert [row[0] for row in rows.values()] == [7.0, 8.0, 9.0]
    assert np.array_equal(rows.row(9), [9.0] * 3)
