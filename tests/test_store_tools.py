"""`afflux.store.info`, `check`, `repair` and `export`, and their commands: a store without its rule."""

import json
import os
import shutil
import sqlite3
import threading
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux import Rule, Server, StoreError, store
from afflux.calibrate import CACHED_DIFFERENCE
from afflux.cli import app
from afflux.rules import afa_cs, ca2fl, fedams, fedbuff
from afflux.step import Sgd
from afflux.store.index import Index, Place, sealed
from afflux.store.lock import Lock
from conftest import FORKS, bits
from crashes import result
from damage import damage, place

SIZE, CLIENTS, M = 70_001, 30, 3
RULE = ca2fl(buffer_size=M)
#: Clients 8 to 0 push one after the other; within a round the order is canonical.
ORDER = [6, 7, 8, 3, 4, 5, 0, 1, 2]


def vector(client):
    return np.random.default_rng(client).standard_normal(SIZE).astype(np.float32)


def pushes(server, clients):
    for client in clients:
        server.push(client, vector(client), version=server.version)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with rows, one arrival that waits, and a version that is kept."""
    path = tmp_path_factory.mktemp("tools") / "store"
    with Server(RULE, np.zeros(SIZE), num_clients=CLIENTS, store=path) as server:
        first = server.pull()
        pushes(server, range(8, -1, -1))
        pushes(server, [20])
        server.checkpoint({"epoch": 3}, keep=[first])
    return path


@pytest.fixture
def path(made, tmp_path):
    return shutil.copytree(made, tmp_path / "store")


def run(*arguments, **more):
    return CliRunner().invoke(app, ["store", *map(str, arguments)], **more)


def damage_row(path, client, where=1000):
    file, offset = place(path, client)
    damage(file, offset + where, 4)


def change(path, statement):
    connection = sqlite3.connect(path / "index.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and not file.name.endswith("-shm")}


def test_info_says_what_the_server_was(made):
    found = store.info(made)
    assert (found.rule, found.kind, found.d, found.dtype, found.slot_dtype) == (
        "ca2fl",
        "update",
        SIZE,
        "float32",
        "float32",
    )
    assert (found.version, found.joins, found.waiting, found.counts["joined"]) == (3, 10, 1, 10)
    assert (found.num_clients, found.clients, found.codec, found.bits) == (CLIENTS, 9, "float32", 32)
    assert (found.bytes_per_client, found.durability, found.id_type) == (4 * SIZE, "process", "int")
    assert (found.in_use, found.problems, found.repairs, found.notes) == (False, (), (), {"epoch": 3})
    for name in ("params", "rows", "sum", "arrivals"):
        segments = [file.stat().st_size for file in (made / name / "c").rglob("0") if file.is_file()]
        assert found.disk_bytes[name] == sum(segments) > 0
    assert found.disk_bytes["index"] >= 4096


def test_info_while_a_server_is_at_work(path):
    with Server.open(path, RULE, durability="power") as server:
        assert store.info(path).in_use
        pushes(server, [21, 22])
        found = store.info(path)
        assert (found.version, found.clients, found.durability) == (4, 12, "power")
        for call in (store.check, store.repair, lambda path: store.export(path, path.parent / "out.npy")):
            with pytest.raises(StoreError, match="is in use"):
                call(path)
    assert not store.info(path).in_use


def test_a_server_opens_beside_info(path):
    """Which holds the store for a moment, again and again."""
    ended = threading.Event()

    def polls():
        while not ended.is_set():
            store.info(path)

    poller = threading.Thread(target=polls)
    poller.start()
    try:
        for _ in range(10):
            Server.open(path, RULE).close()
    finally:
        ended.set()
        poller.join()


def test_a_writer_waits_for_a_moment_alone(path):
    reader = Lock(path, shared=True)
    with pytest.raises(StoreError, match="is in use"):
        Lock(path)
    later = threading.Timer(0.05, reader.release)
    later.start()
    Lock(path).release()
    later.join()


def test_info_of_a_rule_without_rows(tmp_path):
    with Server(fedams(buffer_size=1), np.zeros(5), store=tmp_path / "store") as server:
        server.push("ann", np.ones(5), version=0)
    found = store.info(tmp_path / "store")
    assert (found.codec, found.bits, found.bytes_per_client, found.clients, found.id_type) == (None, None, 0, 0, "str")
    assert len(found.disk_bytes) == 3 + len(fedams().memories)
    assert store.check(tmp_path / "store").sound
    with pytest.raises(StoreError, match=r"\[export\] .* has no rows: fedams keeps none"):
        store.export(tmp_path / "store", tmp_path / "out.npy")


def test_info_sees_a_segment_that_was_cut_off(path):
    os.truncate(path / "rows" / "c" / "0" / "0", 4096)
    (problem,) = store.info(path).problems
    assert problem == f"{path / 'rows'} is truncated: slot 8 of 0 is in use"


def test_check_reads_all_and_writes_nothing(path):
    before, told = contents(path), []
    health = store.check(path, lambda done, whole: told.append((done, whole)))
    assert (health.sound, health.clients, health.damaged, health.problems, health.mendable) == (True, 9, (), (), False)
    assert health.sum_error <= 1e-15
    assert contents(path) == before
    # Params and the version that is kept, the sum, an arrival, nine rows.
    whole = SIZE * (4 * 2 + 8 + 4 + 4 * 9)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (whole, whole)


@pytest.mark.parametrize("where", [0, 4 * 65536 + 100, 4 * SIZE - 4])
def test_check_finds_a_damaged_row(path, where):
    damage_row(path, 5, where)
    health = store.check(path)
    assert (health.sound, health.damaged, health.mendable, health.sum_error) == (False, (5,), True, None)
    assert health.problems == (f"client 5's row in {path / 'rows'} is damaged",)


@pytest.mark.parametrize("name", ["params", "sum", "arrivals"])
def test_check_finds_damaged_vectors(path, name):
    width = json.loads((path / name / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"][1]
    for slot in range(2):
        damage(path / name / "c" / "0" / "0", slot * width * (8 if name == "sum" else 4) + 1000)
    health = store.check(path)
    assert len(health.problems) == (2 if name == "params" else 1)
    assert all(f"{path / name} is damaged: slot" in problem for problem in health.problems)
    assert health.mendable == (name == "sum")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE rows SET slot = (SELECT slot FROM rows WHERE client = 1) WHERE client = 2", "a place that cannot be"),
        ("UPDATE rows SET slot = 99999 WHERE client = 2", "client 2's row has a place that cannot be"),
        ("UPDATE rows SET place = 0 WHERE client = 2", "a place that cannot be"),
        ("DELETE FROM rows WHERE client = 2", "8 of 9 clients' rows have a place"),
    ],
)
def test_check_finds_what_the_index_cannot_say(path, statement, message):
    change(path, statement)
    health = store.check(path)
    assert message in " ".join(health.problems)
    assert not health.mendable
    before = contents(path)
    with pytest.raises(StoreError, match=r"\[repair\] .*index.sqlite: .*only rows and their sum are mended"):
        store.repair(path)
    assert contents(path) == before


def test_check_finds_a_sum_of_other_rows(path):
    """As a lost update would leave it: all checksums hold."""
    connection = sqlite3.connect(path / "index.sqlite")
    (crc,) = connection.execute("SELECT crc FROM rows WHERE client = 1").fetchone()
    (slot,) = connection.execute("SELECT slot FROM rows WHERE client = 2").fetchone()
    connection.execute("UPDATE rows SET crc = ? WHERE client = 2", (sealed(2, Place(slot, crc[:-4])),))
    connection.commit()
    connection.close()
    (here, start), (there, target) = place(path, 1), place(path, 2)
    row = here.read_bytes()[start : start + 4 * SIZE]
    with there.open("r+b") as file:
        file.seek(target)
        file.write(row)
    health = store.check(path)
    assert health.sum_error > 1e-3
    assert "the sum of the rows is off by" in health.problems[0]
    assert health.mendable


def test_check_knows_the_largest_norm_so_far(tmp_path):
    """The promise is in parts of it: what large rows have left in the sum is no damage when they are gone."""
    server = Server(afa_cs(buffer_size=1), np.zeros(100), num_clients=4, store=tmp_path / "store")
    for scale in (1e20, 1.0):
        for client in range(4):
            server.push(client, np.random.default_rng(client).standard_normal(100) * scale, version=server.version)
    rows = np.sum([row.astype(np.float64) for row in server.rows.values()], axis=0)
    assert np.abs(server.rows.sum - rows).max() > 1.0
    server.close()
    health = store.check(tmp_path / "store")
    assert health.sound
    assert 0 < health.sum_error <= 1e-15


@pytest.mark.parametrize("gone", [(), (5,), (8, 3, 0), tuple(range(9))])
def test_repair_drops_rows_and_goes_on(path, gone):
    for client in gone:
        damage_row(path, client)
    rows = {client: bits(vector(client)) for client in ORDER if client not in gone}
    done = store.repair(path)
    if not gone:
        assert done is None
        assert store.info(path).repairs == ()
        return
    assert (sorted(done.dropped), done.version) == (sorted(gone), 3)
    assert store.check(path).sound
    assert store.repair(path) is None
    (told,) = store.info(path).repairs
    assert (told["version"], told["joins"], sorted(told["dropped"])) == (3, 10, sorted(gone))
    with Server.open(path, RULE) as server:
        assert (server.version, server.arrivals_waiting, server.notes) == (3, 1, {"epoch": 3})
        assert server.kept.keys() == {0}
        assert server.rows.client_ids == list(rows)
        assert {client: bits(server.rows.row(client)) for client in rows} == rows
        # As a server in memory goes on that never had these rows.
        other = Server(RULE, np.zeros(SIZE), num_clients=CLIENTS)
        state = server.state_dict()
        other.load_state_dict(state)
        total = np.zeros(SIZE)
        for client in sorted(rows, key=lambda client: place(path, client)):
            total += vector(client)
        assert bits(server.rows.sum) == bits(total)
        for each in (server, other):
            pushes(each, [0, 5, 25, 8, 1, 2, 3, 29])
        assert bits(server.params) == bits(other.params)
        assert bits(server.rows.sum) == bits(other.rows.sum)
        assert server.rows.client_ids == other.rows.client_ids
    assert store.check(path).sound
    assert store.info(path).repairs == (told,), "later commits leave the record"


def test_repair_makes_a_damaged_sum_anew(path):
    for slot in range(2):
        width = json.loads((path / "sum" / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"][1]
        damage(path / "sum" / "c" / "0" / "0", slot * width * 8 + 1000)
    assert store.repair(path).dropped == ()
    assert store.check(path).sound
    Server.open(path, RULE).close()


def test_repair_of_a_segment_that_was_cut_off(made, path):
    file, offset = place(path, 4)
    os.truncate(file, offset + 100)
    kept = [client for client in range(9) if place(path, client)[1] < offset]
    assert set(store.check(path).damaged) == set(range(9)), "the whole segment is missing until it is mended"
    assert sorted(store.repair(path).dropped) == [client for client in range(9) if client not in kept]
    assert store.check(path).sound
    with Server.open(path, RULE) as server:
        assert sorted(server.rows.client_ids) == kept
        pushes(server, range(9))


def test_repair_of_a_segment_that_has_grown(path):
    """It is cut off; no row was in what was too much."""
    file, _ = place(path, 0)
    size = file.stat().st_size
    os.truncate(file, size + 10)
    assert store.check(path).mendable
    told = run("repair", path, "--yes")
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (
        0,
        "mended: a segment has its size again; no row was lost",
    )
    assert (file.stat().st_size, store.check(path).sound) == (size, True)
    Server.open(path, RULE).close()


def test_repair_leaves_what_it_cannot_mend(path):
    damage_row(path, 3)
    for slot in range(2):
        damage(path / "params" / "c" / "0" / "0", slot * 4 * 70_656 + 1000)
    before = contents(path)
    with pytest.raises(StoreError, match=r"\[repair\] .*params is damaged.* only rows and their sum are mended"):
        store.repair(path)
    assert contents(path) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings(FORKS)
def test_a_folder_that_can_only_be_read(made):
    """As on a read-only disk: no file is made beside the index."""

    def look(tell):
        if os.getuid() == 0:  # who may write anywhere
            os.setuid(65534)
        tell(store.info(path).problems == () and store.check(path).sound)
        tell(len(store.export(path, root / "out" / "rows.npy")))
        for call in (store.repair, Server.open):
            try:
                call(path)
            except StoreError as error:
                tell("Permission denied" in str(error))

    with TemporaryDirectory() as folder:
        root = Path(folder)
        path = shutil.copytree(made, root / "store")
        (root / "out").mkdir()
        before = contents(path)
        for each in (*path.rglob("*"), path):
            each.chmod(0o555 if each.is_dir() else 0o444)
        root.chmod(0o755)
        (root / "out").chmod(0o777)
        assert result(look) == ["True", "9", "True", "True"]
        assert contents(path) == before
        for each in (path, *path.rglob("*")):
            each.chmod(0o755)


def test_a_store_that_cannot_be_opened(path, tmp_path):
    for call in (store.info, store.check, store.repair):
        with pytest.raises(StoreError, match="there is no folder"):
            call(tmp_path / "nowhere")
    change(path, "UPDATE facts SET value = '9' WHERE name = 'order_version'")
    for call in (store.info, store.check, store.repair):
        with pytest.raises(StoreError, match="has order_version 9, this afflux 1"):
            call(path)


@pytest.mark.parametrize("clients", [None, [3], [0, 8, 3]])
def test_export_gives_the_rows(path, tmp_path, clients):
    ids = ORDER if clients is None else clients
    expected = np.stack([vector(client) for client in ids])
    assert store.export(path, tmp_path / "out.npy", clients) == ids
    assert bits(np.load(tmp_path / "out.npy")) == bits(expected)
    assert store.export(path, tmp_path / "out.npz", clients) == ids
    with np.load(tmp_path / "out.npz") as file:
        assert bits(file["rows"]) == bits(expected)
        assert (file["clients"].tolist(), file["clients"].dtype) == (ids, np.int64)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.npy", "out.npz", "store"]


def test_export_of_text_ids_and_float64(tmp_path):
    rows = {"ann": np.array([1.0, 0.1]), "böb": np.array([2.0, 1e-300])}
    with Server(ca2fl(buffer_size=2), np.zeros(2), num_clients=4, dtype="float64", store=tmp_path / "s") as server:
        for client, row in rows.items():
            server.push(client, row, version=0)
    assert store.export(tmp_path / "s", tmp_path / "out.npz", ["böb"]) == ["böb"]
    with np.load(tmp_path / "out.npz") as file:
        assert file["clients"].tolist() == ["böb"]
        assert bits(file["rows"]) == bits(rows["böb"])


def test_export_refuses_text_that_numpy_cuts_off(tmp_path):
    with Server(ca2fl(buffer_size=2), np.zeros(2), num_clients=4, store=tmp_path / "s") as server:
        for client in ("ann", "ann\0"):
            server.push(client, np.ones(2, np.float32), version=0)
    out = tmp_path / "out.npz"
    with pytest.raises(StoreError, match=r"\[export\] client 'ann\\x00' ends in a NUL, .*: export to \.npy"):
        store.export(tmp_path / "s", out)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]
    assert store.export(tmp_path / "s", out, ["ann"]) == ["ann"]
    assert store.export(tmp_path / "s", tmp_path / "out.npy") == ["ann", "ann\0"]


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "float32"), ("float64", "float64"), ("float32", "affine-2")])
def test_check_takes_three_vectors_of_float64(dtype, codec, tmp_path):
    rule, size = ca2fl(buffer_size=1, codec=codec), 300_000
    with Server(rule, np.zeros(size), num_clients=9, dtype=dtype, store=tmp_path / "s") as server:
        for client in range(3):
            server.push(client, np.full(size, client, dtype), version=client)
    tracemalloc.start()
    try:
        assert store.check(tmp_path / "s").sound
        assert tracemalloc.get_traced_memory()[1] < 25 * size
    finally:
        tracemalloc.stop()


def test_export_refuses(path, tmp_path):
    out = tmp_path / "out.npy"
    out.write_text("mine")
    damage_row(path, 5)
    for clients, message in ([[3, 20], "client 20 has no row"], [None, "client 5's row in .* is damaged"]):
        with pytest.raises(StoreError, match=message):
            store.export(path, out, clients)
    with pytest.raises(StoreError, match=r"must end in \.npy or \.npz"):
        store.export(path, tmp_path / "out.csv")
    with pytest.raises(StoreError, match=r"cannot write .*nowhere"):
        store.export(path, tmp_path / "nowhere" / "out.npy")
    assert out.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_info_command(path):
    result = run("info", path)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["store"] == str(path)
    assert lines["rule"].startswith("ca2fl")
    assert lines["clients"] == "9 of 30 have a row"
    assert lines["rows"] == "float32: 32 bits an element, 280 kB a client"
    assert lines["version"] == "3 after 10 pushes, 1 arrivals wait"
    assert lines["durability"].startswith("process: ")
    assert lines["health"].startswith("no problem at first sight")
    found = json.loads(run("info", path, "--json").stdout)
    assert (found["clients"], found["path"], found["notes"]) == (9, str(path), {"epoch": 3})


def test_the_check_and_repair_commands(path):
    result = run("check", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("sound: every checksum holds, 9 rows; the sum is off by ")
    damage_row(path, 5)
    result = run("check", path)
    assert (result.exit_code, result.stdout) == (1, f"client 5's row in {path / 'rows'} is damaged\n")
    assert json.loads(run("check", path, "--json").stdout)["damaged"] == [5]
    result = run("repair", path, input="n\n")
    assert result.exit_code == 1
    assert "drop 1 rows and make the sum anew? The bits that follow are others" in result.stdout
    assert run("check", path).exit_code == 1
    result = run("repair", path, input="y\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("mended: 1 rows dropped; bit continuity ends at version 3\n")
    assert run("check", path).exit_code == 0
    assert run("repair", path, "--yes").stdout.startswith("sound")
    assert "repaired    at version 3, where bit continuity ended; rows dropped of clients 5" in run("info", path).stdout


def test_the_export_command(path, tmp_path):
    result = run("export", path, "--out", tmp_path / "out.npz", "--clients", "8,3")
    assert (result.exit_code, result.stdout) == (0, f"wrote 2 rows to {tmp_path / 'out.npz'}\n")
    assert np.load(tmp_path / "out.npz")["clients"].tolist() == [8, 3]
    result = run("export", path, "--out", tmp_path / "out.npy", "--clients", "ann")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "are whole numbers separated by commas, not 'ann'" in result.stderr


@pytest.mark.parametrize("command", ["info", "check", "repair", "export"])
def test_the_commands_help_and_mistakes(command, tmp_path):
    assert f"afflux store {command} runs/" in run(command, "--help").stdout
    out = ["--out", tmp_path / "out.npy"] if command == "export" else []
    result = run(command, tmp_path / "nowhere", *out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: [store] ")
    assert result.stderr.count("\n") == 1


def test_fedbuff_in_a_store_has_no_rows_to_mend(tmp_path):
    with Server(fedbuff(buffer_size=1), np.zeros(5), store=tmp_path / "store") as server:
        server.push("ann", np.ones(5), version=0)
    assert store.repair(tmp_path / "store") is None


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "affine-4", "affine-vector-8", "rotated-2"])
def test_rows_in_every_kind_of_codec(codec, tmp_path):
    path, rule = tmp_path / "store", ca2fl(buffer_size=M, codec=codec)
    with Server(rule, np.zeros(SIZE), num_clients=CLIENTS, store=path, seed=7) as server:
        pushes(server, range(9))
        rows = {client: bits(server.rows.row(client)) for client in range(9)}
    found = store.info(path)
    assert (found.codec, found.bits) == (codec, int(codec.rpartition("-")[2].removeprefix("b").removeprefix("float")))
    assert found.bytes_per_client == rule.calibrate.codec.row_bytes(SIZE)
    assert store.check(path).sum_error <= 1e-15
    store.export(path, tmp_path / "out.npy")
    assert [bits(row) for row in np.load(tmp_path / "out.npy")] == list(rows.values())
    slot = json.loads((path / "rows" / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"][1]
    connection = sqlite3.connect(path / "index.sqlite")
    ((there,),) = connection.execute("SELECT slot FROM rows WHERE client = 4")
    connection.close()
    item = 2 if codec == "float16" else 1
    damage(path / "rows" / "c" / "0" / "0", there * slot * item + 5000)
    assert store.check(path).damaged == (4,)
    assert store.repair(path).dropped == (4,)
    assert store.check(path).sum_error == 0.0
    with Server.open(path, rule) as server:
        assert {client: bits(server.rows.row(client)) for client in rows if client != 4} == {
            client: row for client, row in rows.items() if client != 4
        }
        pushes(server, range(9))
    assert store.check(path).sound


def test_the_promise_is_made_of_rows_alone(tmp_path):
    """What was rejected became no row, however large."""

    class First:
        def __call__(self, arrivals):
            return np.array([1.0, 0.0])

    rule = Rule("own", "update", 2, First(), CACHED_DIFFERENCE, Sgd(1.0))
    with Server(rule, np.zeros(4), num_clients=3, store=tmp_path / "store") as server:
        server.push(1, np.full(4, 1.0), version=0)
        assert server.push(2, np.full(4, 1e20), version=0).report.rejected == ("", "weight 0")
    assert Index(tmp_path / "store" / "index.sqlite", read_only=True).committed().meta["largest_row"] == 2.0
