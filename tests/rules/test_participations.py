"""Rules that limit participations: a client is in at most K rounds, whatever happens to the server."""

import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import BlockedError, Join, Needs, Rule, Server, StoreError, Weights, replay
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules import ca2fl, dp_fedbuff, fedbuff, from_config
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.store import repair
from conftest import bits, check_error, push_all
from damage import damage
from own_parts import Says

D, MOST = 2 * 65536 + 5, 2
REASON = "was in as many rounds as the rule allows"
MOVES = st.one_of(
    *[st.tuples(st.just("push"), st.integers(0, 5))] * 8,
    st.tuples(st.just("step"), st.lists(st.integers(0, 5), max_size=4)),
    st.tuples(st.sampled_from(["flush", "discard", "reopen", "crash"])),
)


def rule_of(most, buffer_size=3):
    return dp_fedbuff(buffer_size=buffer_size, participations=most)


class Played:
    """A server, and the clients of its rounds as its reports name them."""

    def __init__(self, folder, plane, duplicates):
        self.folder, self.plane, self.lives, self.reports = folder, plane, 0, []
        options = {"plane": plane and plane(), "duplicates": duplicates, "log": True}
        self.options = {name: option for name, option in options.items() if option is not None}
        first = np.zeros(D, np.float32)
        store = None if folder is None else self.path
        self.server = Server(rule_of(MOST), first, store=store, on_step=self.reports.append, **self.options)

    @property
    def path(self):
        return self.folder / f"store{self.lives}"

    def rounds(self):
        """The number of rounds of each client."""
        return Counter(client for report in self.reports for client in report.client_ids)

    def blocked(self, client, before):
        return before[client] >= MOST

    def push(self, client):
        before, number = self.rounds(), self.server.joins
        blocked = self.blocked(client, before)
        receipt = self.server.push(client=client, version=self.server.version, update=update(number))
        assert (receipt.reason == REASON) == blocked == (receipt.status == "rejected" and bool(receipt.reason))
        if blocked:
            check_error(
                f"client {client} was in as many rounds as dp_fedbuff allows: {MOST}",
                self.server.checkout,
                client,
                error=BlockedError,
            )

    def step(self, clients):
        before, number = self.rounds(), self.server.joins
        pushes = [(client, self.server.version, update(number + i)) for i, client in enumerate(clients)]
        receipts, _ = self.server.step(pushes)
        assert [receipt.reason == REASON for receipt in receipts] == [self.blocked(c, before) for c in clients]

    def flush(self):
        self.server.flush()

    def discard(self):
        self.server.discard()

    def reopen(self):
        if self.folder is None:
            self.server.load_state_dict(self.server.state_dict())
        else:
            self.server.close()
            self.opened()

    def crash(self):
        """Only the last commit is left, that of the round that was made last."""
        if self.folder is None:
            return
        before, self.lives = self.path, self.lives + 1
        shutil.copytree(before, self.path)
        self.server.close(checkpoint=False)
        self.opened()

    def opened(self):
        plane = {"plane": self.plane()} if self.plane else {}
        self.server = Server.open(self.path, on_step=self.reports.append, **plane)

    def same(self):
        rounds = self.rounds()
        assert self.server.entered == {client for client in rounds if self.blocked(client, rounds)}
        passed = self.server.state_dict()["meta"]["passed"]
        assert Counter(passed) == rounds  # each once for each round, also after it was replaced


def update(number):
    return np.full(D, 0.5 ** (number % 20), np.float32)


@pytest.mark.parametrize("plane", [None, lambda: ShardedPlane(3)])
@pytest.mark.parametrize("duplicates", ["latest", "reject"])
@settings(max_examples=12, deadline=None)
@given(moves=st.lists(MOVES, min_size=10, max_size=40), stored=st.booleans())
def test_random_schedules(tmp_path_factory, plane, duplicates, moves, stored):
    played = Played(tmp_path_factory.mktemp("played") if stored else None, plane, duplicates)
    for move, *facts in moves:
        getattr(played, move)(*facts)
        played.same()
    log, params = played.server.log, bits(played.server.params)
    joins = [entry.number for entry in log if isinstance(entry, Join)]
    again = Server(rule_of(MOST), np.zeros(D, np.float32), **{**played.options, "plane": plane and plane()})
    replay(log, again, lambda join: update(join.number))
    assert (again.log, bits(again.params), joins) == (log, params, [*range(len(joins))])
    assert again.entered == played.server.entered
    if stored:
        played.server.close()


def push(server, *clients):
    receipt = push_all(server, clients, np.ones(3))
    return receipt.status, receipt.reason


