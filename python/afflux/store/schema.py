"""The tables of a store's index, and functions that open an untrusted file with SQLite."""

import mmap
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from afflux.ops.errors import StoreError
from afflux.store.files import PLAIN, opened, reason, try_open_files
from afflux.store.index_entries import fact_entries
from afflux.store.lock import lacks
from afflux.store.metadata import METADATA

#: The format of 0.1.0.
FORMAT = 6
#: The format of stores whose vectors are in shards.
FORMAT_OF_SHARDS = 7
READABLE = (FORMAT, FORMAT_OF_SHARDS)
#: "aflx": SQLite's application_id, which the program `file` shows.
APPLICATION = 0x61666C78

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE state (only INTEGER PRIMARY KEY CHECK (only = 0), meta TEXT NOT NULL, buffers BLOB, notes TEXT,
                    crc INTEGER NOT NULL);
CREATE TABLE vectors (name TEXT PRIMARY KEY, slot INTEGER NOT NULL, crc BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (client NOT NULL PRIMARY KEY, place INTEGER NOT NULL, slot INTEGER NOT NULL, crc BLOB NOT NULL)
       WITHOUT ROWID;
CREATE TABLE arrivals (number INTEGER PRIMARY KEY, joined INTEGER NOT NULL, slot INTEGER, crc BLOB,
                       record TEXT NOT NULL, buffers BLOB);
CREATE TABLE passed (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE log (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE tasks (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
"""
#: The files that SQLite has open for an index: itself and its log for each of two connections, -shm, and a folder.
_OPEN_FILES = 6
_STATEMENTS = tuple(statement.strip() for statement in _SCHEMA.split(";") if statement.strip())


def make_index(path: Path, facts: Mapping[str, Any]) -> None:
    """Make the index of a new store with these facts, without a commit. The file gets its name when it is complete.

    Raises:
        StoreError: the file cannot be made.
    """
    new, version = path.with_name(path.name + ".new"), FORMAT_OF_SHARDS if "cuts" in facts["server"] else FORMAT
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # see refuse_rollback_journal
            connection.execute("BEGIN IMMEDIATE")
            for statement in _STATEMENTS:
                connection.execute(statement)
            connection.executemany("INSERT INTO facts VALUES (?, ?)", fact_entries(facts))
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"[store] cannot make {path}: {sqlite_reason(error, path)}") from None
    new.replace(path)


def sqlite_reason(error: sqlite3.Error, path: Path) -> str:
    """Return SQLite's words for an error of an index that was not opened, or the system's error behind them.

    SQLite's words name neither too many open files ("unable to open database file") nor a file system without shared
    memory ("disk I/O error").
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code & 0xFF == sqlite3.SQLITE_CANTOPEN:
        try:
            try_open_files(_OPEN_FILES)
        except OSError as cause:
            return reason(cause)
    if code == sqlite3.SQLITE_IOERR_SHMMAP:
        try:
            with opened(path.with_name(METADATA), os.O_RDWR) as descriptor:
                mmap.mmap(descriptor, 1).close()
        except OSError:
            return lacks(path.parent, "memory maps that processes share")
    return str(error)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a connection to an index.

    The aggregator's mutex and the index ensure that two threads never use the connection at once.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    # SQLite's documentation recommends these settings for files of unknown origin.
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def refuse_other_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Check that a file has afflux's tables, and no view, trigger or other table. Call this before any other read.

    Raises:
        StoreError: the file has another schema.
    """
    application, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != APPLICATION:
        raise StoreError(f"[store] {path} is not an index of afflux")
    if version not in READABLE:
        remedy = "install a newer afflux" if version > FORMAT else "open it once with an afflux that reads both formats"
        formats = f"{READABLE[0]} and {READABLE[-1]}"
        raise StoreError(f"[store] {path} has format {version}, this afflux reads {formats}: {remedy}")
    statement = f"SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT {len(_STATEMENTS) + 1}"
    names = [text.split()[2] for text in _STATEMENTS]
    expected = {("table", name, name, text) for name, text in zip(names, _STATEMENTS, strict=True)}
    entries = connection.execute(statement).fetchall()
    if len(entries) != len(expected) or set(entries) != expected:
        other = ", ".join(sorted(f"{kind} {name}" for kind, name, *_ in set(entries) - expected))
        raise StoreError(
            f"[store] {path} is not an index of afflux: its schema differs{': ' if other else ''}{other[:200]}"
        )


def refuse_rollback_journal(path: Path) -> None:
    """Raise StoreError if there is a rollback journal beside an index.

    An index has a write-ahead log, and never such a journal.

    SQLite would apply the journal before any check of ours: it would write pages, or delete a file that the journal
    names.
    """
    journal = path.with_name(f"{path.name}-journal")
    if journal.is_symlink() or journal.exists():
        raise StoreError(f"[store] {journal} is not a file of a store: {PLAIN}")
