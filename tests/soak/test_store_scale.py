"""A store's work follows the clients that push, and not those that may come: bytes and calls, not time."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from afflux import Server
from afflux.rules import mf_ca2fl
from afflux.store.metadata import MOST_SEGMENTS, SEGMENT_BYTES
from conftest import FORKS
from crashes import result
from inside import index_of

pytestmark = pytest.mark.filterwarnings(FORKS)

M, D = 4, 100_000
#: The number of clients that push; `make scale` uses 20,000 of up to a million.
TOUCHED = int(os.environ.get("AFFLUX_TOUCHED", "400"))
ROUNDS = 20


def rule():
    return mf_ca2fl(buffer_size=M, bits=2)


ROW = rule().calibrate.codec.row_bytes(D)


def push(server, client):
    server.push(client=client, **{server.rule.kind: np.full(D, client % 7 + 1, np.float32)}, version=server.version)


def filled(path, num_clients, touched, tell):
    with Server(rule(), np.zeros(D, np.float32), num_clients=num_clients, store=path) as server:
        for k in range(touched):
            push(server, k * (num_clients // touched))


def blocks(path):
    """Bytes that the rows take on disk."""
    return sum(512 * file.stat().st_blocks for file in Path(path, "rows").rglob("*") if file.is_file())


def anonymous():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def rounds(path, num_clients, touched, tell):
    """Tells how many SQLite statements a round of an opened store takes, and anonymous memory that it leaves taken."""
    server, statements = Server.open(path, rule()), []
    for connection in (index_of(server)._reader, index_of(server)._writer):
        connection.set_trace_callback(statements.append)
    most, before = 0, 0
    for r in range(ROUNDS):
        statements.clear()
        for k in range(M):
            push(server, (r * M + k) % touched * (num_clients // touched))
        most = max(most, len(statements))
        before = before or anonymous()
    assert server.rows.nbytes == 8 * D + touched * ROW
    tell(most)
    tell(anonymous() - before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for its memory")
def test_work_and_memory_do_not_follow_the_number_of_clients(tmp_path):
    found = set()
    for num_clients in (TOUCHED, 10 * TOUCHED, 50 * TOUCHED):
        path = str(tmp_path / str(num_clients))
        result(partial(filled, path, num_clients, TOUCHED))
        statements, grown = map(int, result(partial(rounds, path, num_clients, TOUCHED)))
        found.add(statements)
        assert grown < 4 * D * M
        segment = max(SEGMENT_BYTES, num_clients * (ROW + 4096) // MOST_SEGMENTS)
        assert blocks(path) < (TOUCHED + 2 * M) * (ROW + 4096) + segment
    assert len(found) == 1
