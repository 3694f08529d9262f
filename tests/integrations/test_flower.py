"""Flower's strategy over a Grid of functions: against FedAvg, replay, faults, resume, evaluation."""

import random
import re
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp.strategy import FedAvg

from afflux import AffluxError, Server, replay
from afflux.integrations import _flower_run, _loop
from afflux.integrations._core import TrainingRun
from afflux.integrations._loop import Loop
from afflux.integrations._settings import RunSettings
from afflux.integrations.flower import AsyncStrategy, model_of, record_of
from afflux.rules import ca2fl, fadas, fedavg, fedbuff, mf_ca2fl, wkafl
from flower_grid import FakeGrid, adds

NODES = [2**63 + 7, 5, 2**64 - 1, 11]
HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
RULES = [fedbuff(buffer_size=3), ca2fl(buffer_size=3), fadas(buffer_size=3)]


def initial(seed=0):
    rng = np.random.default_rng(seed)
    return record_of({"w": rng.standard_normal((3, 4), np.float32), "b": rng.standard_normal(5, np.float32)})


def grid_of(*values, **options):
    return FakeGrid(
        {node: adds(value, 10 * (i + 1)) for i, (node, value) in enumerate(zip(NODES, values, strict=False))}, **options
    )


def strategy(rule, **options):
    options = {"min_available_nodes": 1, "poll_interval": 0.0, "fraction_evaluate": 0.0, **options}
    return AsyncStrategy(rule, **options)


def flat(record):
    return np.concatenate([array.ravel() for array in model_of(record).values()])


def test_a_synchronous_round_is_that_of_fedavg():
    """Fresh nodes, weighted by examples: ours rounds once, Flower's sums of K float32 terms K times."""
    start, values = initial(), (1.0, -2.0, 0.5, 3.0)
    theirs = FedAvg(fraction_evaluate=0.0, min_available_nodes=4, min_train_nodes=4)
    theirs = theirs.start(grid_of(*values), start, num_rounds=1)
    ours = strategy(fedavg(buffer_size=4)).start(grid_of(*values, most=10**9), start, num_rounds=1)
    largest = np.abs(flat(start)) + max(map(abs, values))
    assert np.all(np.abs(flat(ours.arrays) - flat(theirs.arrays)) <= 12 * np.finfo(np.float32).eps * largest)
    assert ours.train_metrics_clientapp[1]["train_loss"] == pytest.approx(1.0)
    assert list(ours.train_metrics_clientapp[1]) == list(theirs.train_metrics_clientapp[1])


@pytest.fixture
def received(monkeypatch):
    """The models that have joined, by the number of their join, and all versions."""
    models, versions, receive = {}, {}, TrainingRun.receive

    def noted(self, key, read):
        versions[self.server.version] = np.array(self.server.params)
        kept = []

        def reading():
            kept.append(read())
            return kept[0]

        receipt = receive(self, key, reading)
        if receipt is not None and receipt.join is not None:
            models[receipt.join] = {name: np.array(array) for name, array in kept[0].arrays.items()}
        return receipt

    monkeypatch.setattr(TrainingRun, "receive", noted)
    return models, versions


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_run_replays_to_the_same_bits(rule, received):
    models, versions = received
    own = strategy(rule, server_options={"log": True}, concurrency=3)
    result = own.start(grid_of(1.0, -2.0, 0.5, 3.0, seed=3), initial(), num_rounds=6)
    server = own.server
    assert server.version == 6
    assert max(entry.staleness for entry in server.log if hasattr(entry, "staleness")) > 0
    fresh = Server(rule, model_of(initial()), log=True, num_clients=server.options.num_clients, faults="record")

    def update(join):
        base = fresh.layout.views(versions[join.version])
        return {name: array - base[name] for name, array in models[join.number].items()}

    again = replay(server.log, fresh, update)
    assert again.params.tobytes() == server.params.tobytes() == flat(result.arrays).tobytes()


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
    with pytest.raises(AffluxError, match="another model"):
        strategy(ca2fl(buffer_size=2), store=tmp_path / "store").start(
            grid, record_of({"w": np.zeros(3, np.float32)}), num_rounds=9
        )


