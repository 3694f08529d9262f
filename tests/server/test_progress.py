"""Arrivals that bring no round nearer: the counts since the last round, and one warning about many of them."""

import logging

import numpy as np
import pytest

from afflux import Server
from afflux.rules import ca2fl, fedbuff, gsgm, zenopp

ONES = np.ones(2)


def push(server, client, version=None):
    return server.push(
        client=client, version=server.version if version is None else version, **{server.rule.kind: ONES}
    )


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_four_clients_never_fill_a_buffer_of_ten(caplog):
    """CA2FL counts a client once in a buffer."""
    server = Server(ca2fl(buffer_size=10), ONES, num_clients=100)
    for i in range(4 + 99):
        push(server, i % 4)
    assert warnings(caplog) == []
    push(server, 3)
    assert warnings(caplog) == [
        "[Server] 100 arrivals since the last round of ca2fl have not filled its buffer any further: 100 replaced. It "
        "holds 4 of 10. A client has one place in a buffer (duplicates='latest'): a round needs 10 different clients"
    ]
    for _ in range(3000):
        push(server, 3)
    assert len(warnings(caplog)) == 1
    assert {status: n for status, n in server.counts_since_round.items() if n} == {"joined": 4, "replaced": 3100}
    for client in range(10):
        push(server, client)
    assert (server.version, sum(server.counts_since_round.values())) == (1, 0)
    for _ in range(1000):
        push(server, 0)
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
            "20 deferred. It holds 1 of 2. A client enters once in a pass. Clients that have not entered yet: 8",
        ),
        (
            {"num_clients": 9, "max_deferred": 3},
            gsgm(buffer_size=2),
            [(7, 0)] * 21,
            "17 rejected, 3 deferred. It holds 1 of 2. A client enters once in a pass. Clients that have not entered "
            "yet: 8; 3 arrivals wait (max_deferred)",
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
