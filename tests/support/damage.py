"""Where a store keeps a client's row, and bytes that go bad."""

import json
import sqlite3


def place(path, client):
    """Where a client's row lies: file and offset."""
    connection = sqlite3.connect(path / "index.sqlite")
    (slot,) = connection.execute("SELECT slot FROM rows WHERE client = ?", (client,)).fetchone()
    connection.close()
    meta = json.loads((path / "rows" / "zarr.json").read_text())
    per_segment, width = meta["chunk_grid"]["configuration"]["chunk_shape"]
    return path / "rows" / "c" / str(slot // per_segment) / "0", slot % per_segment * width * 4


def damage(file, offset, count=8):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        old = opened.read(count)
        opened.seek(offset)
        opened.write(bytes(byte ^ 0xFF for byte in old))