def test_the_store_of_another_program_is_refused(tmp_path):
    with Server(fedbuff(buffer_size=2), model_of(initial()), store=tmp_path / "store", faults="record") as server:
        server.checkpoint({"epoch": 3})
    with pytest.raises(AffluxError, match=r"notes are not those of this adapter: .*epoch"):
        strategy(fedbuff(buffer_size=2), store=tmp_path / "store").start(grid_of(1.0), initial())


def bad(kind):
    """A node whose replies are of no use."""
    good = adds(1.0)

    def node(message):
        if kind == "lost":
            return None
        if kind == "error":
            return Error(0, "out of memory")
        reply = good(message)
        if message.metadata.message_type == "evaluate":
            return reply
        arrays = dict(reply["arrays"].items())
        if kind == "nan":
            arrays["b"] = Array(np.full(5, np.nan, np.float32))
        elif kind == "shape":
            arrays["b"] = Array(np.zeros(6, np.float32))
        elif kind == "name":
            arrays["c"] = arrays.pop("b")
        elif kind == "bytes":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", arrays["b"].data[:-4])
        elif kind == "no bytes":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", b"")
        elif kind == "objects":
            arrays["b"] = Array(np.array(["a"] * 5))
        elif kind == "header":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + b"\x28\x23" + b"-" * 9000)
        elif kind == "many":
            return RecordDict({"arrays": reply["arrays"], "more": reply["arrays"], "metrics": reply["metrics"]})
        elif kind == "many metrics":
            return RecordDict({"arrays": reply["arrays"], "more": reply["metrics"], "metrics": reply["metrics"]})
        content = {"arrays": ArrayRecord(arrays), "metrics": reply["metrics"]}
        if kind == "zero":
            content["metrics"] = MetricRecord({"num-examples": 0})
        elif kind == "negative":
            content["metrics"] = MetricRecord({"num-examples": -3})
        elif kind == "list":
            content["metrics"] = MetricRecord({"num-examples": [1, 2]})
        elif kind == "no arrays":
            del content["arrays"]
        return RecordDict(content)

    return node


FAULTS = {
    "error": "failed",
    "nan": "faulty",
    "shape": "faulty",
    "name": "faulty",
    "bytes": "faulty",
    "header": "faulty",
    "many": "faulty",
    "many metrics": "faulty",
    "no bytes": "faulty",
    "objects": "faulty",
    "no arrays": "faulty",
    "negative": "faulty",
    "list": "faulty",
    "zero": "empty",
}


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
    grid = FakeGrid({1: bad("error"), 2: bad("nan")})
    with pytest.raises(
        RuntimeError, match=r"none of 2 clients is of use: .* 3 times in a row or more, .*(memory|non-finite)"
    ):
        strategy(fedbuff(), max_failures=3, retry_after=0.001).start(grid, initial())


def test_batch_norm_and_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = {
        "bn.weight": np.ones(4, np.float32),
        "bn.running_mean": np.zeros(4, np.float32),
        "bn.num_batches_tracked": np.array(0, np.int64),
        "half": np.ones(6, ml_dtypes.bfloat16),
    }

    def node(message):
        model = model_of(message.content["arrays"])
        assert [array.dtype for array in model.values()] == [array.dtype for array in arrays.values()]
        moved = {name: (array + np.array(1, array.dtype)).astype(array.dtype) for name, array in model.items()}
        return RecordDict({"arrays": record_of(moved), "metrics": MetricRecord({"num-examples": 1})})

    own = strategy(fedavg(buffer_size=2))
    result = own.start(FakeGrid({1: node, 2: node}), record_of(arrays), num_rounds=2)
    assert own.server.counts["joined"] == 4
    for name, array in model_of(result.arrays).items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(np.asarray(array, np.float64), np.asarray(arrays[name], np.float64) + 2.0)


