"""`afflux.store.check` and `repair`, and their commands: what is wrong with a store, and how it is mended."""

import json
import os

import numpy as np
import pytest

from afflux import Rule, Server, StoreError, store
from afflux.rules import afa_cs, ca2fl, fedbuff
from afflux.rules.calibration import CACHED_DIFFERENCE
from afflux.rules.optimizers import Sgd
from afflux.store.index import Index
from afflux.store.index_entries import guarded_crc
from afflux.store.segments import Place
from conftest import bits, check_error, push_all
from damage import damage, damage_vectors, place
from forged import index
from inside import index_of
from nine_rows import CLIENTS, ORDER, RULE, SIZE, M, change, contents, damage_row, pushes, run, vector
from own_parts import Says
from surroundings import traced_memory_below


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
    damage_vectors(path, name)
    health = store.check(path)
    assert len(health.problems) == (2 if name == "params" else 1)
    assert all(f"{path / name} is damaged: slot" in problem for problem in health.problems)
    assert health.mendable == (name in ("sum", "arrivals"))
    assert health.arrivals == ((20,) if name == "arrivals" else ())


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
    check_error(r"\[repair\] .*index.sqlite: .*only rows, their sum", store.repair, path, error=StoreError)
    assert contents(path) == before


def test_check_finds_a_sum_of_other_rows(path):
    """As a lost update would leave it: all checksums hold."""
    with index(path) as connection:
        (crc,) = connection.execute("SELECT crc FROM rows WHERE client = 1").fetchone()
        (slot,) = connection.execute("SELECT slot FROM rows WHERE client = 2").fetchone()
        connection.execute("UPDATE rows SET crc = ? WHERE client = 2", (guarded_crc(2, Place(slot, crc[:-4])),))
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
    server = Server(afa_cs(buffer_size=1), np.zeros(100), num_clients=4, max_abs=1e25, store=tmp_path / "store")
    for scale in (1e20, 1.0):
        push_all(server, range(4), lambda i, k=scale: np.random.default_rng(i).standard_normal(100) * k)
    rows = np.sum([row.astype(np.float64) for row in server.rows.values()], axis=0)
    assert np.abs(server.rows.sum - rows).max() > 1.0
    server.close()
    health = store.check(tmp_path / "store")
    assert health.sound
    assert 0 < health.sum_error <= 1e-15


def test_check_knows_the_rounding_of_a_long_run(tmp_path):
    """12,800 rows grow by half an ulp of the sum, 2^49, which rounds each time to the same sum."""
    few, many, largest = 64, 512, 2.0**40
    rule = ca2fl(buffer_size=few)
    with Server(rule, np.zeros(1), num_clients=few + many, store=tmp_path / "store", commit_every=None) as server:
        push_all(server, (few + client for client in range(many)), np.array([largest]))
        for step in range(1, 201):
            push_all(server, range(few), np.array([step / 16]))
        assert server.rows.sum.tolist() == [2.0**49]
    health = store.check(tmp_path / "store")
    assert health.sum_error == few * 200 / 16 / (few + many) / largest  # rounding explains 1.54e-12
    assert health.sum_error > 1.2e-12
    assert health.sound


def test_check_knows_rows_whose_squares_overflow(tmp_path):
    rule, big = ca2fl(buffer_size=1), {"dtype": "float64", "max_abs": 1e300}
    with Server(rule, np.zeros(2), num_clients=2, store=tmp_path / "store", **big) as server:
        for turn in range(6):
            server.push(client=turn % 2, update=np.array([1e200 / (turn + 3), 1e199]), version=server.version)
    health = store.check(tmp_path / "store")
    assert health.sound
    assert health.sum_error <= 1e-15
    with index(tmp_path / "store") as connection:
        assert connection.execute("SELECT json_valid(meta) FROM state").fetchone() == (1,)


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
        assert server.retained_versions.keys() == {0}
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
    damage_vectors(path, "sum")
    assert store.repair(path).dropped == ()
    assert store.check(path).sound
    Server.open(path, RULE).close()


def test_repair_of_a_segment_that_was_cut_off(nine_rows, path):
    file, offset = place(path, 4)
    size = file.stat().st_size
    os.truncate(file, offset + 100)
    kept = [client for client in range(9) if place(path, client)[1] < offset]
    lost = tuple(client for client in range(9) if client not in kept)
    health = store.check(path)
    assert (health.damaged, health.keeps_bits) == (lost, False)
    assert health.problems == (f"{file} is truncated: {offset + 100} of {size} bytes: {len(lost)} clients' rows",)
    assert store.repair(path).dropped == lost
    assert store.check(path).sound
    with Server.open(path, RULE) as server:
        assert sorted(server.rows.client_ids) == kept
        pushes(server, range(9))


