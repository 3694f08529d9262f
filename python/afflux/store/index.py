"""The committed state in SQLite: which slot holds what, checksums, and everything that is no array. A commit is one
transaction, which writes what has changed, whatever the number of clients.

SQLite has no checksums of its own. Here the facts have one; the state, its vectors and arrivals have one together; each
entry of a list and each client's row has one. A client's row whose entry does not match its checksum counts as damaged.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from afflux._engine import ORDER_VERSION
from afflux.ops.errors import StoreError
from afflux.ops.validation import plain_id
from afflux.rules.rule import ClientId
from afflux.store.metadata import BACKUP, DAMAGED
from afflux.store.schema import connect, make_file, refuse_other_schema, refuse_rollback_journal
from afflux.store.segments import Place

#: Tables of the lists that grow.
_LISTS = ("passed", "log", "tasks")
_MOST_FACTS = 32


class StoredArrival(NamedTuple):
    """An arrival in the buffer, or deferred to the next pass."""

    join: int  #: its number
    place: Place | None  #: of its vector; None if the vector is in a sum
    record: Sequence[Any]  #: see checkpoint.arrival_record
    buffers: bytes | None


class ListUpdate(NamedTuple):
    """The entries of a growing list from `start` on; they replace those stored from there on."""

    start: int
    entries: Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Transaction:
    """What one commit writes."""

    meta: Mapping[str, Any]
    buffers: bytes | None
    notes: str | None
    vectors: Mapping[str, Place]  #: all
    arrivals: Sequence[StoredArrival]  #: all
    rows: Mapping[ClientId, Place]  #: the new and the moved ones
    lists: Mapping[str, ListUpdate]  #: by table: passed, log, tasks
    delete_rows: bool = False  #: all others
    facts: Mapping[str, Any] = field(default_factory=dict)  #: the new and the changed ones


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


class Index:
    """The file `index.sqlite` of a store. One thread at a time commits; any may read."""

    def __init__(self, path: Path, *, read_only: bool = False, alone: bool = False) -> None:
        """Opens the file; `make` made it.

        Args:
            path: of the file.
            read_only: refuse commits.
            alone: no other process commits meanwhile. Then no file is made beside the index, if it was closed.
        """
        self.path = path
        self._inode = path.lstat().st_ino
        refuse_rollback_journal(path)
        self._log, shared = (path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm"))  # SQLite's own
        # A read-only open beside a log that another process has left creates a -shm file: it is deleted at the end.
        self._temporary = [shared] if read_only and alone and not shared.exists() else []
        with self._errors("open"), ExitStack() as undo:
            undo.callback(self._delete_temporary)
            mode = "ro" if read_only else "rw"
            if read_only and alone and not _size(self._log):
                mode = "ro&immutable=1"
            self._writer, self._reader = (undo.enter_context(closing(connect(path, mode))) for _ in range(2))
            refuse_other_schema(path, self._writer)
            if not read_only:
                (journal,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
                if journal != "wal":  # SQLite leaves the mode as it was if it cannot change it
                    raise StoreError(f"[store] cannot open {path}: SQLite has not made its log")
                # Each of SQLite's own checkpoints syncs, which on ext4 waits for all other dirty pages.
                self._writer.execute("PRAGMA wal_autocheckpoint = 10000")
            if not read_only:  # SQLite opens files that it cannot write: here it raises
                self._writer.execute("DELETE FROM facts WHERE 0")
            undo.pop_all()
        self._reading = RLock()

    @staticmethod
    def make(path: Path, facts: Mapping[str, Any]) -> None:
        """A new file without a commit. The file appears when it is complete."""
        make_file(path, _facts(facts))

    def sync_commits(self, power: bool) -> None:
        """`power`: from now on a commit is on the disk itself when `commit` returns."""
        with self._errors("open"):
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")

    def facts(self) -> dict[str, Any]:
        """What the store was made with, and its settings."""
        from afflux.store.facts import read_facts  # msgspec: a server in memory does not need it

        with self._errors("read"):
            texts = dict(self._read(f"SELECT name, value FROM facts ORDER BY name LIMIT {_MOST_FACTS}"))
            if (order := json.loads(texts["order_version"])) != ORDER_VERSION:
                raise StoreError(f"[store] {self.path.parent} has order_version {order}, this afflux {ORDER_VERSION}")
            own = texts.pop("crc")
            if own != str(_crc(texts)):
                raise self._damaged("the facts do not agree with their checksum")
            return read_facts(texts)

    def committed(self, facts: Mapping[str, Any] | None = None) -> CommittedState | None:
        """The last commit, which agrees with the facts, by default those in the file; None if there is none yet."""
        from afflux.store.facts import ArrivalEntry, VectorEntry, check_entries, read_state

        facts = self.facts() if facts is None else facts
        with self._errors("read"), self._one_commit():
            state = self._read("SELECT meta, buffers, notes, crc FROM state LIMIT 2")
            if not state:
                return None
            meta, buffers, notes, crc = state[0]
            vectors = self._entries("SELECT name, slot, crc FROM vectors ORDER BY name", VectorEntry, numbered=False)
            arrivals = self._entries("SELECT * FROM arrivals ORDER BY number", ArrivalEntry, numbered=True)
            lists = {name: self._list(name) for name in _LISTS}
            if crc != _crc(meta, buffers, notes, vectors, arrivals, [*map(len, lists.values())]):
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
                    StoredArrival(join, None if slot is None else Place(slot, crc or b""), _record(record), own)
                    for _, join, slot, crc, record, own in arrivals
                ],
                lists,
            )

    def _entries(self, statement: str, type_: Any, *, numbered: bool) -> list[Any]:
        """Entries of a table, of this type; the first column counts from 0 if `numbered`, else its values differ. A
        damaged file may hold one page many times: reading ends at the first entry that cannot be.
        """
        from afflux.store.facts import decoded

        found, seen = list[Any](), set[object]()
        with self._reading:
            for i, values in enumerate(self._reader.execute(statement)):
                found.append(values)
                if (values[0] != i) if numbered else (values[0] in seen):
                    raise ValueError(f"entry {i} is there twice, or one is missing")
                seen.add(values[0])
        return [*decoded(found, list[type_])]

    @property
    def commit_counter(self) -> int:
        """A number that each commit changes."""
        with self._errors("read"):
            return int(self._read("PRAGMA data_version")[0][0])

    def row(self, client_id: ClientId) -> Place | None:
        """The place of a client's row; None if the client has none."""
        client_id = plain_id(client_id, "row")  # SQLite takes NumPy's integers for bytes
        with self._errors("read"):
            found = self._read("SELECT client, slot, crc, place FROM rows WHERE client = ?", (_key(client_id),))
            return _entry(*found[0])[1] if found else None

    def refuse_other_count(self, count: int) -> None:
        """Checks how many clients have a row; counting ends after one more than this.

        Raises:
            StoreError: others.
        """
        with self._errors("read"):
            found = self._read("SELECT count(*) FROM (SELECT 1 FROM rows LIMIT ?)", (count + 1,))[0][0]
        if found != count:
            raise self._damaged(f"it has {f'more than {count} rows' if found > count else f'{found} rows of {count}'}")

    def rows(self) -> Iterator[tuple[ClientId, Place]]:
        """All clients that have a row, in the order in which they came."""
        with self._errors("read"):
            found = self._read("SELECT client, slot, crc, place FROM rows ORDER BY place")
            for rank, entry in enumerate(found):
                if entry[3] != rank:
                    raise self._damaged(f"client number {rank} is missing")
                yield _entry(*entry)

    def rows_by_slot(self) -> Iterator[tuple[ClientId, Place]]:
        """All clients that have a row, in the order of the slots, the fastest to read. No commit may come meanwhile."""
        with self._errors("read"):
            found = self._reader.execute("SELECT client, slot, crc, place FROM rows ORDER BY slot")
            for entry in found:
                yield _entry(*entry)

    def commit(self, transaction: Transaction) -> None:
        """Writes a transaction completely, or not at all."""
        meta = json.dumps(transaction.meta)
        vectors = sorted((name, place.slot, place.crc) for name, place in transaction.vectors.items())
        arrivals = [*_arrivals(transaction.arrivals)]
        with self._errors("write"):
            if self._writer.in_transaction:  # left by an interrupt
                self._writer.execute("ROLLBACK")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                run = self._writer.executemany
                if transaction.facts:
                    run("INSERT OR REPLACE INTO facts VALUES (?, ?)", _facts({**self.facts(), **transaction.facts}))
                if transaction.delete_rows:
                    run("DELETE FROM rows", [()])
                rows = (
                    (_key(client_id), place.rank, place.slot, guarded_crc(client_id, place))
                    for client_id, place in transaction.rows.items()
                )
                # The rank of a client that has a row stays as it is.
                run(
                    "INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (client) DO UPDATE SET slot = excluded.slot, "
                    "crc = excluded.crc",
                    rows,
                )
                run("DELETE FROM vectors", [()])
                run("INSERT INTO vectors VALUES (?, ?, ?)", vectors)
                run("DELETE FROM arrivals", [()])
                run("INSERT INTO arrivals VALUES (?, ?, ?, ?, ?, ?)", arrivals)
                for table, (start, entries) in transaction.lists.items():
                    run(f"DELETE FROM {table} WHERE number >= ?", [(start,)])
                    numbered = ((start + i, _text(start + i, entry)) for i, entry in enumerate(entries))
                    run(f"INSERT INTO {table} VALUES (?, ?)", numbered)
                ends = [
                    self._writer.execute(f"SELECT coalesce(max(number) + 1, 0) FROM {table}").fetchone()[0]
                    for table in _LISTS
                ]
                crc = _crc(meta, transaction.buffers, transaction.notes, vectors, arrivals, ends)
                run(
                    "INSERT OR REPLACE INTO state VALUES (0, ?, ?, ?, ?)",
                    [(meta, transaction.buffers, transaction.notes, crc)],
                )
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def check(self) -> None:
        """Refuses a file that has vanished or was replaced: commits to it would be lost."""
        try:
            same = self.path.stat().st_ino == self._inode and self._log.exists()
        except OSError:
            same = False
        if not same:
            raise StoreError(f"[store] {self.path} has vanished or was replaced")

    def damage(self) -> list[str]:
        """The problems that SQLite finds in the file."""
        try:
            found = [str(line) for (line,) in self._read("PRAGMA integrity_check")]
        except sqlite3.Error as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Closes the file."""
        for connection in (self._reader, self._writer):
            connection.close()
        self._delete_temporary()

    def _delete_temporary(self) -> None:
        for file in self._temporary:
            with suppress(OSError):
                file.unlink()

    def _damaged(self, what: object) -> StoreError:
        return StoreError(f"[store] {self.path} is damaged: {what}; {BACKUP}")

    def _list(self, table: str) -> list[Any]:
        entries = list[Any]()
        with self._reading:
            for i, (number, text) in enumerate(
                self._reader.execute(f"SELECT number, entry FROM {table} ORDER BY number")
            ):
                if number != i or text[:8] != _text(number, text=text[8:])[:8]:
                    raise self._damaged(f"{table} {i} does not agree with its checksum")
                entries.append(json.loads(text[8:]))
        return entries

    @contextmanager
    def _one_commit(self) -> Iterator[None]:
        """All reads in the block see the same commit, though another process may commit meanwhile."""
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
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"[store] cannot {what} {self.path}: {error}") from None
        except sqlite3.ProgrammingError:
            raise StoreError(f"[store] cannot {what} {self.path}: the server has closed it") from None
        except (sqlite3.Error, *DAMAGED) as error:
            if isinstance(error, StoreError):
                raise
            raise self._damaged(error) from None


def _size(path: Path) -> int:
    return path.lstat().st_size if path.exists() else 0


def _arrivals(arrivals: Iterable[StoredArrival]) -> Iterator[tuple[Any, ...]]:
    for number, (join, place, record, buffers) in enumerate(arrivals):
        slot, crc = (None, None) if place is None else (place.slot, place.crc)
        yield number, join, slot, crc, json.dumps(record), buffers


def _key(client_id: ClientId) -> int | str | bytes:
    """The client id as SQLite keeps it. Its ints are signed: those from 2**63 on are 8 bytes, the highest first."""
    return client_id.to_bytes(8, "big") if isinstance(client_id, int) and client_id >= 2**63 else client_id


def _record(text: str) -> list[Any]:
    from afflux.store.facts import ArrivalRecord, decoded

    record: list[Any] = json.loads(text)
    decoded(record, ArrivalRecord)
    return record


def guarded_crc(client_id: ClientId, place: Place) -> bytes:
    """A row's checksums as they are stored: followed by a checksum of the entry itself."""
    return place.crc + _crc(client_id, place.slot, place.crc).to_bytes(4, "little")


def _entry(key: Any, slot: Any, crc: Any, rank: Any) -> tuple[ClientId, Place]:
    """A client, and the place of its row; a place that matches no row, if the entry is damaged."""
    client_id: ClientId = int.from_bytes(key, "big") if isinstance(key, bytes) and len(key) == 8 else key
    if not isinstance(client_id, int | str):
        raise ValueError(f"{key!r} is no client's id")
    if isinstance(crc, bytes) and isinstance(slot, int) and isinstance(rank, int) and min(slot, rank) >= 0:
        place = Place(slot, crc[:-4], rank)
        if guarded_crc(client_id, place) == crc:
            return client_id, place
    return client_id, Place(0, b"", rank if isinstance(rank, int) else 0)


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    texts = {name: json.dumps(facts[name], default=np.generic.item) for name in sorted(facts)}
    return [*texts.items(), ("crc", str(_crc(texts)))]


def _text(number: int, entry: Any = None, text: str = "") -> str:
    """An entry of a list, with its checksum in front."""
    text = text or json.dumps(entry)
    return f"{_crc(number, text):08x}{text}"


def _crc(*parts: Any) -> int:
    return zlib.crc32(repr(parts).encode("utf-8", "surrogatepass"))
