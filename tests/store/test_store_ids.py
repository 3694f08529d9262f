"""Client ids of every kind in a store: in SQLite, in exported files, on the command line, and after a repair."""

import json

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.rules import ca2fl
from conftest import check_error, push_all
from damage import damage, place
from forged import index
from nine_rows import run

#: In the order of their rows.
IDS = [-(2**63), -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1, "", "\0", "1", "1,2", "ann\0", "böb", 'quo"te', "日本"]
D = 40_000  # rows of several pages


def row(client):
    return np.full(D, IDS.index(client) + 1, np.float32)


@pytest.fixture
def path(tmp_path):
    with Server(ca2fl(buffer_size=len(IDS)), np.zeros(D), num_clients=20, store=tmp_path / "store") as server:
        push_all(server, reversed(IDS), row, version=0)
    return tmp_path / "store"


def test_sqlite_gives_the_ids_back(path):
    with index(path) as connection:
        found = dict(connection.execute("SELECT typeof(client), count(*) FROM rows GROUP BY 1").fetchall())
        assert found == {"integer": 5, "blob": 2, "text": 8}
        query = "SELECT place FROM rows WHERE client = x'FFFFFFFFFFFFFFFF'"
        assert connection.execute(query).fetchall() == [(IDS.index(2**64 - 1),)]
    with Server.open(path) as server:
        assert server.rows.client_ids == IDS
        assert [type(client) for client in server.rows.client_ids] == [type(client) for client in IDS]
        for client in IDS:
            assert client in server.rows
            assert server.rows.row(client).tolist() == row(client).tolist()
        assert server.rows.row(np.uint64(2**64 - 1))[0] == IDS.index(2**64 - 1) + 1
        assert server.rows.row(2) is server.rows.row("0") is server.rows.row(2**63 + 1) is None
    assert store.check(path).sound
    assert store.info(path).clients == len(IDS)


def test_a_changed_row_of_each_keeps_its_place(path):
    """A commit replaces the entries of rows, and adds none."""
    with Server.open(path) as server:
        push_all(server, IDS, lambda client: row(client) + 1, version=1)
    with Server.open(path) as server:
        assert server.rows.client_ids == IDS
        assert [server.rows.row(client)[0] for client in IDS] == [i + 2.0 for i in range(len(IDS))]


def test_repair_lists_and_drops_ids_of_every_kind(path):
    lost = (-1, 2**63 - 1, "1,2", "日本")
    for client in lost:
        file, offset = place(path, client)
        damage(file, offset + 1000)
    found = store.check(path)
    assert (found.clients, found.damaged) == (len(IDS), lost)
    assert [line.partition("'s row")[0] for line in found.problems] == [f"client {client!r}" for client in lost]
    assert store.repair(path).dropped == lost
    assert list(store.info(path).repairs[0]["dropped"]) == list(lost)
    assert "rows dropped of clients -1, 9223372036854775807, '1,2', '日本'\n" in run("info", path).stdout
    with Server.open(path) as server:
        assert server.rows.client_ids == [client for client in IDS if client not in lost]


@pytest.mark.parametrize(
    ("clients", "name", "dtype"),
    [
        ([1, -1], "clients", np.int64),
        ([2**64 - 1, 0], "clients", np.uint64),
        (["日本", "1"], "clients", "<U2"),
        ([], "clients", np.int64),
        ([1, "1"], "clients_json", "<U3"),
        ([-1, 2**63], "clients_json", "<U19"),
        (["ann\0"], "clients_json", "<U11"),
        (None, "clients_json", "<U20"),
    ],
)
def test_exported_files_hold_the_ids(path, tmp_path, clients, name, dtype):
    expected = IDS if clients is None else clients
    assert store.export(path, tmp_path / "out.npz", clients) == expected
    with np.load(tmp_path / "out.npz") as file:
        assert sorted(file) == [name, "rows"]
        assert file[name].dtype == dtype
        read = [json.loads(text) for text in file[name].tolist()] if name == "clients_json" else file[name].tolist()
        assert read == expected
        assert [int(first) for first in file["rows"][:, 0]] == [IDS.index(client) + 1 for client in expected]


def test_export_takes_numbers_of_numpy(path, tmp_path):
    assert store.export(path, tmp_path / "out.npy", [np.uint64(2**64 - 1), np.str_("1")]) == [2**64 - 1, "1"]
    check_error(r"\[export\] client_id is 1.5, must be an int", store.export, path, tmp_path / "out.npy", [1.5])
    check_error(r"^\[export\] client 2 has no row", store.export, path, tmp_path / "out.npy", [2], error=StoreError)


@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("-1,0", [-1, 0]),
        ("18446744073709551615", [2**64 - 1]),
        ('"1,2","quo""te", böb', ["1,2", 'quo"te', "böb"]),
        ('""', [""]),
        ("日本,-9223372036854775808", ["日本", -(2**63)]),
    ],
)
def test_the_command_takes_ids_as_csv(path, tmp_path, text, clients):
    result = run("export", path, "--out", tmp_path / "out.npy", "--clients", text)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [int(first) for first in np.load(tmp_path / "out.npy")[:, 0]] == [IDS.index(one) + 1 for one in clients]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "1 names an int and a str in "),
        ("7", "client 7 has no row"),
        ("01", "client '01' has no row"),
        ("18446744073709551616", "client '18446744073709551616' has no row"),
        ("", "clients is '', must be ids between commas, quoted as in CSV"),
        ('"1', "clients is '\"1', must be ids between commas, quoted as in CSV"),
    ],
)
def test_the_command_refuses_other_ids(path, tmp_path, text, message):
    result = run("export", path, "--out", tmp_path / "out.npy", "--clients", text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: [export] {message}" in result.stderr
    assert not (tmp_path / "out.npy").exists()


def test_a_number_names_a_text_that_alone_has_a_row(tmp_path):
    with Server(ca2fl(buffer_size=1), np.zeros(3), num_clients=2, store=tmp_path / "store") as server:
        server.push(client="17", update=np.ones(3), version=0)
    result = run("export", tmp_path / "store", "--out", tmp_path / "out.npz", "--clients", "17")
    assert result.exit_code == 0
    assert np.load(tmp_path / "out.npz")["clients"].tolist() == ["17"]
