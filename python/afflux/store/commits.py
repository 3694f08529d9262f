"""A commit: one SQLite transaction, which writes the changes since the previous commit."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from afflux.rules.rule import ClientId
from afflux.store.index_entries import (
    ListUpdate,
    StoredArrival,
    arrival_entries,
    crc_of,
    fact_entries,
    guarded_crc,
    key_of,
    list_entry,
)
from afflux.store.segments import Place

#: Tables of the lists that grow.
LISTS = ("passed", "log", "tasks")


@dataclass(frozen=True, slots=True, eq=False)
class Transaction:
    """The data that one commit writes."""

    meta: Mapping[str, Any]
    buffers: bytes | None
    notes: str | None
    vectors: Mapping[str, Place]  #: all vectors
    arrivals: Sequence[StoredArrival]  #: all arrivals
    rows: Mapping[ClientId, Place]  #: the new rows and the moved rows
    lists: Mapping[str, ListUpdate]  #: by table: passed, log, tasks
    delete_rows: bool = False  #: whether all other rows are deleted
    facts: Mapping[str, Any] = field(default_factory=dict)  #: the new and the changed facts


class _Tables(NamedTuple):
    """The contents of the tables after a commit."""

    vectors: frozenset[str]
    arrivals: int
    ends: dict[str, int]  #: for each list, one more than the number of its last entry


class Commits:
    """The writer of commits through one connection. No other code may write through this connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._tables: _Tables | None = None  # None: unknown, as before the first commit and after a failed one

    def write(self, transaction: Transaction, facts: Mapping[str, Any] | None) -> None:
        """Write a transaction completely, or not at all. `facts` are all facts, or None if they do not change.

        Raises:
            sqlite3.Error: the transaction cannot be written; nothing has changed.
        """
        before, self._tables = self._tables, None
        connection = self._connection
        if connection.in_transaction:  # left by an interrupt
            connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        try:
            tables = self._fill(transaction, facts, before)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._tables = tables

    def _fill(self, transaction: Transaction, facts: Mapping[str, Any] | None, before: _Tables | None) -> _Tables:
        """Execute the statements of a transaction, without those that would change nothing."""
        run = self._connection.executemany
        meta = json.dumps(transaction.meta)
        vectors = sorted((name, place.slot, place.crc) for name, place in transaction.vectors.items())
        arrivals = [*arrival_entries(transaction.arrivals)]
        if facts is not None:
            run("INSERT OR REPLACE INTO facts VALUES (?, ?)", fact_entries(facts))
        if transaction.delete_rows:
            run("DELETE FROM rows", [()])
        rows = (
            (key_of(client_id), place.rank, place.slot, guarded_crc(client_id, place))
            for client_id, place in transaction.rows.items()
        )
        # The rank of a client that has a row does not change.
        run(
            "INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (client) DO UPDATE SET slot = excluded.slot, "
            "crc = excluded.crc",
            rows,
        )
        names = frozenset(transaction.vectors)
        if before is None or before.vectors != names:
            run("DELETE FROM vectors", [()])
        run("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", vectors)
        if before is None or before.arrivals:
            run("DELETE FROM arrivals", [()])
        if arrivals:
            run("INSERT INTO arrivals VALUES (?, ?, ?, ?, ?, ?)", arrivals)
        ends = self._write_lists(transaction.lists, before)
        crc = crc_of(meta, transaction.buffers, transaction.notes, vectors, arrivals, [*ends.values()])
        run(
            "INSERT OR REPLACE INTO state VALUES (0, ?, ?, ?, ?)",
            [(meta, transaction.buffers, transaction.notes, crc)],
        )
        return _Tables(names, len(arrivals), ends)

    def _write_lists(self, lists: Mapping[str, ListUpdate], before: _Tables | None) -> dict[str, int]:
        """Write the new entries; return the new end of each list."""
        ends = {} if before is None else dict(before.ends)
        for table, (start, entries) in lists.items():
            if before is None or start < before.ends[table]:
                self._connection.execute(f"DELETE FROM {table} WHERE number >= ?", (start,))
            if entries:
                numbered = [(start + i, list_entry(start + i, entry)) for i, entry in enumerate(entries)]
                self._connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", numbered)
            ends[table] = start + len(entries)
        if before is not None:
            return ends
        select = "SELECT coalesce(max(number) + 1, 0) FROM "
        return {table: self._connection.execute(select + table).fetchone()[0] for table in LISTS}
