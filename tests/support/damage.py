"""Where a store keeps a client's row, and bytes that go bad."""

import json

from forged import index


def segment_shape(path, name):
    """The slots of a file of an array, and the elements of a slot."""
    return json.loads((path / name / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"]


def place(path, client, item=4):
    """Where a client's row of so many bytes an element lies: file and offset."""
    with index(path) as connection:
        (slot,) = connection.execute("SELECT slot FROM rows WHERE client = ?", (client,)).fetchone()
    per_segment, width = segment_shape(path, "rows")
    return path / "rows" / "c" / str(slot // per_segment) / "0", slot % per_segment * width * item


def damage_vectors(path, name):
    """Damage the vector in both slots that it may have."""
    for slot in range(2):
        offset = slot * segment_shape(path, name)[1] * (8 if name == "sum" else 4)
        damage(path / name / "c" / "0" / "0", offset + 1000)


def damage(file, offset, count=8):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        old = opened.read(count)
        opened.seek(offset)
        opened.write(bytes(byte ^ 0xFF for byte in old))