def test_evaluation_goes_on_beside_training():
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=2, evaluate_every=2)
    evaluated = []

    def central(step, arrays):
        evaluated.append(step)
        return MetricRecord({"mean": float(flat(arrays).mean())})

    result = own.start(grid_of(1.0, 1.0, 1.0), initial(), num_rounds=5, evaluate_fn=central)
    assert evaluated == [0, 2, 4, 5] == sorted(result.evaluate_metrics_serverapp)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 5]
    for step in (2, 4, 5):  # the mean over the two arrays' means, of the same version
        assert result.evaluate_metrics_clientapp[step]["mean"] == pytest.approx(step, abs=2.0)


@pytest.mark.parametrize("gone", ["error", "unreadable", "silent"])
def test_an_evaluation_ends_when_its_replies_have_come_or_never_will(gone):
    """Errors of Flower's own are of the type "system"; of one that cannot be read nothing else is lost."""
    node = adds(1.0, 10)

    def replies(message):
        if message.metadata.message_type == "train":
            return node(message)
        return None if gone == "silent" else Error(3, "unavailable")

    class Grid(FakeGrid):
        def pull_messages(self, message_ids):
            if gone == "unreadable":
                for key in message_ids:
                    if key in self.under_way and self.under_way[key].has_error():
                        if len(list(message_ids)) == 1:
                            self.under_way.pop(key)
                        raise ValueError("not the bytes of a message")
            found = super().pull_messages(message_ids)
            for message in found:
                if message.has_error():
                    message.metadata.__dict__["_message_type"] = "system"
            return found

    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=1, timeout=3.0)
    begin = time.monotonic()
    result = own.start(Grid({1: replies, 2: adds(1.0, 10)}), initial(), num_rounds=2)
    assert (time.monotonic() - begin < 2.5) is (gone != "silent")
    assert own.lost["failed"] == own.lost["unknown"] == 0
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert own.server.counts["joined"] >= 4


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


def all_of(grid, keys):
    """Hands over all replies that are under way."""
    return [grid.under_way.pop(key) for key in dict.fromkeys(keys) if key in grid.under_way]


def test_training_goes_on_when_nodes_for_the_evaluation_have_left():
    """FedAvg would wait until as many nodes are there again."""
    grid = FakeGrid({1: adds(1.0), 2: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=2, min_available_nodes=2)

    def central(step, arrays):
        if step == 3:
            del grid.nodes[2]

    result = own.start(grid, initial(), num_rounds=8, evaluate_fn=central)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]


def renamed(nodes, names):
    """The same nodes under other ids, as in the next run of Flower's simulation."""
    return dict(zip(names, nodes.values(), strict=True))


def said(partition):
    node = adds(1.0, 10)

    def replies(message):
        return RecordDict({**node(message), "who": ConfigRecord({"partition": partition})})

    return replies


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
    with pytest.raises(AffluxError, match=r"none of the 3 .* is one of them: 301\. Give client_key="):
        run(18, renamed(nodes, [301, 302, 303]))

    class Names(dict):
        """A function that cannot be hashed."""

        __call__ = dict.__getitem__

    names = Names({401: "ann", 402: "bob", 403: "eve"})
    assert run(18, renamed(nodes, names), names) == ["ann", "bob", "eve"]
    with pytest.raises(RuntimeError, match="nothing in the reply has the name 'partitoin'"):
        strategy(rule, client_key="partitoin", max_failures=1).start(FakeGrid(nodes), initial())
    with pytest.raises(AffluxError, match="client_key is 3, must be a function or a key"):
        strategy(rule, client_key=3)


@pytest.fixture
def logged(monkeypatch):
    """What Flower's logger is given, as lines."""
    lines = []
    monkeypatch.setattr(FLOWER_LOGGER, "handle", lambda record: lines.append(record.getMessage()))
    return lines


