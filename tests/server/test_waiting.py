"""Whose arrivals wait, and which clients a server knows."""

import numpy as np

from afflux import Server
from afflux.rules import ca2fl, fedbuff, gsgm


def server(rule, **options):
    return Server(rule, np.zeros(3, np.float32), **options)


def push(to, client):
    return to.push(client=client, version=to.version, **{to.rule.kind: np.ones(3, np.float32)})


def test_waiting_has_the_arrivals_that_no_round_has_used():
    plain = server(fedbuff(buffer_size=3))
    joins = {push(plain, client).join: client for client in (7, 7)}
    assert plain.waiting == joins == {0: 7, 1: 7}
    plain.waiting.clear()  # a copy
    assert len(plain.waiting) == plain.arrivals_waiting == 2
    push(plain, "ann")
    assert plain.waiting == {}
    newest = server(ca2fl(buffer_size=2), num_clients=3)
    assert [push(newest, 7).status for _ in range(2)] == ["joined", "replaced"]
    assert newest.waiting == {1: 7}
    newest.discard()
    assert newest.waiting == {}


def test_clients_are_those_of_rows_and_of_the_pass(tmp_path):
    assert server(fedbuff(buffer_size=3)).clients == set()
    with server(ca2fl(buffer_size=2), num_clients=5, store=tmp_path / "store") as rows:
        for client in (7, "ann", 9):
            push(rows, client)
        assert (rows.clients, rows.waiting) == ({7, "ann"}, {2: 9})  # 9 has no row before its round
    with Server.open(tmp_path / "store") as again:
        assert (again.clients, again.waiting) == ({7, "ann"}, {2: 9})
    passes = server(gsgm(buffer_size=2), num_clients=3)
    for client in (1, 2, 1):
        status = push(passes, client).status
    assert status == "rejected"
    assert (passes.clients, passes.waiting) == ({1, 2}, {})
    passes.discard()
    assert (passes.clients, passes.waiting) == ({1, 2}, {})
