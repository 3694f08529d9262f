"""Arrivals that bring no round nearer: the counts since the last round, and one warning about many of them."""

import logging

import numpy as np
import pytest

from afflux import Server
from afflux.rules import ca2fl, fedbuff, gsgm, zenopp
from conftest import push_all

ONES = np.ones(2)


def push(server, client, version=None):
    return push_all(server, [client], ONES, version=server.version if version is None else version)


def warnings(caplog, about="[Server]"):
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in texts if text.startswith(about)]


def test_four_clients_never_fill_a_buffer_of_ten(caplog):
    """CA2FL counts a client once in a buffer."""
    server = Server(ca2fl(buffer_size=10), ONES, num_clients=100)
    push_all(server, (i % 4 for i in range(4 + 99)), ONES)
    assert warnings(caplog) == []
    push(server, 3)
    assert warnings(caplog) == [
        "[Server] 100 arrivals since the last round of ca2fl have not filled its buffer any further: 100 replaced. It "
        "holds 4 of 10. A client has one place in a buffer (duplicates='latest'): a round needs 10 different clients"
    ]
    push_all(server, [3] * 3000, ONES)
    assert len(warnings(caplog)) == 1
    assert {status: n for status, n in server.counts_since_round.items() if n} == {"joined": 4, "replaced": 3100}
    push_all(server, range(10), ONES)
    assert (server.version, sum(server.counts_since_round.values())) == (1, 0)
    push_all(server, [0] * 1000, ONES)
    assert len(warnings(caplog)) == 1  # a further one is about ten times as many
    push(server, 0)
    assert warnings(caplog)[1].split(": ")[1].startswith("1,000 replaced.")


def many(options, rule, pushes):
    """A server, after pushes of (client, version)."""
    server = Server(rule, ONES, **options)
    for client, version in pushes:
        push(server, client, version)
    return server


@pytest.mark.parametrize(
    ("options", "rule", "pushes", "message"),
    [
        (
            {"duplicates": "reject"},
            fedbuff(buffer_size=2),
            [(7, 0)] * 21,
            "20 rejected. It holds 1 of 2. A client has one place in a buffer (duplicates='reject'): a round needs 2 d",
        ),
        (
            {"max_staleness": 1},
            fedbuff(buffer_size=1),
            [(7, None)] * 2 + [(7, 0)] * 10,
            "10 dropped. It holds 0 of 1. They are older than max_staleness=1",
        ),
        (
            {"duplicates": "latest"},
            fedbuff(buffer_size=2),
            [(7, 0)] * 2 + [(8, 0)] + [(7, 1)] + [(7, 0)] * 15 + [(7, 1)] * 5,
            "5 replaced, 15 superseded. It holds 1 of 2. A client has one place",
        ),
        (
            {"num_clients": 9},
            gsgm(buffer_size=2),
            [(7, 0)] * 21,
            "20 rejected. It holds 1 of 2. A client enters once in a pass. Clients that have not entered yet: 8",
        ),
    ],
)
def test_the_cause_is_named(options, rule, pushes, message, caplog):
    many(options, rule, pushes[:-1])
    assert warnings(caplog) == []
    many(options, rule, pushes)
    (text,) = warnings(caplog)
    assert message in text


def test_a_skipped_round_is_a_round_and_a_discard_is_none():
    server = Server(zenopp(), ONES)
    server.set_rule_vector("validation", -ONES)
    assert not push(server, 1).report.stepped
    assert sum(server.counts_since_round.values()) == 0
    server = Server(fedbuff(buffer_size=3), ONES)
    push(server, 1)
    server.discard()
    push(server, 2)
    assert server.counts_since_round["joined"] == 2
    server.flush()
    assert sum(server.counts_since_round.values()) == 0


def test_the_counts_start_anew_with_a_state(tmp_path):
    server = Server(fedbuff(buffer_size=3), ONES, store=tmp_path / "store")
    push(server, 1)
    with server:
        assert server.counts_since_round["joined"] == 1
    with Server.open(tmp_path / "store") as server:
        assert (server.counts["joined"], server.counts_since_round["joined"]) == (1, 0)


@pytest.mark.parametrize(
    ("status", "options", "pushes"),
    [
        ("superseded", {"duplicates": "latest"}, [(7, 0), (8, 0), (9, 0), (1, 1), (1, 0)]),
        ("rejected", {"duplicates": "reject"}, [(1, 0), (1, 0)]),
        ("dropped", {"max_staleness": 0}, [(7, 0), (8, 0), (9, 0), (1, 0)]),
        ("faulty", {"faults": "record"}, [(1, 9)]),
    ],
)
def test_the_first_push_whose_work_is_dropped_is_logged(status, options, pushes, caplog):
    server = many(options, fedbuff(buffer_size=3), pushes[:-1])
    assert warnings(caplog, "[push]") == []
    for _ in range(3):
        assert push(server, *pushes[-1]).status == status
    (text,) = warnings(caplog, "[push]")
    assert text.startswith(f"[push] a push of client 1 is {status}: ")
    assert server.counts[status] == 3


def test_an_expired_push_is_logged_once(caplog):
    server = Server(fedbuff(buffer_size=3), ONES)
    for _ in range(2):
        task = server.checkout(4)
        task.cancel()
        assert server.push(task=task, update=ONES).status == "expired"
    assert len(warnings(caplog, "[push] a push of client 4 is expired: the task is closed")) == 1
    other = Server(fedbuff(buffer_size=3), ONES)  # which does not know whose task it is
    assert other.push(task=task.id, update=ONES).status == "expired"
    assert len(warnings(caplog, "[push] a push is expired: the task is closed, or was never opened here")) == 1