def test_a_replaced_arrival_counts_once_and_a_discarded_one_does_not():
    server = Server(rule_of(1, 2), np.zeros(3))
    push(server, "ann", "ann")
    assert (server.discard(), server.entered) == (1, set())
    push(server, "ann", "ann", "bob")
    assert (server.version, server.counts["replaced"], server.entered) == (1, 2, {"ann", "bob"})
    assert push(server, "ann") == ("rejected", REASON)
    task = server.checkout("cid")
    push(server, "cid", "dan")
    receipt = server.push(task=task, update=np.ones(3))  # of a client that was free when it began
    assert (receipt.status, receipt.reason, receipt.step, server.tasks) == ("rejected", REASON, None, ())


def test_the_limit_counts_rounds_that_the_rule_skips_and_arrivals_of_weight_0():
    class Part(Says):
        def __call__(self, arrivals):
            return self.said(arrivals)

    part = Part(lambda arrivals: Weights(np.zeros(2), skip=arrivals.version == 1), once=True, participations=2)
    server = Server(Rule("own", "update", 2, part, NONE, Sgd()), np.zeros(3))
    push(server, 1, 2)
    assert (server.version, server.entered) == (1, set())
    push(server, 1, 3)
    assert (server.version, server.entered) == (1, {1})


def test_clients_of_other_rules_are_not_counted():
    server = Server(fedbuff(buffer_size=2), np.zeros(3))
    push(server, *range(1000))
    assert (server.state_dict()["meta"]["passed"], server.entered) == ([], set())


def test_states_and_stores_that_do_not_count(tmp_path):
    """As those of earlier versions: the fact is absent."""
    limited, other = rule_of(2), dp_fedbuff(buffer_size=3)
    servers = {
        rule.needs.participations: Server(rule, np.zeros(3), store=tmp_path / str(rule.needs.participations))
        for rule in (limited, other)
    }
    states = {}
    for most, server in servers.items():
        push(server, 1, 2, 3, 1)
        states[most] = server.state_dict()
        assert states[most]["meta"].get("participations", "absent") == (most or "absent")
        server.close()
    for most, rule in ((2, other), (2, rule_of(3)), (2, rule_of(1)), (None, limited)):
        expected = rule.needs.participations
        message = f"participations is {most} in the state, {expected} here"
        check_error(message, Server(rule, np.zeros(3)).load_state_dict, states[most])
        text = f"holds a server whose participations is {most}, not {expected}"
        check_error(text, Server.open, tmp_path / str(most), rule, error=StoreError)
        text = f"participations is {most} of the rule in force, {expected} of the new one"
        with Server.open(tmp_path / str(most)) as server:
            check_error(text, server.replace_rule, rule)
    with Server.open(tmp_path / "2", rule_of(2)) as server:
        assert (server.entered, server.clients) == (set(), {1, 2, 3})
        push(server, 2, 3)
        assert server.entered == {1, 2, 3}


def test_a_lost_arrival_leaves_the_counts(tmp_path):
    """Those of a pass lose it, because its client may enter again."""
    path, size = tmp_path / "store", 5000
    with Server(rule_of(1), np.zeros(size), store=path) as server:
        push_all(server, [1, 2, 3, 4, 5], np.ones(size, np.float32))
    damage(path / "arrivals/c/0/0", 5008 * 4 + 500)
    assert repair(path).arrivals == (5,)
    with Server.open(path) as server:
        assert (server.entered, list(server.waiting.values())) == ({1, 2, 3}, [4])


def test_a_store_commits_each_round(tmp_path):
    """Else a crash would lose rounds whose params were published."""
    path = tmp_path / "store"
    check_error("commit_every is 3, must be 1: dp_fedbuff", Server, rule_of(1), np.zeros(3), store=path, commit_every=3)
    Server(rule_of(1), np.zeros(3), store=path).close()
    check_error("commit_every is None, must be 1: dp_fedbuff", Server.open, path, commit_every=None)


def test_options():
    rule = dp_fedbuff(participations=4)
    assert from_config(rule.to_config()) == rule
    assert rule.to_config()["weigh"]["participations"] == 4
    check_error(r"\[ClippedMean\] participations is 0", dp_fedbuff, participations=0)
    check_error("participations is 2147483648, must be at most", dp_fedbuff, participations=2**31)
    for needs in ({"once": False}, {"once": True, "passes": True}):
        part = Says(None, participations=2, **needs)
        check_error(
            "weigh needs participations, which goes with once=True and without",
            Rule,
            "own",
            "update",
            2,
            part,
            NONE,
            Sgd(),
        )
    assert Needs().participations is None
    part = Says(None, participations=2, once=True)
    cached = ca2fl().calibrate  # whose rows are in later rounds, too
    check_error("weigh needs participations, which does not go with", Rule, "own", "update", 2, part, cached, Sgd())


def test_many_rejections_are_explained(caplog):
    server = Server(rule_of(1, 2), np.zeros(3))
    push(server, 1, 2, *[1] * 20)
    assert "Clients that were in as many rounds as dp_fedbuff allows (1): 2. A round needs 2 others" in caplog.text
