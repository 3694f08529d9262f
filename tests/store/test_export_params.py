"""Params of a store as files that NumPy reads."""

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.rules import fedbuff
from conftest import check_error
from damage import damage
from forged import forge_fact
from nine_rows import run

MODEL = {"body": {"w": np.full((3, 2), 2.0, np.float32)}, "bias": np.zeros(4, np.float32), "steps": np.array(3)}


@pytest.fixture
def path(tmp_path):
    with Server(fedbuff(buffer_size=1), MODEL, store=tmp_path / "store") as server:
        server.push(
            client=1, version=0, update={"body": {"w": np.ones((3, 2))}, "bias": np.ones(4)}, buffers=np.array([7.0])
        )
    return tmp_path / "store"


def test_params_by_the_command(path, tmp_path):
    told = run("export", path, "--params", "--out", tmp_path / "model.npz")
    assert (told.exit_code, told.stdout) == (0, f"wrote params of version 1 to {tmp_path}/model.npz\n")
    with np.load(tmp_path / "model.npz") as model:
        found = {name: array.tolist() for name, array in model.items()}
    assert found == {"body.w": [[3.0] * 2] * 3, "bias": [1.0] * 4, "steps": 7.0}
    assert run("export", path, "--params", "--out", tmp_path / "model.npy").exit_code == 0
    flat = np.load(tmp_path / "model.npy")
    with Server.open(path) as server:
        assert flat.tobytes() == server.params.tobytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.npy", "model.npz", "store"]


def test_a_flat_model(tmp_path):
    Server(fedbuff(), np.arange(3.0), dtype="float64", store=tmp_path / "store").close()
    assert store.export_params(tmp_path / "store", tmp_path / "model.npz") == 0
    with np.load(tmp_path / "model.npz") as model:
        assert {name: array.tolist() for name, array in model.items()} == {"params": [0.0, 1.0, 2.0]}


def test_what_is_refused(path, tmp_path):
    for arguments, message in [
        (["--params", "--clients", "3", "--out", "x.npy"], "give --clients for rows, or --params"),
        (["--params", "--out", "x.txt"], "must end in .npy or .npz"),
        (["--params", "--out", "/nowhere/x.npy"], "cannot write /nowhere/x.npy"),
        (["--out", "x.npy"], "has no rows: fedbuff keeps none"),
    ]:
        told = run("export", path, *arguments)
        assert told.exit_code == 2
        assert message in told.stderr
    damage(path / "params/c/0/0", 4)
    damage(path / "params/c/0/0", 64 + 4)
    check_error("does not agree with its checksum", store.export_params, path, tmp_path / "x.npy", error=StoreError)
    assert not (tmp_path / "x.npy").exists()


def test_names_that_would_be_paths(path, tmp_path):
    """Programs that unpack the file would write elsewhere."""

    def renamed(server):
        layout = server["layout"]
        layout["fields"][0][0] = "../../victim"
        layout["nesting"]["dict"][0][1] = {"dict": [["w", "../../victim"]]}
        return server

    forge_fact(path, "server", renamed)
    check_error(r"cannot be a name in a \.npz", store.export_params, path, tmp_path / "x.npz", error=StoreError)
    assert not (tmp_path / "x.npz").exists()
    store.export_params(path, tmp_path / "x.npy")


def test_info_explains_its_counts(tmp_path):
    with Server(fedbuff(buffer_size=2), np.zeros(3), max_staleness=0, store=tmp_path / "store") as server:
        for client, version, value in [(1, 0, 1.0), (2, 0, 1.0), (3, 0, 1.0), (4, 1, np.nan)]:
            try:
                server.push(client=client, version=version, update=np.full(3, value))
            except ValueError:
                assert client == 4
        server.push(client=5, version=1, update=np.ones(3), num_examples=0)
    (line,) = (line for line in run("info", tmp_path / "store").stdout.splitlines() if line.startswith("pushes"))
    assert line.split(maxsplit=1)[1] == (
        "2 joined (in a step, or waiting), 1 dropped (older than max_staleness); not counted there: 1 empty (no "
        "examples), 1 refused (with an error)"
    )
