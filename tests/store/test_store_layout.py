"""Where things lie in a store: slots, segments and pages; any Zarr tool reads it."""

import re
from pathlib import Path

import numpy as np
import pytest
import zarr

import afflux.store.metadata
import afflux.store.segments
import rows as reference
from afflux import Server
from afflux.ops import codecs
from afflux.rules import fedbuff
from afflux.server.inputs import InputAdapter
from afflux.store.disk_cache import DiskCache
from afflux.store.metadata import make_arrays, shape_of, write_slots
from afflux.store.segments import Segments
from conftest import bits, push_all
from inside import index_of, store_of
from stores import M, made, some_pushes


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16", "affine-4", "affine-vector-2", "rotated-1"])
@pytest.mark.parametrize("size", [5, 300, 70_001])
def test_zarr_and_the_reference_decoder_read_it(size, codec, tmp_path):
    server = made("ca2fl", size, tmp_path / "store", codec=codec)
    some_pushes(server, size, 40)
    rows, index = server.rows, index_of(server)
    group = zarr.open_group(tmp_path / "store", mode="r")
    assert group["rows"].dtype == codecs.named(codec).row_dtype
    for client in rows.client_ids:
        place = index.row(client)
        row = group["rows"][place.slot, : codecs.named(codec).row_size(size)]
        expected = row if codec == "float32" else reference.decode(codec, row.tobytes(), size)
        assert bits(expected) == bits(rows.row(client))
    places = index.committed().vectors
    assert bits(group["params"][places["params"].slot, :size]) == bits(server.params)
    assert bits(group["sum"][places["sum"].slot, :size]) == bits(rows.sum)
    assert group["rows"].shape[0] >= len(rows)
    assert group.attrs["order_version"] == 1


def test_the_metadata_are_those_that_zarr_writes(tmp_path):
    """Byte for byte, for each type of element."""
    dtypes = ["float64", "float32", "float16", "uint16", "uint8"]
    for folder in ("ours", "zarr"):
        (tmp_path / folder).mkdir()
    make_arrays(tmp_path / "ours", {name: shape_of(name, 300, 5) for name in dtypes})
    group = zarr.create_group(tmp_path / "zarr", attributes={"afflux": "store", "order_version": 1})
    for name in dtypes:
        _, width, slots = shape_of(name, 300, 5)
        chunks = {"shape": (0, width), "chunks": (slots, width), "dtype": name, "fill_value": 0}
        group.create_array(name, **chunks, compressors=None, filters=None)
    ours, theirs = (
        {file.relative_to(tmp_path / folder): file.read_bytes() for file in (tmp_path / folder).rglob("*.*")}
        for folder in ("ours", "zarr")
    )
    assert len(ours) == 1 + len(dtypes)
    assert ours == theirs
    write_slots(tmp_path / "ours" / "uint8", 320)
    group["uint8"].resize((320, group["uint8"].shape[1]))
    assert (tmp_path / "ours/uint8/zarr.json").read_bytes() == (tmp_path / "zarr/uint8/zarr.json").read_bytes()


def test_a_segment_that_was_not_made_to_the_end(tmp_path, monkeypatch):
    """The file exists, but is not in the metadata: Zarr tools do not find it until the metadata are written."""
    monkeypatch.setattr(afflux.store.metadata, "MOST_SLOTS", 2)
    path = tmp_path / "store"
    server = made("ca2fl", 30, path)

    def push(client):
        server.push(client=client, update=np.ones(30), version=server.version)

    write = afflux.store.segments.write_slots

    def stopped(folder, slots):
        if slots == 4:
            raise KeyboardInterrupt
        write(folder, slots)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(afflux.store.segments, "write_slots", stopped)
        for client in range(M):
            push(client)
    store_of(server).close()
    server = Server.open(path, server.rule)
    for client in range(M):
        push(client)
    shape = zarr.open_group(path, mode="r")["rows"].shape
    assert shape[0] == server.rows.memory.segments.slots >= M


@pytest.mark.parametrize(
    ("size", "begins"), [(16_383, 64), (16_384, 4096), (2**21 - 2048, 4096), (2**21, 2**21), (2**21 + 1, 2**21)]
)
def test_no_page_holds_parts_of_two_slots(size, begins):
    """Nor does a huge one, where slots are so large that it does not matter."""
    shape = shape_of("float32", size, 3)
    assert shape.slot_bytes % begins == 0
    assert shape.huge == (begins == 2**21)
    assert shape.slot_bytes - 4 * size < begins


def test_a_store_with_a_large_buffer_of_large_slots_can_be_opened(tmp_path):
    rule = fedbuff(buffer_size=10**6)
    with Server(rule, np.zeros(14_563, np.float32), store=tmp_path / "store") as server:
        server.push(client=1, update=np.ones(14_563, np.float32), version=0)
    with Server.open(tmp_path / "store", rule) as server:
        assert server.arrivals_waiting == 1


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="asks Linux for huge pages")
def test_large_slots_are_mapped_by_huge_pages(tmp_path):
    size = 2**21
    with Server(fedbuff(buffer_size=1), np.zeros(size, np.float32), store=tmp_path / "store") as server:
        server.push(client=1, update=np.ones(size, np.float32), version=0)
        maps = Path("/proc/self/smaps").read_text()
        found = re.findall(rf"{tmp_path}/store/(\w+)/c/0/0\n(?:\w+: .*\n)*?VmFlags: (.*)", maps)
    assert {name: "hg" in flags.split() for name, flags in found} == {"params": True}


def test_the_disk_reads_while_a_vector_is_copied(tmp_path, mapped, monkeypatch):
    calls = []

    def noted(what, method):
        def call(self, *arguments, **options):
            calls.append(what)
            return method(self, *arguments, **options)

        return call

    with made("ca2fl", 300, tmp_path / "store") as server:
        push_all(server, range(2 * M), lambda client: np.full(300, client, np.float32))
        for owner, name in ((Segments, "prefetch"), (InputAdapter, "ingest"), (DiskCache, "fetch")):
            monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
        server.push(client=1, update=np.ones(300, np.float32), version=server.version)
        # Rows in mapped files are compared in the call of `ingest`; for a GPU they are fetched.
        here = server._adapter.plane.gpu is None
        assert calls == (["ingest"] if here and server.rows.memory.segments.mapped else ["prefetch", "ingest", "fetch"])
        calls.clear()
        server.push(client=8, update=np.ones(300, np.float32), version=server.version)
        assert calls == (["ingest"] if here else ["ingest", "fetch"])  # it has no row