def test_a_store_with_ids_of_nodes_is_not_resumed_with_a_client_key(tmp_path, logged):
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
        with pytest.raises(KeyboardInterrupt):
            run(9)
    assert any("without client_key= a second run cannot go on" in line for line in logged)
    sent = FakeGrid(nodes)
    with pytest.raises(AffluxError, match=r"\(client_key=None\), and now client_key='partition'\. Give the client_key"):
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
    with pytest.raises(RuntimeError, match="would be client 3 of num_clients=2"):
        strategy(ca2fl(buffer_size=2), store=tmp_path / "store", client_key="partition", max_failures=1).start(
            FakeGrid(nodes), initial(), num_rounds=9
        )


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


def test_a_relative_store_is_refused():
    with pytest.raises(AffluxError, match="store is 'runs/one', must be an absolute path"):
        strategy(fedbuff(), store="runs/one")


def test_options_of_the_sample_have_no_effect(logged):
    own = strategy(fedbuff(buffer_size=2), fraction_train=0.0, min_train_nodes=3)
    for name in ("fraction_train", "min_train_nodes"):
        assert f"{name} has no effect on AsyncStrategy: concurrency= says how many nodes train" in logged
    logged.clear()
    own.start(grid_of(1.0, 2.0), initial(), num_rounds=1)
    assert own.server.version == 1
    assert not any("train (" in line or "no effect" in line or "skipped" in line for line in logged)


def test_steps_and_evaluations_are_logged(logged):
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, concurrency=3, server_options={"log": True})
    result = own.start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=4)
    staleness = {}
    for entry in own.server.log:
        if hasattr(entry, "staleness"):
            staleness.setdefault(len(staleness.get("all", [])) // 2 + 1, []).append(entry.staleness)
            staleness.setdefault("all", []).append(entry.staleness)
    for step in range(1, 5):
        (line,) = [line for line in logged if line.startswith(f"[STEP {step}]")]
        mean, largest = np.mean(staleness[step]), max(staleness[step])
        assert line.endswith(f"staleness: mean {mean:.1f}, largest {largest}")
        assert f"Evaluation of step {step} by nodes: {result.evaluate_metrics_clientapp[step]}" in logged


def test_the_reason_of_an_unreadable_reply_is_its_own():
    nodes = {1: said("ann"), 2: adds(1.0), 3: bad("no arrays")}
    own = strategy(fedbuff(buffer_size=1), client_key="partition", concurrency=3)
    own.start(FakeGrid(nodes), initial(), num_rounds=5)
    reasons = {fault.client_id: fault.reason for fault in own.server.faults}
    assert reasons[2].endswith("[client_key] nothing in the reply has the name 'partition'")
    assert reasons[3].startswith("[push] client 3's model: the reply holds 0 ArrayRecords")


def test_a_run_of_flower_is_interrupted_and_keeps_its_result(tmp_path):
    def interrupt(step, arrays):
        if step == 4:
            raise KeyboardInterrupt
        return MetricRecord({"step": step})

    own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        own.start(grid_of(1.0, 2.0), initial(), num_rounds=9, evaluate_fn=interrupt)
    assert sorted(own.result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert sorted(own.result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    again = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    result = again.start(grid_of(1.0, 2.0), initial(), num_rounds=6)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4, 5, 6]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]


def test_metrics_without_the_weight_are_not_aggregated():
    def node(message):
        reply = adds(1.0)(message)
        return RecordDict({"arrays": reply["arrays"]})

    own = strategy(fedbuff(buffer_size=2))
    assert not own.start(FakeGrid({1: node, 2: node}), initial(), num_rounds=2).train_metrics_clientapp
    assert own.server.counts["joined"] == 4


def trains_only(message):
    return None if message.metadata.message_type == "evaluate" else adds(1.0)(message)


@pytest.fixture
def slept(monkeypatch):
    """A clock that only sleeping moves: the seconds that have passed."""
    passed = [0.0]
    monkeypatch.setitem(TrainingRun.__init__.__kwdefaults__, "clock", lambda: passed[0])
    monkeypatch.setattr(_loop, "sleep", lambda seconds: passed.__setitem__(0, passed[0] + max(seconds, 0.5)))
    return passed


def test_nodes_that_do_not_evaluate_are_asked_twice_at_most(slept):
    """Once, and once more for the last step; and the end does not wait for them as long as a reply may take."""
    grid = FakeGrid(dict.fromkeys(range(1, 11), trains_only))
    own = strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=100)
    asked = [message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type == "evaluate"]
    assert sorted(asked) == sorted([*range(1, 11)] * 2)
    assert result.evaluate_metrics_clientapp == {}
    assert 10.0 <= slept[0] <= 11.0


