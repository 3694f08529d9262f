"""`afflux.store.export` and its command: rows as plain arrays."""

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.rules import ca2fl
from conftest import bits, check_error, push_all
from nine_rows import ORDER, damage_row, run, vector


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
        push_all(server, rows, rows.__getitem__, version=0)
    assert store.export(tmp_path / "s", tmp_path / "out.npz", ["böb"]) == ["böb"]
    with np.load(tmp_path / "out.npz") as file:
        assert file["clients"].tolist() == ["böb"]
        assert bits(file["rows"]) == bits(rows["böb"])


def test_export_refuses(path, tmp_path):
    out = tmp_path / "out.npy"
    out.write_text("mine")
    damage_row(path, 5)
    for clients, message in ([[3, 20], "client 20 has no row"], [None, "client 5's row in .* is damaged"]):
        check_error(message, store.export, path, out, clients, error=StoreError)
    check_error(r"must end in \.npy or \.npz", store.export, path, tmp_path / "out.csv", error=StoreError)
    check_error(r"cannot write .*nowhere", store.export, path, tmp_path / "nowhere" / "out.npy", error=StoreError)
    assert out.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_export_command(path, tmp_path):
    result = run("export", path, "--out", tmp_path / "out.npz", "--clients", "8,3")
    assert (result.exit_code, result.stdout) == (0, f"wrote 2 rows to {tmp_path / 'out.npz'}\n")
    assert np.load(tmp_path / "out.npz")["clients"].tolist() == [8, 3]
    result = run("export", path, "--out", tmp_path / "out.npy", "--clients", "ann")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "client 'ann' has no row" in result.stderr
