"""The committed state in SQLite: the contents of the slots, checksums, and all values that are not arrays. A commit is
one transaction. It writes only changes; its cost does not grow with the number of clients.

SQLite has no checksums. Here the facts have one; the state, its vectors and arrivals have one together; each entry of a
list and each client's row has one. A client's row whose entry does not match its checksum counts as damaged.
"""

import json
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Literal

from msgspec import convert

from afflux._engine import ORDER_VERSION
from afflux.ops.errors import StoreError
from afflux.ops.validation import plain_id
from afflux.rules.rule import ClientId
from afflux.store.commits import LISTS, Commits, Transaction
from afflux.store.files import LOSS, reason
from afflux.store.index_entries import StoredArrival, crc_of, key_of, list_entry, record_of, row_of
from afflux.store.metadata import BACKUP, DAMAGED
from afflux.store.schema import (
    connect,
    refuse_other_schema,
    refuse_rollback_journal,
    sqlite_reason,
)
from afflux.store.segments import Place

_MOST_FACTS = 32
_MOST_RECENT_BYTES = 8 << 20  #: bytes of memory, approximately
_ENTRY_BYTES = 300  #: bytes of an entry, without its checksums and the text of a client id


@dataclass(frozen=True, slots=True, eq=False)
class CommittedState:
    """The last commit, without rows."""

    meta: dict[str, Any]
    buffers: bytes | None
    notes: str | None
    vectors: dict[str, Place]
    arrivals: list[StoredArrival]
    lists: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def last_slots(self) -> dict[str, int]:
        """The last slot of each array that this commit refers to."""
        last = {"rows": self.meta["rows"][1] - 1} if "rows" in self.meta else {}
        places = [(name.partition(":")[0], place) for name, place in self.vectors.items()]
        places += [("arrivals", stored.place) for stored in self.arrivals if stored.place is not None]
        for name, place in places:
            last[name] = max(last.get(name, -1), place.slot)
        return last