def test_one_node_that_does_not_evaluate_holds_up_nothing(slept):
    grid = FakeGrid({1: trains_only, 2: adds(1.0), 3: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=3), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=20)
    assert sorted(result.evaluate_metrics_clientapp) == [*range(1, 21)]
    assert sum(message.metadata.message_type == "evaluate" for message in grid.sent) == 2 + 2 * 20
    assert slept[0] <= 11.0


def test_the_end_waits_for_evaluations_in_proportion_to_the_slowest_reply(slept):
    class Grid(FakeGrid):
        def pull_messages(self, keys):
            slept[0] += 20.0
            return super().pull_messages(keys)

    grid = Grid({1: trains_only, 2: trains_only})
    strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0, concurrency=1).start(grid, initial(), num_rounds=1)
    assert 20.0 + 60.0 <= slept[0] <= 20.0 + 60.0 + 20.0 + 1.0


def test_evaluations_of_many_steps_are_bounded(monkeypatch, slept):
    """Nodes that come, withhold an evaluation and go: the oldest evaluation ends with the replies that it has."""
    most, evaluate = [], _flower_run.FlowerTransport.evaluate

    def noted(self, step):
        evaluate(self, step)
        most.append(len(self.evaluated))

    monkeypatch.setattr(_flower_run.FlowerTransport, "evaluate", noted)
    monkeypatch.setattr(_flower_run, "_MOST_STEPS", 5)
    grid = FakeGrid({1: adds(1.0), 2: trains_only})
    grid.pull_messages = partial(all_of, grid)

    def central(step, arrays):
        del grid.nodes[max(grid.nodes)]
        grid.nodes[step + 100] = trains_only
        before_the_end.append(sorted(own.result.evaluate_metrics_clientapp))

    before_the_end = []
    own = strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0, min_evaluate_nodes=1)
    result = own.start(grid, initial(), num_rounds=30, evaluate_fn=central)
    assert max(most[:-1]) == 5
    assert most[-1] == 6  # the last step is evaluated in any case
    assert len(before_the_end[-1]) > 10
    assert before_the_end[-1] == sorted(result.evaluate_metrics_clientapp)[: len(before_the_end[-1])]
    assert sorted(result.evaluate_metrics_clientapp)[-1] == 30


def test_metrics_of_a_node_are_bounded(tmp_path):
    def chatty(message):
        reply = adds(1.0)(message)
        reply["metrics"]["num-examples"] = reply["metrics"].pop("num-examples")
        more = {"x" * 101: 1.0, "list": [1.0] * 1001, "huge": 10**400, **{f"k{i}": 1.0 for i in range(2000)}}
        named = {"num-examples": 10, **more, **reply["metrics"]}
        return RecordDict({**reply, "metrics": MetricRecord(named)})

    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, store=tmp_path / "store", checkpoint_every=1)
    result = own.start(FakeGrid({1: chatty, 2: chatty}), initial(), num_rounds=3)
    assert sorted(result.evaluate_metrics_clientapp)[-1] == 3
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    for means in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        for mean in means.values():
            assert dict(mean) == pytest.approx({f"k{i}": 1.0 for i in range(100)})
    again = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    assert again.start(FakeGrid({1: chatty}), initial(), 3).train_metrics_clientapp == result.train_metrics_clientapp


