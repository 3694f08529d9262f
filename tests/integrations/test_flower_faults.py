"""Replies of no use: wrong, lost, late or repeated ones, and nodes that have gone."""

import random
import time

import numpy as np
import pytest

from afflux.rules import fedbuff, wkafl
from conftest import check_error
from flower_grid import Error, FakeGrid, Message, adds, bad, flat, initial, said, strategy

FAULTY = ["bytes", "header", "many", "many metrics", "no bytes", "objects", "no arrays", "list"]
FAULTS = {"error": "failed", **dict.fromkeys(FAULTY, "faulty")}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_reply_that_is_of_no_use_changes_nothing_but_a_count(kind):
    """With one node that trains, and beside it another one, the bits are those of the node alone."""
    alone = strategy(fedbuff(buffer_size=2), concurrency=1)
    first = alone.start(FakeGrid({5: adds(0.5)}), initial(), num_rounds=3)
    rule, grid = fedbuff(buffer_size=2), FakeGrid({5: adds(0.5), 2**63: bad(kind)}, seed=1)
    own = strategy(rule, concurrency=2)
    result = own.start(grid, initial(), num_rounds=3)
    assert flat(result.arrays).tobytes() == flat(first.arrays).tobytes()
    counts = {**own.server.counts, **own.lost}
    assert counts.pop(FAULTS[kind]) > 0
    assert counts.pop("joined") == 6
    assert not any(counts.values())
    if FAULTS[kind] == "faulty":
        assert own.server.faults[0].client_id == 2**63
        assert own.server.faults[0].reason


def test_lost_late_and_repeated_replies():
    late, seen = [], []

    class Grid(FakeGrid):
        """The first reply of node 7 comes after its time is over, those of node 5 come twice."""

        def pull_messages(self, keys):
            time.sleep(0.001)
            replies = super().pull_messages(keys)
            for reply in replies:
                if reply.metadata.src_node_id == 7 and not late:
                    late.append(reply)
            kept = [reply for reply in replies if reply not in late]
            again = [reply for reply in seen[-1:] if random.random() < 0.5]
            seen.extend(reply for reply in kept if reply.metadata.src_node_id == 5)
            if late and own.lost["overdue"] >= 2:
                again.append(late[0])
            return kept + again

    random.seed(0)
    grid = Grid({5: adds(0.5), 7: adds(0.5), 9: bad("lost")})
    own = strategy(fedbuff(buffer_size=2), concurrency=3, timeout=0.05, poll_interval=0.001)
    result = own.start(grid, initial(), num_rounds=100)
    assert own.lost["overdue"] >= 2
    assert own.lost["unknown"] > 0
    assert own.server.counts["joined"] == 200
    assert own.server.counts["faulty"] == 0
    assert own.server.tasks == ()
    assert np.isfinite(flat(result.arrays)).all()


def test_a_run_with_useless_replies_alone_ends():
    start = strategy(fedbuff(), max_failures=3, retry_after=0.001).start
    text = r"none of 2 clients is of use: .* 3 times in a row or more, .*(memory|non-finite)"
    check_error(text, start, FakeGrid({1: bad("error"), 2: bad("nan")}), initial(), error=RuntimeError)


@pytest.mark.parametrize("key", ["", None])
def test_a_message_to_a_node_that_has_gone_leaves_no_task(key):
    class Grid(FakeGrid):
        def push_messages(self, messages):
            (message,) = messages
            return [key] if message.metadata.dst_node_id == 2 else super().push_messages([message])

    own = strategy(fedbuff(buffer_size=2))
    own.start(Grid({1: adds(1.0), 2: adds(1.0)}), initial(), num_rounds=5)
    assert own.server.tasks == ()
    assert own.server.counts["joined"] == 10
    assert own.lost["failed"] > 0


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("all_fails", [False, True])
def test_a_grid_that_fails_ends_the_run_and_is_no_fault_of_a_node(concurrency, all_fails):
    """A single message that cannot be read is the fault of its node, unless the Grid does not answer at all."""

    class Grid(FakeGrid):
        def pull_messages(self, keys):
            raise ConnectionError("the link is down")

        def get_node_ids(self):
            if all_fails and self.sent:
                raise ConnectionError("the link is down")
            return super().get_node_ids()

    own = strategy(fedbuff(buffer_size=2), concurrency=concurrency, max_failures=1)
    alone = concurrency == 1 and not all_fails
    with pytest.raises(RuntimeError if alone else ConnectionError, match="the link is down"):
        own.start(Grid({1: adds(1.0), 2: adds(1.0)}), initial())
    assert own.lost["failed"] == (2 if alone else 0)


def test_the_reason_of_an_unreadable_reply_is_its_own():
    nodes = {1: said("ann"), 2: adds(1.0), 3: bad("no arrays")}
    own = strategy(fedbuff(buffer_size=1), client_key="partition", concurrency=3)
    own.start(FakeGrid(nodes), initial(), num_rounds=5)
    reasons = {fault.client_id: fault.reason for fault in own.server.faults}
    assert reasons[2].endswith("[client_key] nothing in the reply has the name 'partition'")
    assert reasons[3].startswith("[push] client 3's model: the reply holds 0 ArrayRecords")


def test_a_gradient_without_its_learning_rate_is_faulty():
    """The operator's mistake ends the run, see above; that of one node does not stop the others."""
    good = adds(1.0, **{"client-lr": 0.1, "local-steps": 5})
    nodes = {1: good, 2: good, 3: adds(1.0)}
    own = strategy(wkafl(buffer_size=2, server_lr=0.5), concurrency=1, seed=2)
    own.start(FakeGrid(nodes), initial(), num_rounds=6)
    assert own.server.counts["joined"] == 12
    assert own.server.counts["faulty"] == len(own.server.faults) > 0
    assert all("lacks client_lr or local_steps" in fault.reason for fault in own.server.faults)


def test_a_node_that_does_not_reply_is_overdue_before_its_message_ends():
    """The SuperLink answers for the node when the message ends, and such an answer would count as failed."""

    class Link(FakeGrid):
        def pull_messages(self, keys):
            ended = [each for each in self.sent if time.time() >= each.metadata.created_at + each.metadata.ttl]
            errors = [Message(Error(4, "expired"), reply_to=each) for each in ended if each.metadata.message_id in keys]
            return [*super().pull_messages(keys), *errors]

    own = strategy(fedbuff(buffer_size=2), timeout=0.02, poll_interval=0.001)
    own.start(Link({5: adds(0.5), 9: bad("lost")}), initial(), num_rounds=60)
    assert own.lost["overdue"] > 0
    assert own.lost["failed"] == 0
