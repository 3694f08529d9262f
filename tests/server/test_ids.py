"""Client ids of every kind in one server: ints in 64 bits, signed and unsigned, and texts, in one canonical order; the
same bits in any order of arrival, and through a store, a saved state and a replay.
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import AffluxError, Server, replay, store
from afflux.rules import fedbuff, gsgm, mf_ca2fl
from conftest import bits, check_error, push_all
from crashes import MEMORY
from inside import without_fast_path

D, M = 70, 3
INTS = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
TEXTS = ["", "0", "1", "-1", "1,2", 'quo"te', "böb", "\0", "1\0", "日本"]
ids = st.lists(
    st.one_of(st.sampled_from(INTS + TEXTS), st.integers(-(2**63), 2**64 - 1), st.text(max_size=3)),
    min_size=2 * M,
    max_size=2 * M,
    unique=True,
)


@pytest.mark.parametrize("fast", [True, False])
def test_ids_have_at_most_1024_bytes(fast):
    """On both paths of a push; the error has the beginning of the id."""
    server = made(fedbuff(buffer_size=M))
    if not fast:
        without_fast_path(server)
    for client in ("i" * 1024, "é" * 512):
        assert server.push(client=client, update=np.ones(D), version=0).status == "joined"
    for client in ("i" * 1025, "é" * 513, "é" * 1024, "i" * 5_000_000):
        for call in (
            partial(server.push, client=client, update=np.ones(D), version=0),
            partial(server.checkout, client),
        ):
            with pytest.raises(AffluxError, match=r"is '(iii|ééé).*\.\.\., must have at most 1024 bytes") as caught:
                call()
            assert len(str(caught.value)) < 200
    assert server.counts["joined"] == 2
    assert server.tasks == ()


@pytest.mark.parametrize("place", ["waiting", "row_ids", "passed", "log"])
def test_a_state_has_ids_that_a_push_takes(place):
    rule = gsgm(buffer_size=2) if place == "passed" else mf_ca2fl(buffer_size=2)
    server = Server(rule, np.zeros(D), num_clients=9, log=True)
    push_all(server, ("a", "b", "c"), np.ones(D), version=0)
    state, short = server.state_dict(), '"c"' if place == "waiting" else '"a"'
    entries = json.dumps(state["meta"][place])
    assert short in entries
    state["meta"][place] = json.loads(entries.replace(short, json.dumps("i" * 1025)))
    check_error(r"\[load_state_dict\] client_id is .* at most 1024 bytes", server.load_state_dict, state)
    state["meta"][place] = json.loads(entries.replace(short, json.dumps("i" * 1024)))
    server.load_state_dict(state)


@pytest.mark.parametrize("client", ["i" * 1000, "\x1b[2J" * 200, "\U000e0001" * 200])
def test_messages_have_a_short_printable_form_of_an_id(client):
    server = Server(fedbuff(buffer_size=2), np.zeros(D), faults="record")
    receipt = server.push(client=client, update=np.full(D, np.nan), version=0)
    assert receipt.status == "faulty"
    bad = [{"loss": "x"}, {"version": 9}, {"num_examples": -1}, {"client_lr": "x"}, {"update": np.ones(D + 1)}]
    reasons = [server.push(**{"client": client, "update": np.ones(D), "version": 0, **one}).reason for one in bad]
    for text in (receipt.reason, *reasons, repr(server.checkout(client))):
        assert text.isprintable()
        assert len(text) < 200


def in_order(clients):
    """Ints by value, then texts by code point."""
    texts = [client for client in clients if isinstance(client, str)]
    return sorted({*clients} - {*texts}) + sorted(texts, key=lambda text: [ord(character) for character in text])


def made(rule, **options):
    return Server(rule, np.ones(D, np.float32), num_clients=2 * M, duplicates="both", log=True, **options)


def push(server, client, number):
    vector = np.random.default_rng(number).standard_normal(D).astype(np.float32)
    return server.push(client=client, update=vector, version=max(0, server.version - number % 2), loss=0.5).report


def facts(server):
    """All bits that depend on the ids, without those that depend on the order of arrival within a buffer."""
    rows = server.rows
    kept = {} if rows is None else {client: bits(rows.row(client)) for client in rows.client_ids}
    return bits(server.params), kept, None if rows is None else (list(kept), bits(rows.sum))


@pytest.mark.parametrize("rule", [mf_ca2fl(buffer_size=M, bits=2), fedbuff(buffer_size=M)], ids=["mf_ca2fl", "fedbuff"])
@settings(max_examples=25, deadline=None)
@given(clients=ids, order=st.permutations(range(M)), cut=st.integers(0, 3 * M), seed=st.integers(0, 9))
def test_any_mix_of_ids_gives_the_same_bits(rule, clients, order, cut, seed):
    """Three rounds: of all clients, and of some once more."""
    pushes = list(enumerate([*clients, *clients[1 : 1 + M]]))
    straight, permuted = made(rule, seed=seed), made(rule, seed=seed)
    for i, (number, client) in enumerate(pushes):
        report = push(straight, client, number)
        other = push(permuted, *reversed(pushes[i - i % M + order[i % M]]))
        if report is not None:
            expected = in_order([client for _, client in pushes[i - M + 1 : i + 1]])
            assert list(report.client_ids) == list(other.client_ids) == expected
    assert facts(permuted) == facts(straight)
    assert straight.rows is None or len(straight.rows) == 2 * M

    vectors = [np.random.default_rng(number).standard_normal(D).astype(np.float32) for number, _ in pushes]
    again = replay(straight.log, made(rule, seed=seed), lambda join: vectors[join.number])
    assert facts(again) == facts(straight)

    first, restored = made(rule, seed=seed), made(rule, seed=seed)
    for number, client in pushes[:cut]:
        push(first, client, number)
    state = first.state_dict()
    restored.load_state_dict({**state, "meta": json.loads(json.dumps(state["meta"]))})
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder, "store")
        with made(rule, seed=seed, store=path) as there:
            for number, client in pushes[:cut]:
                push(there, client, number)
        with Server.open(path) as opened:
            for number, client in pushes[cut:]:
                push(restored, client, number)
                push(opened, client, number)
            assert facts(opened) == facts(restored) == facts(straight)
            assert opened.log == restored.log == straight.log
        assert store.check(path).sound


def test_an_int_and_its_text_are_two_clients():
    server = Server(mf_ca2fl(buffer_size=2), np.zeros(D), num_clients=2)
    first, second = (server.push(client=client, update=np.ones(D), version=0) for client in (7, "7"))
    assert (first.status, second.report.client_ids) == ("joined", (7, "7"))
    assert server.push(client=np.str_("7"), update=np.ones(D), version=1).status == "joined"
    assert server.push(client=np.uint64(7), update=np.ones(D), version=1).report.client_ids == (7, "7")