@pytest.mark.parametrize("odd", [{"train_loss": [1.0, 2.0], "mean": [1.0]}, {"num-examples": None}, {"other": 3.0}])
def test_a_record_that_differs_is_left_out_instead_of_the_step(odd, logged):
    def node(message):
        reply = adds(1.0)(message)
        named = {**reply["metrics"], **odd}
        reply["metrics"] = MetricRecord({name: value for name, value in named.items() if value is not None})
        return reply

    grid = FakeGrid({1: adds(1.0), 2: node, 3: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=3), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=3)
    assert [mean["train_loss"] for mean in result.train_metrics_clientapp.values()] == pytest.approx([1.0] * 3)
    assert sorted(result.train_metrics_clientapp) == sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert all(isinstance(mean["mean"], float) for mean in result.evaluate_metrics_clientapp.values())
    assert "Evaluation of step 3: 1 replies differ from the others and are left out" in logged
    if "other" not in odd:  # which train_metrics_aggr_fn takes
        assert "Metrics of step 3: 1 replies differ from the others and are left out" in logged


@pytest.mark.parametrize("wrong", [0.5, [1], {"acc": np.float32(0.5)}, "good"])
def test_the_result_of_evaluate_fn_is_checked(wrong, tmp_path):
    own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    message = r"the result of evaluate_fn for step 2 is .*, must be a MetricRecord or None"
    with pytest.raises(AffluxError, match=message):
        own.start(grid_of(1.0, 2.0), initial(), 5, evaluate_fn=lambda step, arrays: wrong if step == 2 else None)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 2
    assert strategy(fedbuff(buffer_size=2), store=tmp_path / "store").start(grid_of(1.0, 2.0), initial(), 5).arrays


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0}, r"\[start\] timeout is 0, must be finite and positive"),
        ({"timeout": float("nan")}, r"\[start\] timeout is nan"),
        ({"timeout": "x"}, r"\[start\] timeout is 'x', must be a number"),
        ({"num_rounds": "3"}, r"\[start\] num_rounds is '3', must be an int"),
        ({"num_rounds": -1}, r"\[start\] num_rounds is -1, must be an int of at least 0"),
        ({"num_rounds": 2.5}, r"\[start\] num_rounds is 2\.5, must be an int"),
    ],
)
def test_arguments_of_start_are_checked_before_anything_else(given, message, tmp_path):
    grid = grid_of(1.0, 2.0)
    with pytest.raises(AffluxError, match=message):
        strategy(fedbuff(buffer_size=2), store=tmp_path / "store").start(grid, initial(), **given)
    assert not grid.sent
    assert not (tmp_path / "store").exists()


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


def test_options_that_are_none():
    with pytest.raises(TypeError, match="concurency"):
        strategy(fedbuff(), concurency=3)
    with pytest.raises(AffluxError, match=r"\[settings\] concurrency is 0"):
        strategy(fedbuff(), concurrency=0)


def test_rules_that_take_gradients():
    rule = wkafl(buffer_size=3, server_lr=0.5)
    with pytest.raises(RuntimeError, match="lacks client_lr or local_steps, and the settings do not say them"):
        strategy(rule, max_failures=1).start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=1)
    options = {"client_lr": 0.1, "local_steps": 5}
    assert strategy(rule, **options).start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=2).arrays
    nodes = {i: adds(1.0, **{"client-lr": 0.1, "local-steps": 5}) for i in range(3)}
    assert strategy(rule).start(FakeGrid(nodes), initial(), num_rounds=2).arrays


def test_a_gradient_without_its_learning_rate_is_faulty():
    """The operator's mistake ends the run, see above; that of one node does not stop the others."""
    good = adds(1.0, **{"client-lr": 0.1, "local-steps": 5})
    nodes = {1: good, 2: good, 3: adds(1.0)}
    own = strategy(wkafl(buffer_size=2, server_lr=0.5), concurrency=1, seed=2)
    own.start(FakeGrid(nodes), initial(), num_rounds=6)
    assert own.server.counts["joined"] == 12
    assert own.server.counts["faulty"] == len(own.server.faults) > 0
    assert all("lacks client_lr or local_steps" in fault.reason for fault in own.server.faults)


