"""What a store says, and what it leaves behind: of pushes that fail, of constructions that fail, of servers that are
forgotten, of other rules.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.rules import ca2fl, fedbuff
from afflux.rules.staleness import Hinge
from afflux.store.lock import LOCK, Lock
from conftest import check_error, push_all, raising
from forged import forge_fact

D = 50


def push(server, client, value=1.0):
    return server.push(client=client, version=server.version, **{server.rule.kind: np.full(D, value, np.float32)})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


full = raising(StoreError, "[store] cannot write: database or disk is full")


def test_an_error_says_whether_the_push_has_joined(path, monkeypatch):
    server = Server(fedbuff(buffer_size=2), np.zeros(D), store=path)
    with monkeypatch.context() as failing:
        failing.setattr("afflux.store.index.Index.commit", full)
        push(server, 1)
        text = "disk is full; the push has joined: do not push it again"
        assert check_error(text, push, server, 2, error=StoreError).joined
        assert (server.joins, server.counts["joined"]) == (2, 2)
    push(server, 3)
    with monkeypatch.context() as failing:
        failing.setattr("afflux.store.store.Store.check", full)
        error = check_error("disk is full; the push has not joined", push, server, 4, error=StoreError)
        assert error.joined is False
        assert (server.version, server.joins, server.counts["joined"]) == (1, 3, 3)
    push(server, 4)
    assert server.version == 2
    server.close()
    assert check_error("is closed", push, server, 5, error=StoreError).joined is None


def test_a_row_that_cannot_be_read_has_not_joined(path):
    server = Server(ca2fl(buffer_size=1), np.zeros(D), num_clients=3, store=path)
    push(server, 1)
    server.close()
    server = Server.open(path)
    os.truncate(path / "rows/c/0/0", 0)
    assert check_error("the push has not joined", push, server, 1, error=StoreError).joined is False
    server.close(checkpoint=False)


@pytest.mark.parametrize(
    "where",
    [
        "afflux.store.creation.make_arrays",
        "afflux.store.creation.make_index",
        "afflux.store.creation.sync",
        "afflux.store.store.Index",
        "afflux.store.index.Index.facts",
        "afflux.store.segments.Segments.reserve",
        "afflux.store.index.Index.commit",
        "afflux.server.persistence._move_to",
    ],
)
@pytest.mark.parametrize("error", [StoreError("no"), OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [False, True])
def test_a_construction_that_fails_leaves_no_folder(where, error, there, tmp_path, monkeypatch):
    path = tmp_path / "new" / "store"
    if there:
        path.mkdir(parents=True)

    with monkeypatch.context() as patched:
        patched.setattr(where, raising(lambda: error))
        with pytest.raises((StoreError, OSError, KeyboardInterrupt)):
            Server(ca2fl(buffer_size=2), np.zeros(D), num_clients=5, store=path)
    assert [file.name for file in path.iterdir() if file.name != "lock"] == [] if there else not path.parent.exists()
    with Server(ca2fl(buffer_size=2), np.zeros(D), num_clients=5, store=path) as server:
        push(server, 1)


def test_a_construction_that_is_refused_leaves_what_is_there(path):
    with Server(fedbuff(buffer_size=2), np.zeros(D), store=path) as server:
        push(server, 1)
        check_error("not empty", Server, fedbuff(buffer_size=2), np.zeros(D), store=path, error=StoreError)
    with Server.open(path) as server:
        assert server.arrivals_waiting == 1
    other = path.with_name("other")
    other.mkdir()
    (other / "mine").touch()
    check_error("holds no store", Server, fedbuff(buffer_size=2), np.zeros(D), store=other, error=StoreError)
    assert (other / "mine").exists()


def test_a_forgotten_server_releases_its_folder(path):
    """And commits nothing: the arrival that waits is lost."""
    server = Server(fedbuff(buffer_size=2), np.zeros(D), store=path)
    push_all(server, range(3), np.ones(D))
    held, reference = server.pull(), weakref.ref(server)
    del server
    gc.collect()
    assert reference() is None
    with Server.open(path) as server:
        assert (server.joins, server.arrivals_waiting) == (2, 0)
        push_all(server, range(2), np.ones(D))
        assert server.version == 2
    assert held.params.tolist() == [1.0] * D, "what was pulled stays as it is"


def test_a_server_that_refers_to_itself_is_collected_too(path):
    seen = []
    servers = [
        Server(fedbuff(buffer_size=1), np.zeros(D), store=path, on_step=lambda _: seen.append(servers[0].version))
    ]
    push(servers[0], 1)
    assert seen == [1]
    reference = weakref.ref(servers[0])
    servers.clear()
    gc.collect()
    assert reference() is None
    Server.open(path).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_that_forgets_releases_nothing(path):
    code = f"""
import gc, os
import numpy as np
from afflux import Server, StoreError
from afflux.rules import fedbuff
server = Server(fedbuff(buffer_size=1), np.zeros({D}), store={str(path)!r})
child = os.fork()
if not child:
    del server
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
server.push(client=1, version=0, update=np.ones({D}, np.float32))
try:
    Server.open({str(path)!r})
except StoreError as error:
    print("in use" in str(error), server.version)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True 1\n", 0), done.stderr


def test_opening_with_another_rule_says_what_changes(path, caplog):
    Server(fedbuff(buffer_size=2), np.zeros(D), store=path).close()
    with caplog.at_level(logging.INFO, "afflux"):
        Server.open(path).close()
        Server.open(path, fedbuff(buffer_size=2)).close()
        assert caplog.messages == []
        Server.open(path, fedbuff(buffer_size=3, server_lr=0.5)).close()
        assert caplog.messages == [
            f"[open] {path}: the rule that was given changes buffer_size from 2 to 3; step.lr from 1.0 to 0.5"
        ]
        Server.open(path, fedbuff(buffer_size=3, server_lr=0.5, staleness=Hinge(3.0, 1.0))).close()
    assert "weigh.law.part from 'polynomial' to 'hinge'" in caplog.messages[-1]


def test_a_store_of_before_the_word_none_has_the_same_rule(path, caplog):
    Server(fedbuff(buffer_size=2), np.zeros(D), store=path).close()
    forge_fact(path, "rule", lambda rule: json.loads(json.dumps(rule).replace('"none"', "null")))
    assert store.info(path).rule_config["calibrate"]["codec"] is None
    with caplog.at_level(logging.INFO, "afflux"):
        Server.open(path, fedbuff(buffer_size=2)).close()
    assert caplog.messages == []


def test_a_lock_that_was_removed_while_it_was_waited_for(path):
    path.mkdir()
    first = Lock(path)
    (path / LOCK).unlink()
    check_error("has vanished", first.refuse_removed, path, error=StoreError)
    (path / LOCK).touch()
    check_error("was replaced", first.refuse_removed, path, error=StoreError)
    first.close()
