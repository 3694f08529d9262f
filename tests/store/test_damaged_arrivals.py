"""Waiting arrivals whose vectors are damaged: the error names the remedy, and `repair` drops them by name."""

import os
import shutil

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.rules import ca2fl, fedbuff, gsgm
from conftest import check_error, check_raises
from damage import damage
from nine_rows import run

D = 5000
RULES = {
    "fedbuff": (fedbuff(buffer_size=4), {"log": True}),
    "ca2fl": (ca2fl(buffer_size=4), {"num_clients": 9}),
    "gsgm": (gsgm(buffer_size=4), {"num_clients": 9}),
}


def push(server, client):
    return server.push(client=client, version=server.version, **{server.rule.kind: np.full(D, client, np.float32)})


@pytest.fixture(params=RULES)
def path(request, tmp_path):
    rule, options = RULES[request.param]
    with Server(rule, np.zeros(D), store=tmp_path / "store", **options) as server:
        for client in (1, 2, 3, 4, 5, 6):
            push(server, client)
        server.push(client="ann" if request.param != "gsgm" else 7, version=1, **{server.rule.kind: np.ones(D)})
        assert server.arrivals_waiting == 3
    return tmp_path / "store"


def harm(path, slot):
    damage(path / "arrivals/c/0/0", slot * 5008 * 4 + 500) if path else None


def waiting(path):
    with Server.open(path) as server:
        return server.arrivals_waiting


def test_a_damaged_arrival_is_dropped_by_name(path):
    sound = shutil.copytree(path, path.with_name("sound"))
    harm(path, 1)
    check_error(rf"arrivals is damaged: slot 1 .*repair {path}`.*drops the arr", Server.open, path, error=StoreError)
    health = store.check(path)
    assert (health.arrivals, health.mendable, health.keeps_bits, health.damaged) == ((6,), True, False, ())
    assert health.problems[0].startswith("client 6's waiting arrival: ")
    told = run("check", path)
    assert told.exit_code == 1
    assert "and 1 waiting arrival lost; `afflux store repair" in told.stdout
    told = run("repair", path, input="y\n")
    assert "drop 1 waiting arrival? Later bits will differ" in told.stdout
    assert told.stdout.splitlines()[-1].startswith("repaired: the waiting arrivals of clients 6 dropped")
    assert store.check(path).sound
    assert (waiting(sound), waiting(path)) == (3, 2)
    assert "arrivals dropped of clients 6" in run("info", path).stdout
    with Server.open(path) as server:
        before = server.version
        push(server, 6)  # again
        push(server, 8)
        assert server.version == before + 1
    assert store.check(path).sound


def test_all_of_a_file(path):
    """That is truncated, or missing with its folder."""
    copy = shutil.copytree(path, path.with_name("copy"))
    os.truncate(path / "arrivals/c/0/0", 100)
    shutil.rmtree(copy / "arrivals")
    clients = [client for client in store.check(path).arrivals]
    assert len(clients) == store.info(path).waiting >= 3
    for folder in (path, copy):
        check_raises(StoreError, Server.open, folder)
        done = store.repair(folder)
        assert (list(done.arrivals), done.dropped) == (clients, ())
        assert store.check(folder).sound
        assert waiting(folder) == 0
        with Server.open(folder) as server:
            for client in (0, 6, 8, 7):
                push(server, client)


def test_no_more_than_was_agreed_is_dropped(path):
    harm(path, 1)
    agreed = store.check(path)
    harm(path, 2)
    before = (path / "index.sqlite").read_bytes()
    check_error("arrivals are damaged that were not when it was", store.repair, path, agreed=agreed, error=StoreError)
    assert (path / "index.sqlite").read_bytes() == before
    assert store.repair(path).arrivals[0] == 6


def test_rows_and_arrivals_at_once(tmp_path):
    rule, options = RULES["ca2fl"]
    path = tmp_path / "store"
    with Server(rule, np.zeros(D), store=path, **options) as server:
        for client in (1, 2, 3, 4, 5):
            push(server, client)
    harm(path, 0)
    damage(path / "rows/c/0/0", 500)
    done = store.repair(path)
    assert (len(done.dropped), done.arrivals) == (1, (5,))
    assert store.check(path).sound
    assert store.info(path).clients == 3
    assert store.info(path).repairs[0]["arrivals"] == [5]