def test_a_loss_that_is_no_number_is_not_known():
    nodes = {i: adds(1.0, train_loss=loss) for i, loss in enumerate((10**400, -(10**400), float("nan"), float("inf")))}
    own = strategy(fedbuff(buffer_size=2), server_options={"log": True})
    own.start(FakeGrid(nodes), initial(), num_rounds=4)
    assert own.server.counts["joined"] == 8
    assert all(np.isnan(entry.loss) for entry in own.server.log if hasattr(entry, "loss"))


def test_a_step_that_no_reply_completes_is_noted():
    """flush_after makes it while the other node is silent."""
    grid = FakeGrid({1: adds(1.0), 2: bad("lost")})
    own = strategy(fedbuff(buffer_size=100), concurrency=2, poll_interval=0.01, server_options={"flush_after": 0.02})
    steps = []
    result = own.start(grid, initial(), num_rounds=3, evaluate_fn=lambda step, arrays: steps.append(step))
    assert steps[0] == 0
    assert steps[-1] == own.server.version >= 3
    with_metrics = set(result.train_metrics_clientapp)  # a step beside the note of another has its metrics there
    assert with_metrics
    assert with_metrics <= set(steps[1:])


def test_versions_are_bounded_over_many_replies():
    """10,000 replies, of which 1 per cent never come."""
    rng, good = random.Random(0), adds(0.001)

    def node(message):
        return None if rng.random() < 0.01 else good(message)

    held = []

    class Grid(FakeGrid):
        def pull_messages(self, keys):
            if own.server is not None:
                held.append((own.server.versions_held, len(own.server.tasks)))
            return super().pull_messages(keys)

    own = strategy(fedbuff(buffer_size=10), concurrency=20, timeout=0.2, poll_interval=0.001)
    own.start(Grid(dict.fromkeys(range(100), node), most=20), initial(), num_rounds=1000)
    assert own.server.counts["joined"] == 10_000
    assert own.lost["overdue"] > 10
    assert max(versions for versions, _ in held) <= 20 + 3
    assert max(tasks for _, tasks in held) <= 20


def test_numpy_files_are_read_in_place():
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    record = record_of({"w": array, "f": np.asfortranarray(array), "s": np.array(3, np.int64), "e": np.empty((0, 2))})
    for name, own in model_of(record).items():
        assert np.array_equal(own, record[name].numpy())
        assert own.dtype == record[name].numpy().dtype
        assert not own.flags.writeable
    assert not model_of(record)["w"].flags.owndata
    fortran = Array(np.asfortranarray(array))
    assert np.array_equal(model_of(ArrayRecord({"f": fortran}))["f"], array)


def test_the_page_runs():
    """Its blocks define apps; here they get a strategy that notes how it is used, and the training of a client."""
    pytest.importorskip("torch")
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    server, client = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(server, "flower.md", "exec"), names)
    assert names["AsyncStrategy"] is AsyncStrategy
    started = []

    class Noted(AsyncStrategy):
        def start(self, grid, initial_arrays, num_rounds):
            started.append((self.rule.name, self.settings.concurrency, num_rounds))

    names["AsyncStrategy"] = Noted
    names["main"](grid_of(1.0), None)
    assert started == [("fedbuff", 5, 100)]
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    after = [line[1:].strip() for line in diff.splitlines() if not line.startswith("-")]
    assert [line.split("  #")[0] for line in after] == [
        line.strip() for line in server.splitlines() if line.strip() in after
    ]
    names = {}
    exec(compile(client, "flower.md", "exec"), names)
    names["trained"] = adds(1.0)

    def node(partition):
        context = SimpleNamespace(node_config={"partition-id": partition})
        return lambda message: names["train"](message, context).content

    own = strategy(ca2fl(buffer_size=2), client_key="partition-id")
    own.start(FakeGrid({11: node(0), 12: node(1)}), initial(), num_rounds=2)
    assert own.server.rows.client_ids == [0, 1]


def test_the_settings_of_the_page_are_those_of_the_class():
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    table = page.split("## Go on after a crash")[1].split("## Rules")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == {field.name for field in fields(RunSettings)} | {"client_key", "num_rounds", "start"}
