"""Stores, states and logs of each released version give the bits that they had there."""

import json
import tarfile

import numpy as np
import pytest

import forged
import frozen_files
from afflux import Server, StoreError, replay, store
from conftest import check_error

ARCHIVES = sorted(frozen_files.FOLDER.glob("*.tar.gz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def files(request, tmp_path):
    """The folder of a version's files, and its digests."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path, json.loads((tmp_path / "digests.json").read_text())


def state_in(folder):
    with np.load(folder / "arrays.npz") as arrays:
        return {"meta": json.loads((folder / "meta.json").read_text()), "arrays": dict(arrays)}


def test_there_are_files_of_the_first_version():
    assert "0.1.0.tar.gz" in [path.name for path in ARCHIVES]


def test_a_store_opens_and_goes_on_to_the_same_bits(files):
    folder, digests = files
    assert store.check(folder / "store").sound
    with Server.open(folder / "store", num_threads=1) as server:
        # A push that arrived after the last commit is not in the store: it comes again.
        assert frozen_files.push(server, 25 - server.joins) == digests["saved"]
        assert frozen_files.push(server, 11) == digests["continued"]


def test_an_option_that_servers_no_longer_have_must_have_its_default(files):
    folder, _ = files
    stored = []
    forged.forge_fact(folder / "store", "options", lambda options: stored.append(options) or options)
    assert stored[0]["check_versions"] is False
    forged.forge_fact(folder / "store", "options", lambda options: options | {"check_versions": True})
    check_error("store has the option check_versions=True", Server.open, folder / "store", error=StoreError)


def test_a_state_loads_and_its_log_replays_to_the_same_bits(files):
    folder, digests = files
    server = frozen_files.loaded(state_in(folder))
    assert frozen_files.digest_of(server) == digests["saved"]
    again = replay(server.log, frozen_files.make(), lambda join: frozen_files.POOL[join.number % 15])
    assert again.params.tobytes() == server.params.tobytes()
    assert frozen_files.push(server, 11) == digests["continued"]


def test_vectors_that_were_not_copied(files):
    """Those of push(copy=False): a log may name them, and none may wait in a state: no push has checked it."""
    folder, digests = files
    state = state_in(folder)
    joins = [entry for entry in state["meta"]["log"] if entry[7:8] == [False]]
    assert len(joins) == 25
    for entry in joins:
        entry[7] = True
    assert frozen_files.digest_of(frozen_files.loaded(state)) == digests["saved"]
    state["meta"]["waiting"][0][4] = None
    check_error("arrival 0 has norm nan", frozen_files.loaded, state)


def test_other_bits_are_noticed(files):
    folder, digests = files
    state = state_in(folder)
    state["arrays"]["params"][0] += 1
    assert frozen_files.digest_of(frozen_files.loaded(state)) != digests["saved"]
