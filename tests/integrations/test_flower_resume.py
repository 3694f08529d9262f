"""A second run of Flower that goes on from a store: after a kill, an interrupt, and with other ids of nodes."""

import pytest
from flwr.app import MetricRecord

from afflux import AffluxError, Server
from afflux.integrations import _clients, _flower_run, _loop
from afflux.integrations._loop import Loop
from afflux.rules import ca2fl, fedbuff, mf_ca2fl
from conftest import check_error, check_raises
from flower_grid import NODES, FakeGrid, adds, flat, grid_of, initial, logged, said, strategy

__all__ = ["logged"]

HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def test_a_run_is_killed_and_goes_on_with_nodes_in_flight(tmp_path, monkeypatch):
    def run(steps, store=None, grid=None):
        own = strategy(ca2fl(buffer_size=2), store=store, checkpoint_every=2, concurrency=3, evaluate_every=2)
        result = own.start(grid or grid_of(1.0, -2.0, 0.5, 3.0), initial(), num_rounds=steps)
        return own, result

    class Killed(Exception):
        pass

    class Kill(FakeGrid):
        def pull_messages(self, keys):
            if sum(m.metadata.message_type == "train" for m in self.sent) > 14:
                raise Killed
            return super().pull_messages(keys)

    grid = Kill({node: adds(value, 10) for node, value in zip(NODES, (1.0, -2.0, 0.5, 3.0), strict=False)})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        # Without the last checkpoint, as if the process had ended.
        patch.setattr(Loop, "__exit__", lambda self, *error: self.training.server.close(checkpoint=False))
        run(9, tmp_path / "store", grid)
    with Server.open(tmp_path / "store") as server:
        assert server.tasks
    under_way = set(grid.under_way)
    assert under_way
    grid.__class__ = FakeGrid
    own, result = run(9, tmp_path / "store", grid)
    assert under_way <= set(grid.under_way)  # a run of Flower cannot pull replies to messages of another one
    with Server.open(tmp_path / "store") as server:
        assert server.tasks == ()
    assert sorted(result.train_metrics_clientapp) == [*range(1, 10)]
    assert own.server.counts["joined"] == 18


def test_a_run_of_flower_is_interrupted_and_keeps_its_result(tmp_path):
    def interrupt(step, arrays):
        if step == 4:
            raise KeyboardInterrupt
        return MetricRecord({"step": step})

    own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store", checkpoint_every=100)
    check_raises(KeyboardInterrupt, own.start, grid_of(1.0, 2.0), initial(), num_rounds=9, evaluate_fn=interrupt)
    assert sorted(own.result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert sorted(own.result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    again = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    result = again.start(grid_of(1.0, 2.0), initial(), num_rounds=6)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4, 5, 6]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]


def test_a_checkpoint_keeps_the_metrics_of_the_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(_flower_run, "_STEPS_KEPT", 12)

    def run(steps):
        own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store", evaluate_every=2)
        central = lambda step, arrays: MetricRecord({"step": step})  # noqa: E731
        result = own.start(grid_of(1.0, 2.0), initial(), num_rounds=steps, evaluate_fn=central)
        with Server.open(tmp_path / "store") as server:
            notes = server.notes["own"]
        return result, [sorted(map(int, notes[name])) for name in HISTORY]

    result, stored = run(30)
    assert sorted(result.train_metrics_clientapp) == [*range(1, 31)]
    assert stored == [[*range(19, 31)], [], [*range(8, 31, 2)]]
    result, stored = run(34)
    assert sorted(result.train_metrics_clientapp) == [*range(19, 35)]
    assert stored == [[*range(23, 35)], [], [*range(12, 35, 2)]]


def test_what_is_logged_of_a_store(tmp_path, logged):
    def run(steps, seed=0):
        own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
        return own.start(grid_of(1.0, 2.0), initial(seed), num_rounds=steps)

    first = run(4)
    assert any(line.startswith("Made 4 steps: ") for line in logged)
    assert not any("Going on" in line or "client_key" in line for line in logged)
    logged.clear()
    again = run(4, seed=1)  # only the layout of these arrays counts
    assert flat(again.arrays).tobytes() == flat(first.arrays).tobytes()
    assert again.train_metrics_clientapp == first.train_metrics_clientapp
    assert f"Going on from step 4 of store {tmp_path / 'store'}" in logged
    assert any(line.startswith("No step was needed: the store holds step 4 of 4") for line in logged)
    assert not any("Made" in line for line in logged)
    logged.clear()
    run(6)
    assert any(line.startswith("Made 2 steps, after 4 of earlier runs") for line in logged)