class RecentPlaces:
    """The places of rows that were read or committed recently. They spare most pushes a query to SQLite.

    The newest places by client; None for clients that have no row. The oldest entries are removed.

    An entry agrees with the last commit. While a commit is written, its clients have no entry. A place that a thread
    has read before the end of a commit is not added after the commit. After an interrupt, entries may be missing, but
    are never wrong.
    """

    def __init__(self, most_bytes: int = _MOST_RECENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._places: OrderedDict[ClientId, Place | None] = OrderedDict()
        self._lock = Lock()
        #: A counter that changes when a commit begins and when it ends.
        self.generation = 0

    def get(self, client_id: ClientId) -> Place | Literal["unknown"] | None:
        """Return the client's place; None if the client has no row, "unknown" if there is no entry."""
        return self._places.get(client_id, "unknown")

    def add(self, client_id: ClientId, place: Place | None, generation: int) -> None:
        """Add a place that was read from the last commit, unless a commit has begun or ended since.

        Args:
            client_id: the client.
            place: its place; None if it has no row.
            generation: the value of `generation` before the place was read.
        """
        with self._lock:
            if generation == self.generation and not generation % 2:
                self._put(client_id, place)

    def begin_commit(self, rows: Mapping[ClientId, Place], *, others: bool) -> dict[ClientId, Place | None]:
        """Remove the places of the clients of `rows` until `end_commit`, and return these places.

        With `others`, remove the places of all clients.
        """
        with self._lock:
            self.generation += 1 + self.generation % 2  # odd also after a commit that has failed
            before = {client_id: self._places[client_id] for client_id in rows if client_id in self._places}
            for client_id in list(self._places) if others else before:
                self._remove(client_id)
        return before

    def end_commit(self, rows: Mapping[ClientId, Place], before: Mapping[ClientId, Place | None]) -> None:
        """Add the rows that are now committed; `before` is the result of `begin_commit`."""
        with self._lock:
            for client_id, place in rows.items():
                if place.rank >= 0:
                    self._put(client_id, place)
                elif (old := before.get(client_id)) is not None:  # the rank does not change
                    self._put(client_id, Place(place.slot, place.crc, old.rank))
            self.generation += 1

    def _put(self, client_id: ClientId, place: Place | None) -> None:
        if client_id in self._places:
            self._remove(client_id)
        self._places[client_id] = place
        self._bytes += _entry_bytes(client_id, place)
        while self._bytes > self._most_bytes and len(self._places) > 1:
            self._remove(next(iter(self._places)))

    def _remove(self, client_id: ClientId) -> None:
        self._bytes -= _entry_bytes(client_id, self._places.pop(client_id))


class Index:
    """The file `index.sqlite` of a store. One thread at a time commits; any thread may read."""

    def __init__(self, path: Path, *, read_only: bool = False, alone: bool = False) -> None:
        """Open a file that `make_index` has made.

        Args:
            path: the path of the file.
            read_only: refuse commits.
            alone: no other process commits at the same time. Then a read-only open makes no file beside an index that
            was closed.
        """
        self.path = path
        self._inode = path.lstat().st_ino
        refuse_rollback_journal(path)
        log, shared = (path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm"))  # SQLite's own
        self._file, self._log = str(path), str(log)
        # A read-only open creates a -shm file if another process has left a log: this file is deleted at the end.
        self._temporary = [shared] if read_only and alone and not shared.exists() else []
        with self._errors("open"), ExitStack() as undo:
            undo.callback(self._delete_temporary)
            mode = "ro" if read_only else "rw"
            if read_only and alone and not (log.exists() and log.lstat().st_size):
                mode = "ro&immutable=1"
            self._writer, self._reader = (undo.enter_context(closing(connect(path, mode))) for _ in range(2))
            refuse_other_schema(path, self._writer)
            if not read_only:
                (journal,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
                if journal != "wal":  # SQLite does not change the mode if it cannot
                    raise StoreError(f"[store] cannot open {path}: SQLite has not made its log")
                # Each of SQLite's own checkpoints syncs, which on ext4 waits for all other dirty pages.
                self._writer.execute("PRAGMA wal_autocheckpoint = 10000")
                # SQLite opens also files that it cannot write: this statement raises for them.
                self._writer.execute("DELETE FROM facts WHERE 0")
            undo.pop_all()
        self._reading = RLock()
        self._read_only = read_only
        self._recent = RecentPlaces()
        self._commits = Commits(self._writer)

    def sync_commits(self, power: bool) -> None:
        """Set whether later commits are on the disk itself when `commit` returns: they are with `power`."""
        with self._errors("open"):
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")

    def facts(self) -> dict[str, Any]:
        """Return the facts with which the store was made, and its settings."""
        from afflux.store.index_types import read_facts  # a server in memory does not need it

        with self._errors("read"):
            texts = dict(self._read(f"SELECT name, value FROM facts ORDER BY name LIMIT {_MOST_FACTS}"))
            if (order := json.loads(texts["order_version"])) != ORDER_VERSION:
                raise StoreError(f"[store] {self.path.parent} has order_version {order}, this afflux {ORDER_VERSION}")
            checksum = texts.pop("crc")
            if checksum != str(crc_of(texts)):
                raise self._damaged("the facts do not agree with their checksum")
            return read_facts(texts, self.path.parent)

    def committed(self, facts: Mapping[str, Any] | None = None) -> CommittedState | None:
        """Return the last commit, checked against the facts; None if there is no commit yet.

        By default, the facts are those in the file.
        """
        from afflux.store.index_types import ArrivalEntry, VectorEntry, check_entries, read_state

        facts = self.facts() if facts is None else facts
        with self._errors("read"), self._one_commit():
            state = self._read("SELECT meta, buffers, notes, crc FROM state LIMIT 2")
            if not state:
                return None
            meta, buffers, notes, crc = state[0]
            vectors = self._entries("SELECT name, slot, crc FROM vectors ORDER BY name", VectorEntry, numbered=False)
            arrivals = self._entries("SELECT * FROM arrivals ORDER BY number", ArrivalEntry, numbered=True)
            lists = {name: self._list(name) for name in LISTS}
            if crc != crc_of(meta, buffers, notes, vectors, arrivals, [*map(len, lists.values())]):
                raise self._damaged("the state does not agree with its checksum")
            check_entries(vectors, arrivals, facts)
            if notes is not None:
                json.loads(notes)
            return CommittedState(
                read_state(meta, facts, [name for name, _, _ in vectors]),
                buffers,
                notes,
                {name: Place(slot, crc) for name, slot, crc in vectors},
                [
                    StoredArrival(join, None if slot is None else Place(slot, crc or b""), record_of(record), own)
                    for _, join, slot, crc, record, own in arrivals
                ],
                lists,
            )

    def _entries(self, statement: str, type_: Any, *, numbered: bool) -> list[Any]:
        """Return the entries of a table, as values of this type.

        If `numbered`, the first column must count from 0, else its values must differ. Reading stops at the first
        invalid entry, because a damaged file may refer to one page many times.
        """
        rows, keys = list[Any](), set[object]()
        with self._reading:
            for i, values in enumerate(self._reader.execute(statement)):
                rows.append(values)
                if (values[0] != i) if numbered else (values[0] in keys):
                    raise ValueError(f"entry {i} is there twice, or one is missing")
                keys.add(values[0])
        return convert(rows, list[type_])

    @property
    def commit_counter(self) -> int:
        """A number that each commit changes."""
        with self._errors("read"):
            return int(self._read("PRAGMA data_version")[0][0])

    def row(self, client_id: ClientId) -> Place | None:
        """Return the place of a client's row; None if the client has none."""
        if type(client_id) is not int and type(client_id) is not str:
            client_id = plain_id(client_id, "row")  # SQLite treats NumPy's integers as bytes
        generation, place = self._recent.generation, self._recent.get(client_id)
        if place != "unknown":
            return place
        client_id = plain_id(client_id, "row")  # an int may be too large
        with self._errors("read"):
            entries = self._read("SELECT client, slot, crc, place FROM rows WHERE client = ?", (key_of(client_id),))
            place = row_of(*entries[0])[1] if entries else None
        if not self._read_only:  # else another process may commit
            self._recent.add(client_id, place, generation)
        return place

    def refuse_other_count(self, count: int) -> None:
        """Check the number of clients that have a row; counting stops after `count` + 1.

        Raises:
            StoreError: the number differs.
        """
        with self._errors("read"):
            total = self._read("SELECT count(*) FROM (SELECT 1 FROM rows LIMIT ?)", (count + 1,))[0][0]
        if total != count:
            raise self._damaged(f"it has {f'more than {count} rows' if total > count else f'{total} rows of {count}'}")

    def rows(self) -> Iterator[tuple[ClientId, Place]]:
        """Yield all clients that have a row, in the order of their first push."""
        with self._errors("read"):
            entries = self._read("SELECT client, slot, crc, place FROM rows ORDER BY place")
            for rank, entry in enumerate(entries):
                if entry[3] != rank:
                    raise self._damaged(f"client number {rank} is missing")
                yield row_of(*entry)

    def rows_by_slot(self) -> Iterator[tuple[ClientId, Place]]:
        """Yield all clients that have a row, in the order of the slots, in which the rows are read fastest.

        There must be no commit during the iteration.
        """
        with self._errors("read"):
            entries = self._reader.execute("SELECT client, slot, crc, place FROM rows ORDER BY slot")
            for entry in entries:
                yield row_of(*entry)

    def commit(self, transaction: Transaction) -> None:
        """Write a transaction completely, or not at all."""
        with self._errors("write"):
            facts = {**self.facts(), **transaction.facts} if transaction.facts else None
            before = self._recent.begin_commit(transaction.rows, others=transaction.delete_rows)
            self._commits.write(transaction, facts)
            self._recent.end_commit(transaction.rows, before)

    def check(self) -> None:
        """Raise StoreError if the file has vanished or was replaced: commits to it would be lost."""
        try:
            same = os.stat(self._file).st_ino == self._inode
            os.stat(self._log)
        except OSError as error:
            if error.errno not in LOSS:
                raise StoreError(f"[store] cannot read {self.path}: {reason(error)}") from None
            same = False
        if not same:
            raise StoreError(f"[store] {self.path} has vanished or was replaced")

    def copy_to(self, other: sqlite3.Connection) -> None:
        """Copy the whole index to an empty one."""
        with self._errors("read"):
            self._reader.backup(other)

    def damage(self) -> list[str]:
        """Return the problems that SQLite finds in the file."""
        try:
            lines = [str(line) for (line,) in self._read("PRAGMA integrity_check")]
        except sqlite3.Error as error:
            return [str(error)]
        return [] if lines == ["ok"] else lines

    def close(self) -> None:
        """Close the file."""
        for connection in (self._reader, self._writer):
            connection.close()
        self._delete_temporary()

    def _delete_temporary(self) -> None:
        for file in self._temporary:
            with suppress(OSError):
                file.unlink()

    def _damaged(self, problem: object) -> StoreError:
        return StoreError(f"[store] {self.path} is damaged: {problem}; {BACKUP}")

    def _list(self, table: str) -> list[Any]:
        entries = list[Any]()
        with self._reading:
            for i, (number, text) in enumerate(
                self._reader.execute(f"SELECT number, entry FROM {table} ORDER BY number")
            ):
                if number != i or text[:8] != list_entry(number, text=text[8:])[:8]:
                    raise self._damaged(f"{table} {i} does not agree with its checksum")
                entries.append(json.loads(text[8:]))
        return entries

    @contextmanager
    def _one_commit(self) -> Iterator[None]:
        """Read the same commit in all reads of the block, even if another process commits."""
        with self._reading:
            try:
                self._reader.execute("BEGIN")
                yield
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")

    def _read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"[store] cannot {action} {self.path}: {sqlite_reason(error, self.path)}") from None
        except sqlite3.ProgrammingError:
            raise StoreError(f"[store] cannot {action} {self.path}: the server has closed it") from None
        except (sqlite3.Error, *DAMAGED) as error:
            if isinstance(error, StoreError):
                raise
            raise self._damaged(error) from None


def _entry_bytes(client_id: ClientId, place: Place | None) -> int:
    text = len(client_id) if isinstance(client_id, str) else 0
    return _ENTRY_BYTES + text + (0 if place is None else len(place.crc))
