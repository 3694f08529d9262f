"""Writes forged values to a store's index: any value, with checksums that agree."""

import json
import sqlite3
from contextlib import closing, contextmanager

from afflux.store.index_entries import crc_of, guarded_crc, list_entry
from afflux.store.segments import Place

#: In place of a value: JSON nested 200,000 levels deep.
DEEP = "\0deep"
LISTS = ("passed", "log", "tasks")


def dumped(value):
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 200_000 + "]" * 200_000)


@contextmanager
def index(path):
    with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as connection:
        yield connection


def fact_names(path):
    with index(path) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM facts") if name != "crc"]


def forge_fact(path, name, change):
    """Replaces a fact by `change` of it."""
    with index(path) as connection:
        texts = dict(connection.execute("SELECT name, value FROM facts"))
        del texts["crc"]
        texts[name] = dumped(change(json.loads(texts[name])))
        texts = dict(sorted(texts.items()))
        rows = [*texts.items(), ("crc", str(crc_of(texts)))]
        connection.execute("DELETE FROM facts")
        connection.executemany("INSERT INTO facts VALUES (?, ?)", rows)


def forge_state(path, change):
    """Replaces meta, buffers, notes, the vectors and the arrivals by `change` of them: it changes the dict in place."""
    with index(path) as connection:
        meta, buffers, notes = connection.execute("SELECT meta, buffers, notes FROM state").fetchone()
        arrivals = connection.execute("SELECT * FROM arrivals ORDER BY number").fetchall()
        found = {
            "meta": json.loads(meta),
            "buffers": buffers,
            "notes": None if notes is None else json.loads(notes),
            "vectors": [list(row) for row in connection.execute("SELECT name, slot, crc FROM vectors ORDER BY name")],
            "arrivals": [[*row[:4], json.loads(row[4]), row[5]] for row in arrivals],
        }
        change(found)
        meta = dumped(found["meta"])
        notes = None if found["notes"] is None else dumped(found["notes"])
        vectors = sorted(map(tuple, found["vectors"]), key=lambda row: str(row[0]))
        arrivals = [(*row[:4], dumped(row[4]), row[5]) for row in found["arrivals"]]
        ends = [
            connection.execute(f"SELECT coalesce(max(number) + 1, 0) FROM {table}").fetchone()[0] for table in LISTS
        ]
        connection.execute("DELETE FROM vectors")
        connection.executemany("INSERT INTO vectors VALUES (?, ?, ?)", vectors)
        connection.execute("DELETE FROM arrivals")
        connection.executemany("INSERT INTO arrivals VALUES (?, ?, ?, ?, ?, ?)", arrivals)
        crc = crc_of(meta, found["buffers"], notes, vectors, arrivals, ends)
        connection.execute("DELETE FROM state")
        connection.execute("INSERT INTO state VALUES (0, ?, ?, ?, ?)", (meta, found["buffers"], notes, crc))


def forge_list(path, table, change):
    """Replaces the entries of a list by `change` of them."""
    with index(path) as connection:
        texts = [text for (text,) in connection.execute(f"SELECT entry FROM {table} ORDER BY number")]
        entries = change([json.loads(text[8:]) for text in texts])
        connection.execute(f"DELETE FROM {table}")
        rows = [(i, list_entry(i, text=dumped(entry))) for i, entry in enumerate(entries)]
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", rows)
    forge_state(path, lambda found: None)


def forge_row(path, client, values):
    """Replaces the key, rank, slot and checksums of a client's row, where `values` has them."""
    with index(path) as connection:
        rank, slot, crc = connection.execute("SELECT place, slot, crc FROM rows WHERE client = ?", (client,)).fetchone()
        new = {"client": client, "place": rank, "slot": slot, "crc": crc[:-4]} | values
        place = Place(new["slot"], new["crc"] if isinstance(new["crc"], bytes) else b"", new["place"])
        row = new["client"], new["place"], new["slot"], guarded_crc(new["client"], place)
        connection.execute("DELETE FROM rows WHERE client = ?", (client,))
        connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", row)