def renamed(nodes, names):
    """The same nodes under other ids, as in the next run of Flower's simulation."""
    return dict(zip(names, nodes.values(), strict=True))


@pytest.mark.parametrize("rule", [ca2fl(buffer_size=2), mf_ca2fl(buffer_size=2)], ids=lambda rule: rule.name)
def test_rows_of_nodes_that_have_other_ids_in_the_next_run(rule, tmp_path):
    def run(steps, nodes, client_key=None):
        own = strategy(rule, store=tmp_path / "store", client_key=client_key)
        own.start(FakeGrid(nodes), initial(), num_rounds=steps)
        with Server.open(tmp_path / "store") as server:
            return sorted(server.rows.client_ids)

    nodes = {101: said("ann"), 102: said("bob"), 103: said("eve")}
    assert run(6, nodes, "partition") == ["ann", "bob", "eve"]
    assert run(12, renamed(nodes, [201, 202, 203]), "partition") == ["ann", "bob", "eve"]
    check_error(r"none of the 3 .* is one of them: 301\. .*client_key=", run, 18, renamed(nodes, [301, 302, 303]))

    class Names(dict):
        """A function that cannot be hashed."""

        __call__ = dict.__getitem__

    names = Names({401: "ann", 402: "bob", 403: "eve"})
    assert run(18, renamed(nodes, names), names) == ["ann", "bob", "eve"]
    with pytest.raises(RuntimeError, match="nothing in the reply has the name 'partitoin'"):
        strategy(rule, client_key="partitoin", max_failures=1).start(FakeGrid(nodes), initial())
    check_error("client_key is 3, must be a function or a key", strategy, rule, client_key=3)


def test_a_store_with_ids_of_nodes_is_not_resumed_with_a_client_key(tmp_path, logged, monkeypatch):
    nodes = {101: said("ann"), 102: said("bob")}

    def run(steps, key=None):
        own = strategy(ca2fl(buffer_size=2), store=tmp_path / "store", client_key=key)
        own.start(FakeGrid(nodes), initial(), num_rounds=steps)
        return own

    def interrupt(self, last):
        while self.training.server.version < 3:
            self.send_out()
            self.take_replies(last)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:  # before the first checkpoint of a step
        patch.setattr(Loop, "run", interrupt)
        patch.setattr(Loop, "__exit__", lambda self, *error: self.training.server.close(checkpoint=False))
        check_raises(KeyboardInterrupt, run, 9)
    assert any("without client_key= a second run cannot go on" in line for line in logged)
    sent = FakeGrid(nodes)
    with pytest.raises(AffluxError, match=r"\(client_key=None\) .* and this run has client_key='partition': give"):
        strategy(ca2fl(buffer_size=2), store=tmp_path / "store", client_key="partition").start(sent, initial())
    assert not sent.sent
    with Server.open(tmp_path / "store") as server:
        notes = server.notes
        del notes["client_key"]  # as older stores lack it
        server.checkpoint(notes)
    logged.clear()
    assert run(4).server.version == 4
    assert not any("client_key" in line for line in logged)
    with Server.open(tmp_path / "store") as server:
        assert server.notes["client_key"].endswith("(client_key=None)")
        server.checkpoint(notes)
    monkeypatch.setattr(_clients, "_MOST_EXCLUDED", 0.1)  # seconds without a client of use
    monkeypatch.setattr(_loop, "_CLIENTS_EVERY", 0.0)
    own = strategy(ca2fl(buffer_size=2), store=tmp_path / "store", client_key="partition", max_failures=1)
    text = "would be client 3 of num_clients=2"
    check_error(text, own.start, FakeGrid(nodes), initial(), num_rounds=9, error=RuntimeError)