@pytest.mark.parametrize("allocates", [True, False])
def test_rows_in_the_other_files_stay(allocates, tmp_path, monkeypatch):
    """Also in those that come after the one that is missing, and where the system does not allocate space."""
    if not allocates:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr("afflux.store.metadata.MOST_SLOTS", 2)
    path = tmp_path / "store"
    with Server(RULE, np.zeros(100), num_clients=CLIENTS, store=path) as server:
        push_all(server, range(9), lambda client: np.full(100, client, np.float32))
        slots = {client: index_of(server).row(client).slot for client in range(9)}
    for segment in (1, 3):
        (path / "rows" / "c" / str(segment) / "0").unlink()
    lost = tuple(client for client, slot in slots.items() if slot // 2 in (1, 3))
    assert len(lost) == 4
    health = store.check(path)
    assert health.damaged == lost
    assert [problem.rpartition(": ")[2] for problem in health.problems] == ["2 clients' rows"] * 2
    assert store.repair(path).dropped == lost
    assert store.check(path).sound
    with Server.open(path) as server:
        assert sorted(server.rows.client_ids) == [client for client in range(9) if client not in lost]
        for client in server.rows.client_ids:
            assert bits(server.rows.row(client)) == bits(np.full(100, client, np.float32))


@pytest.mark.parametrize("more", ["rows", "sum"])
def test_repair_loses_no_more_than_was_agreed_to(more, path, monkeypatch):
    def agrees(question):
        if more == "rows":
            damage_row(path, 3)
            damage_row(path, 4)
        else:
            damage_vectors(path, "sum")
        damaged.append(contents(path))
        return True

    damaged = []
    if more == "rows":
        damage_row(path, 5)
        said = "rows are damaged that were not when it was checked: 2, the first of client 3; nothing was changed"
    else:
        (path / "rows" / "zarr.json").unlink()
        said = "the sum is damaged, which it was not when it was checked; nothing was changed"
    monkeypatch.setattr("afflux.cli.store._confirm", agrees)
    told = run("repair", path)
    assert (told.exit_code, told.stderr.startswith(f"error: [repair] {said}")) == (2, True)
    assert contents(path) == damaged[0]
    assert run("repair", path, "--yes").exit_code == 0
    assert store.check(path).sound


def test_a_long_list_is_cut_short(tmp_path):
    path, many = tmp_path / "store", 25
    with Server(ca2fl(buffer_size=5), np.zeros(9), num_clients=many, store=path) as server:
        push_all(server, range(many - 1, -1, -1), np.ones(9))
    for client in range(many):
        damage_row(path, client, 8)
    lines = [f"client {client}'s row in {path / 'rows'} is damaged" for client in range(many)]
    total = f"damaged: 25 of 25 rows lost; `afflux store repair {path}` drops them"
    assert run("check", path).stdout.splitlines() == [*lines[:20], "... and 5 more (--all)", total]
    assert run("check", path, "--all").stdout.splitlines() == [*lines, total]
    assert run("repair", path, "--yes").stdout.splitlines()[20] == "... and 5 more (--all)"
    ids = [str(client) for client in range(many)]
    (line,) = (line for line in run("info", path).stdout.splitlines() if line.startswith("repaired"))
    assert line.endswith(f"of clients {', '.join(ids[:20])}, ... and 5 more (--all)")
    assert f"of clients {', '.join(ids)}\n" in run("info", path, "--all").stdout


def test_repair_leaves_what_it_cannot_mend(path):
    damage_row(path, 3)
    damage_vectors(path, "params")
    before = contents(path)
    text = r"\[repair\] .*params is damaged.* only rows, their sum and arrivals are mended"
    check_error(text, store.repair, path, error=StoreError)
    assert contents(path) == before


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "float32"), ("float64", "float64"), ("float32", "affine-2")])
def test_check_takes_three_vectors_of_float64(dtype, codec, tmp_path):
    rule, size = ca2fl(buffer_size=1, codec=codec), 300_000
    with Server(rule, np.zeros(size), num_clients=9, dtype=dtype, store=tmp_path / "s") as server:
        push_all(server, range(3), lambda client: np.full(size, client, dtype), version=lambda client: client)
    with traced_memory_below(25 * size):
        assert store.check(tmp_path / "s").sound


def test_the_check_and_repair_commands(path):
    result = run("check", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("sound: every checksum holds, 9 rows; the sum is off by ")
    damage_row(path, 5)
    result = run("check", path)
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [
            f"client 5's row in {path / 'rows'} is damaged",
            f"damaged: 1 of 9 rows lost; `afflux store repair {path}` drops them",
        ],
    )
    assert json.loads(run("check", path, "--json").stdout)["damaged"] == [5]
    result = run("repair", path, input="n\n")
    assert result.exit_code == 1
    assert "drop 1 row and recompute the sum? Later bits will differ" in result.stdout
    assert run("check", path).exit_code == 1
    result = run("repair", path, input="y\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("repaired: 1 row dropped; bit continuity ends at version 3\n")
    assert run("check", path).exit_code == 0
    assert run("repair", path, "--yes").stdout.startswith("sound")
    assert "repaired    at version 3, where bit continuity ended; rows dropped of clients 5" in run("info", path).stdout


def test_fedbuff_in_a_store_has_no_rows_to_mend(tmp_path):
    with Server(fedbuff(buffer_size=1), np.zeros(5), store=tmp_path / "store") as server:
        server.push(client="ann", update=np.ones(5), version=0)
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
    file, offset = place(path, 4, 2 if codec == "float16" else 1)
    damage(file, offset + 5000)
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
    rule = Rule("own", "update", 2, Says(np.array([1.0, 0.0])), CACHED_DIFFERENCE, Sgd(1.0))
    with Server(rule, np.zeros(4), num_clients=3, store=tmp_path / "store") as server:
        server.push(client=1, update=np.full(4, 1.0), version=0)
        assert server.push(client=2, update=np.full(4, 1e14), version=0).report.rejected == ("", "weight 0")
    assert Index(tmp_path / "store" / "index.sqlite", read_only=True).committed().meta["largest_row"] == 2.0
