"""`Server.step`: pushes and their round in one call, as pushes to a server with rounds="flush" and then flush."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

import variants
from afflux import AffluxError, BusyError, Cut, Join, Rule, Server, StoreError, Weights, replay
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules import RULES, ca2fl, fadas, fedasync, fedavg, fedbuff, gsgm, twafl
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Momentum, Sgd
from conftest import Dlpack, bits, check_error, push_all, raising, read_only
from inside import aggregator_of, slots_taken, without_fast_path

D = 60
SHAPES = {"conv": (3, 7), "bias": (0,), "dense": {"w": (5, 7), "b": (4,)}}


def tree(flat, shapes=SHAPES, start=0):
    """The flat vector as a nested dict of arrays of these shapes."""
    parts = {}
    for name, shape in shapes.items():
        if isinstance(shape, dict):
            parts[name], start = tree(flat, shape, start)
        else:
            size = int(np.prod(shape))
            parts[name], start = flat[start : start + size].reshape(shape), start + size
    return parts if shapes is SHAPES else (parts, start)


def everything(server, counts=True):
    """All that a server keeps, comparable."""
    state = server.state_dict()
    if not counts:
        state["meta"].pop("counts")
    return json.dumps(state["meta"]), {name: bits(array) for name, array in state["arrays"].items()}


def entries_of(joins, server, kind=None):
    """The joins of a trace as arguments of `push`, of vectors in parts."""
    kind, version = kind or server.rule.kind, server.version
    return [
        {"client": client, "version": version - min(staleness, version), "num_examples": examples, "loss": loss}
        | {kind: tree(vector[:D].astype(np.float32))}
        for client, staleness, examples, loss, vector in joins
    ]


def made(rule, start=None, **options):
    """A server of which only flushes and steps end rounds."""
    start = tree(np.linspace(-1, 1, D).astype(np.float32)) if start is None else start
    return Server(rule, start, rounds="flush", log=True, num_clients=12, **options)


def pushed(server, entries):
    """The receipts of pushes, and the report of a flush."""
    return tuple(server.push(**entry) for entry in entries), server.flush()


def same(pushes, steps, rounds):
    """Check that pushes to one server and steps of the other give the same."""
    for joins in rounds:
        for server in (pushes, steps):
            for name in server.rule.needs.handed_in:
                server.set_rule_vector(name, np.ones(D, np.float32))
        entries = entries_of(joins, pushes)
        (expected, report), (receipts, other) = pushed(pushes, entries), steps.step(entries)
        assert receipts == expected
        assert (report.version, bits(report.weights)) == (other.version, bits(other.weights))
        assert everything(pushes) == everything(steps)
        assert slots_taken(steps) == len(steps.waiting)
    assert pushes.log == steps.log
    return steps


@pytest.mark.parametrize("name", RULES)
def test_a_step_is_pushes_and_a_flush(name):
    same(made(variants.make(name)), made(variants.make(name)), list(variants.trace(name, 7, 3)))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (fedbuff(buffer_size=4), {"accumulate": True}),
        (fadas(buffer_size=3), {"inplace": True}),
        (fadas(buffer_size=3), {"slot_dtype": "bfloat16", "dtype": "float64"}),
        (fedbuff(buffer_size=2), {"max_norm": 1e9}),
        (fedbuff(buffer_size=2), {"clip_norms": 1.5}),
        (fedbuff(buffer_size=2), {"duplicates": "latest", "max_staleness": 2}),
        (fedbuff(buffer_size=2), {"duplicates": "reject", "max_versions": 2}),
        (ca2fl(buffer_size=4), {"plane": 3}),
        (fadas(buffer_size=4), {"plane": 2}),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else "-".join(value),
)
def test_with_options(rule, options):
    shards, options = options.get("plane"), {name: each for name, each in options.items() if name != "plane"}
    planes = [{"plane": ShardedPlane(shards)} if shards else {} for _ in range(2)]
    pushes, steps = (made(rule, **options, **plane) for plane in planes)
    same(pushes, steps, [[join for pair in (one, one[:2]) for join in pair] for one in variants.trace("fedbuff", 5, 4)])


def test_with_a_store(tmp_path):
    rounds = list(variants.trace("fadas", 4, 2))
    pushes, steps = (made(fadas(buffer_size=3), store=tmp_path / name) for name in ("pushes", "steps"))
    same(pushes, steps, rounds)
    bound = pushes.push(**entries_of(rounds[0], pushes)[0]), steps.push(**entries_of(rounds[0], steps)[0])
    assert bound[0] == bound[1]
    found = [everything(pushes), everything(steps)]
    for server, name in ((pushes, "pushes"), (steps, "steps")):
        server.close()
        with Server.open(tmp_path / name) as opened:
            assert opened.options.rounds == "flush"
            assert everything(opened) == found.pop(0)
            assert opened.arrivals_waiting == 1


def test_conversions_buffers_and_tasks():
    """Each entry has any of push's arguments: a task and a model with statistics, for a rule of updates."""
    start = {"w": np.zeros(3, np.float32), "running_mean": np.zeros(2), "steps": np.array(0)}
    pushes, steps = (made(fedbuff(buffer_size=2), start) for _ in range(2))
    for number in range(1, 4):
        arrays = {"w": np.full(3, float(number), np.float32), "running_mean": np.ones(2) * number, "steps": number}
        sides = []
        for server in (pushes, steps):
            models = [{name: np.array(array) for name, array in arrays.items()} for _ in range(3)]
            entries = [{"task": server.checkout(client), "model": models[client]} for client in range(3)]
            sides.append([*entries, {"task": entries[0]["task"], "model": models[0]}])
        (expected, _), (receipts, _) = pushed(pushes, sides[0]), steps.step(sides[1])
        assert [receipt.status for receipt in receipts] == ["joined"] * 3 + ["expired"]
        assert receipts == expected
        assert steps.tasks == ()
        assert bits(steps.pull().buffers) == bits(pushes.pull().buffers)
        assert bits(steps.params) == bits(pushes.params)
    assert steps.pull().buffers.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("waits", [0, 1])
def test_a_step_fills_the_buffer_of_rounds_and_the_log_says_so(waits, tmp_path):
    """Its arrivals make one round, whatever M is; a replay of the log, also of that of a store, makes it again."""
    vectors = np.random.default_rng(1).standard_normal((20, D)).astype(np.float32)
    number = iter(range(20))

    def entry():
        i = next(number)
        return {"client": i % 7, "version": 0, "update": vectors[i]}

    def fresh():
        return Server(fedbuff(buffer_size=3), np.zeros(D, np.float32), log=True)

    server = Server(fedbuff(buffer_size=3), np.zeros(D, np.float32), log=True, store=tmp_path / "store")
    for _ in range(waits):
        server.push(**entry())
    assert len(server.step([entry() for _ in range(7)])[1].client_ids) == 7 + waits
    assert len(server.step([entry() for _ in range(2)])[1].client_ids) == 2
    assert server.step([])[1] is None
    server.push(**entry())
    assert len(server.step([entry() for _ in range(2)])[1].client_ids) == 3
    cuts = [event for event in server.log if isinstance(event, Cut)]
    assert cuts == [Cut("flush", joins=7), Cut("flush"), Cut("flush", joins=2)]
    assert (server.version, server.arrivals_waiting) == (3, 0)
    state = server.state_dict()
    server.close()
    with Server.open(tmp_path / "store") as opened:
        log = opened.log
        assert log == server.log
    again = replay(log, fresh(), lambda join: vectors[join.number])
    assert json.dumps(again.state_dict()["meta"]) == json.dumps(state["meta"])
    assert bits(again.params) == bits(server.params)
    loaded = fresh()
    loaded.load_state_dict(json.loads(json.dumps({"meta": state["meta"]})) | {"arrays": state["arrays"]})
    assert loaded.log == server.log


FAULTS = {
    "a NaN": (lambda good: {"update": good * np.nan}, "non-finite value at index 0"),
    "too large": (lambda good: {"update": good * 1e20}, "max_abs is 1e"),
    "a wrong length": (lambda good: {"update": good[1:]}, "has 59 elements"),
    "a wrong version": (lambda good: {"version": 7}, "pulled version 7"),
    "integers": (lambda good: {"update": good.astype(int)}, "is int64, expected"),
    "a missing fact": (lambda good: {"facts": {"unknown": 1.0}}, "unknown"),
}


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_step_changes_nothing(fault, store, tmp_path):
    """Neither a number nor an entry of the log; the tasks are open, and the server goes on."""
    make, message = FAULTS[fault]
    server = Server(
        fadas(buffer_size=2), np.zeros(D, np.float32), log=True, **({"store": tmp_path / "s"} if store else {})
    )
    good = np.ones(D, np.float32)
    server.step([(client, 0, good.copy()) for client in range(3)])
    server.push(client=9, version=0, update=good)
    tasks = [server.checkout(client) for client in range(2)]
    before, log = everything(server, counts=False), server.log
    bad = {"client": 5, "version": 1, "update": good.copy()} | make(good)
    with pytest.raises(AffluxError, match=f"client 5.*{message}"):
        server.step([{"task": tasks[0], "update": good}, bad, {"task": tasks[1], "update": good.copy()}])
    assert everything(server, counts=False) == before
    assert (server.log, server.counts["refused"], slots_taken(server)) == (log, 1, 1)
    assert server.tasks == tuple(tasks)
    receipts, report = server.step([{"task": task, "update": good.copy()} for task in tasks])
    assert (report.version, [receipt.join for receipt in receipts]) == (2, [4, 5])


@pytest.mark.parametrize("fault", FAULTS)
def test_with_recorded_faults_the_round_is_made_of_the_rest(fault):
    make, message = FAULTS[fault]
    server = Server(fadas(buffer_size=2), np.zeros(D, np.float32), faults="record")
    good = np.ones(D, np.float32)
    bad = {"client": 5, "version": 0, "update": good.copy()} | make(good)
    receipts, report = server.step([(1, 0, good), bad, (2, 0, good.copy())])
    assert [receipt.status for receipt in receipts] == ["joined", "faulty", "joined"]
    assert message in receipts[1].reason
    assert (report.client_ids, server.counts["faulty"], server.faults[0].client_id) == ((1, 2), 1, 5)
    only, report = server.step([bad])
    assert (only[0].status, report, server.version, server.counts["faulty"]) == ("faulty", None, 1, 2)


def test_a_rule_that_fails_refuses_the_step():
    def fails(arrivals):
        if len(arrivals) > 2:
            raise RuntimeError("own")
        return Weights(np.ones(len(arrivals)))

    server = Server(Rule("own", "update", 9, fails, NONE, Sgd(1.0)), np.zeros(3), log=True)
    entries = [(client, 0, np.ones(3)) for client in range(3)]
    check_error("own", server.step, entries, error=RuntimeError)
    assert (server.joins, server.log, server.arrivals_waiting, slots_taken(server)) == (0, (), 0, 0)
    assert server.step(entries[:2])[1].version == 1


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e9}, {"faults": "record"}], ids=str)
def test_pushes_of_one_memory_are_refused(options):
    """Whether the round reads them in place or not; it is no fault of a client."""
    server, buffer = Server(fedavg(), tree(np.zeros(D, np.float32)), **options), tree(np.ones(D, np.float32))

    def finished():
        for client in ("ann", "bob", "eve"):
            yield client, 0, buffer if client != "bob" else tree(np.ones(D, np.float32))

    flat = np.ones(D, np.float32)
    for pushes, names in (
        (finished(), "push 0 .*'ann'.* and push 2 .*'eve'.* (dense.w|conv|scale)"),
        ([("ann", 0, flat), ("bob", 0, flat[:])], "the vector"),
    ):
        check_error(rf"^\[step\] .*{names},.*copy", server.step, pushes)
        assert (server.joins, server.version, server.counts["faulty"]) == (0, 0, 0)


def test_out_is_checked_before_the_step_and_written_after_it():
    server = Server(fedavg(), tree(np.zeros(D, np.float32)))
    mine = tree(np.zeros(D, np.float32))
    server.step([("ann", 0, tree(np.ones(D, np.float32)))], out=mine)
    assert mine["dense"]["w"].tolist() == np.ones((5, 7)).tolist()
    flat = np.zeros(D, np.float32)
    server.step([("ann", 0, tree(np.full(D, 2.0, np.float32)))], out=flat)
    assert flat.tolist() == [3.0] * D
    fixed = read_only(np.zeros(D, np.float32))
    for wrong in (mine | {"conv": np.zeros(3)}, flat[1:], {"conv": mine["conv"]}, fixed, flat.astype(int)):
        check_error(r"\[step\] out", server.step, [("ann", 0, tree(np.ones(D, np.float32)))], out=wrong)
    assert server.version == 2


@pytest.mark.parametrize(
    ("pushes", "message"),
    [
        (7, r"\[step\] pushes"),
        ({"ann": np.ones(3)}, r"\[step\] pushes is a dict, must be a list of"),
        (("a", 0, 1), "push 0 of the list is 'a', must be"),
        ([(1, 0)], r"push 0 of the list is .*, must be \(client, version, vector\)"),
        ([{"client": 1, "version": 0, "vector": 1}], "push 0 of .* or a dict of push's arguments: .*'vector'"),
        ([{"client": 1, "version": 0, "update": np.ones(3), "timeout": 1.0}], "timeout is no argument"),
        ([(1, 0, np.ones(3)), (None, 0, np.ones(3))], "give task=, or client= and version="),
        ([{"client": 1, "version": 0}], "give one of update=, gradient= and model=, not none of them"),
    ],
)
def test_wrong_pushes(pushes, message):
    server = Server(fedbuff(), np.zeros(3), faults="record")
    check_error(message, server.step, pushes)
    assert (server.joins, server.counts["refused"], slots_taken(server)) == (0, 1, 0)


def test_steps_are_reported_and_dropped_work_is_logged(caplog):
    reports = []
    server = Server(fedbuff(), np.zeros(3), on_step=reports.append, max_staleness=0, rounds="flush")
    ones = np.ones(3)
    server.step([(1, 0, ones)])
    receipts, report = server.step([(1, 0, ones), (2, 1, ones.copy()), {"client": 3, "version": 1, "num_examples": 0}])
    assert [receipt.status for receipt in receipts] == ["dropped", "joined", "empty"]
    assert reports[-1] is report
    assert [each.version for each in reports] == [1, 2]
    assert ["a push of client 1 is dropped" in text for text in caplog.messages] == [True]


def test_rounds_that_only_flush_ends():
    """Any number of arrivals waits, also in a state."""
    server = Server(fedbuff(buffer_size=2), np.zeros(3), rounds="flush")
    for client in range(9):
        assert server.push(client=client, version=0, update=np.ones(3)).report is None
    assert (server.arrivals_waiting, server.version) == (9, 0)
    other = Server(fedbuff(buffer_size=2), np.zeros(3), rounds="flush")
    other.load_state_dict(server.state_dict())
    check_error("9 arrivals wait", Server(fedbuff(buffer_size=2), np.zeros(3)).load_state_dict, server.state_dict())
    assert [each.flush().client_ids for each in (server, other)] == [tuple(range(9))] * 2


def test_a_push_does_not_wait_for_a_flush_that_may_be_its_own():
    """A step needs no free slot."""
    server = Server(fedbuff(buffer_size=2), np.zeros(3), rounds="flush", max_slots=2)
    push_all(server, range(2), np.ones(3))
    check_error("all 2 .*max_slots", server.push, client=3, version=0, update=np.ones(3), error=BusyError)
    assert len(server.step([(client, 0, np.ones(3)) for client in range(3)])[1].client_ids) == 5
    assert slots_taken(server) == 0


def test_the_default_is_not_in_stores(tmp_path):
    """So that the version of afflux before the option opens them."""
    with Server(fedbuff(), np.zeros(3), store=tmp_path / "full") as full:
        assert "rounds" not in full.options.stored()["options"]
    with Server.open(tmp_path / "full") as opened:
        assert opened.options.rounds == "full"


def test_a_step_of_models_mixes_as_pushes_do():
    pushes, steps = (made(fedasync(alpha=0.5)) for _ in range(2))
    same(pushes, steps, list(variants.trace("fedasync", 3, 1)))
    assert [type(entry) for entry in steps.log] == [Join, Cut] * 3


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_round_of_several_models_stays_between_them(accumulate):
    """The mean of the rounds of one model each."""
    server = Server(fedasync(alpha=0.5), np.zeros(3), first_version=3, rounds="flush", accumulate=accumulate)
    for client, staleness in enumerate((0, 0, 3)):
        server.push(client=client, staleness=staleness, model=np.full(3, 1.0 + client))
    server.flush()
    assert server.params.tolist() == [(0.5 * 1.0 + 0.5 * 2.0 + 0.25 * 3.0) / 3] * 3


IN_PLACE = {
    "fedbuff": (lambda: fedbuff(buffer_size=3), {}),
    "fadas": (lambda: fadas(buffer_size=3), {}),
    "momentum": (lambda: replace(fedbuff(buffer_size=3), step=Momentum(0.5)), {}),
    "twafl": (lambda: twafl(buffer_size=3), {}),
    "fedasync": (lambda: fedasync(), {}),
    "bfloat16": (lambda: fadas(buffer_size=3), {"slot_dtype": "bfloat16"}),
    "float64": (lambda: fadas(buffer_size=3), {"dtype": "float64"}),
}


def awkward_trees(flat):
    """One vector as trees that the engine reads in place, or converts: other dtypes, strides, addresses, libraries."""
    yield tree(flat.copy())
    own = tree(flat.copy())
    yield own | {"conv": own["conv"].astype(np.float64), "dense": own["dense"] | {"b": own["dense"]["b"].astype("f2")}}
    yield tree(flat.copy()) | {"conv": np.asfortranarray(own["conv"])}
    odd = np.frombuffer(b"\0" + own["conv"].tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 7)
    yield tree(flat.copy()) | {"conv": odd}
    yield tree(flat.copy()) | {"conv": own["conv"].astype(">f4")}
    yield flat.astype(np.float64)
    yield np.repeat(flat, 2)[::2]


@pytest.mark.parametrize("name", IN_PLACE)
def test_vectors_that_are_read_in_place_have_the_bits_of_slots(name, monkeypatch, rng):
    """No vector is copied into a slot, whatever its arrays are."""
    make, options = IN_PLACE[name]
    pushes, steps = (made(make(), **options) for _ in range(2))
    for _ in range(3):
        flat = rng.standard_normal(D).astype(np.float32)
        trees = [*awkward_trees(flat)]
        kinds = [steps.rule.kind] * 3 if name == "twafl" else [steps.rule.kind, "update", "model"]
        entries = [{"client": i, "version": steps.version, kinds[i % 3]: each} for i, each in enumerate(trees)]
        expected, report = pushed(pushes, entries)
        with monkeypatch.context() as patch:
            patch.setattr(type(aggregator_of(steps).plane), "reserve", None)
            receipts, other = steps.step(entries)
        assert receipts == expected
        assert everything(pushes) == everything(steps)
        assert np.isnan(other.norms).all()
        assert np.isfinite(report.norms).all()


def test_a_module_is_read_in_place(monkeypatch):
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    start, local = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    local(torch.randn(5, 3))
    pushes, steps = (Server(fadas(buffer_size=1), start, rounds="flush", log=True) for _ in range(2))
    entries = [{"client": i, "version": 0, "model": m} for i, m in enumerate([local, deepcopy(local).state_dict()])]
    expected, _ = pushed(pushes, entries)
    with monkeypatch.context() as patch:
        patch.setattr(type(aggregator_of(steps).plane), "reserve", None)
        assert steps.step(entries)[0] == expected
    assert everything(pushes) == everything(steps)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_value_that_is_not_valid_changes_nothing_wherever_it_is(value, weight, tmp_path):
    """Also that of a vector whose weight is 0, which the sweep does not read: a push would have refused it."""

    def weigh(arrivals):
        return np.array([weight if client == 2 else 1.0 for client in arrivals.client_ids])

    rule = Rule("own", "update", 9, weigh, NONE, fadas().step)
    for store in ({}, {"store": tmp_path / "s"}, {"store": tmp_path / "rarely", "commit_every": None}):
        server = Server(rule, tree(np.zeros(D, np.float32)), **store)
        server.step([(client, 0, tree(np.ones(D, np.float32))) for client in range(3)])
        before = everything(server, counts=False)
        for index in (0, 20, 59):
            bad = np.ones(D, np.float32)
            bad[index] = value
            array = "conv" if index < 21 else "dense.b"
            with pytest.raises(AffluxError, match=rf"client 2's update has .* at index {index} \(in {array}\)"):
                server.step([(client, 1, tree(bad if client == 2 else np.ones(D, np.float32))) for client in range(5)])
            assert everything(server, counts=False) == before
        assert server.step([(client, 1, tree(np.ones(D, np.float32))) for client in range(3)])[1].version == 2
        server.__exit__(None, None, None)


def test_rule_vectors_have_one_spare():
    """Two sets of memory are used by turns, also between steps and rounds of pushes."""
    server, seen = Server(fadas(buffer_size=1), np.zeros(D, np.float32)), []
    for number in range(6):
        if number == 3:
            server.push(client=1, version=number, update=np.ones(D, np.float32))
        else:
            server.step([(1, number, np.ones(D, np.float32))])
        vectors = aggregator_of(server).admission.rule_vectors
        seen.append([vectors[name].ctypes.data for name in vectors])
    assert seen[0] == seen[2] == seen[3] == seen[5] != seen[1] == seen[4]


def test_on_step_finds_no_slot_and_no_older_version_in_use():
    held = []

    def on_step(_):
        held.append((slots_taken(server), server.versions_held))

    server = Server(ca2fl(buffer_size=2), np.zeros(3), num_clients=3, on_step=on_step)
    server.step((client, server.pull(), np.ones(3)) for client in range(3))
    assert held == [(0, 1)]


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda arrivals: 1.0 / arrivals.norms, r"norms are for rules .* needs = Needs\(norms=True\)"),
        (lambda arrivals: arrivals.gram[0], r"gram is for rules .* needs = Needs\(gram=True\)"),
        (lambda arrivals: arrivals.facts["q"], r"fact 'q' is for rules .* Needs\(facts=\('q',\)\)"),
    ],
)
def test_a_rule_that_reads_what_it_does_not_need_says_so(weigh, message):
    """Else its bits would depend on whether a vector was copied, and its errors would not name what it lacks."""
    rule = replace(fedbuff(buffer_size=1), weigh=weigh)
    server = Server(rule, np.zeros(3))
    before = server.state_dict()
    for call in (server.push, lambda **one: server.step([one])):
        with pytest.raises(AffluxError, match=message):
            call(client=7, update=np.ones(3, np.float32), version=0)
    assert (server.version, server.arrivals_waiting) == (0, 0)
    assert server.params.tobytes() == before["arrays"]["params"].tobytes()


def test_a_call_that_is_refused_within_a_rule_counts():
    def calls(arrivals):
        check_error("within the rule's weigh", server.push, client=9, version=0, update=np.ones(3))
        return np.ones(len(arrivals))

    server = Server(Rule("own", "update", 1, calls, NONE, Sgd(1.0)), np.zeros(3))
    server.step([(1, 0, np.ones(3))])
    assert (server.counts["refused"], server.counts_since_round["refused"]) == (1, 0)


def test_the_error_of_a_store_says_whether_the_pushes_have_joined(tmp_path, monkeypatch):
    server = Server(fedbuff(), np.zeros(3), store=tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(server._store._index, "commit", raising(StoreError, "the disk is full"))
        for joined, message in ((True, "full; the pushes have joined: do not push them again"), (False, "not joined")):
            entries = [(client, 0, np.ones(3)) for client in range(2)]
            assert check_error(message, server.step, entries, error=StoreError).joined is joined
            assert server.counts["joined"] == 2
    assert (server.flush(), server.version) == (None, 1)


def test_a_vector_that_only_the_engine_can_read():
    """It has no slices."""

    vector = np.arange(D, dtype=np.float32)
    server = made(fedbuff())
    server.step([(1, 0, Dlpack(vector))])
    assert server.params.tobytes() == (np.linspace(-1, 1, D).astype(np.float32) + vector).tobytes()


def test_a_vector_that_no_round_reads_is_checked():
    server = made(fedbuff(), max_staleness=0)
    server.step([(1, 0, np.ones(D, np.float32))])
    check_error("non-finite value at index 0", server.step, [(1, 0, np.full(D, np.nan, np.float32))])
    assert (server.joins, server.counts["dropped"]) == (1, 0)


def test_a_step_may_have_more_pushes_than_the_server_has_slots():
    server, again = (Server(fedbuff(buffer_size=1), np.zeros(3), log=True, max_slots=2) for _ in range(2))
    server.step([(client, 0, np.ones(3)) for client in range(4)])
    assert replay(server.log, again, lambda join: np.ones(3)).params.tolist() == server.params.tolist()


def test_slots_may_be_arrays_without_a_truth_value(monkeypatch):
    """As those on a GPU."""
    server = made(ca2fl(buffer_size=3))
    monkeypatch.setattr(aggregator_of(server).plane, "reserve", lambda counted=True: np.empty(D, np.float32))
    assert server.step([(1, 0, np.ones(D, np.float32))])[1].version == 1


@pytest.mark.parametrize("plane", [None, 2])
@pytest.mark.parametrize("form", ["nested", "channels last", "transposed", "offset", "dlpack", "contiguous"])
def test_replies_that_are_one_memory(form, plane):
    """Replies in a buffer that the next reply overwrites, as the engine reads it, or in copies."""
    buffer, flat = np.zeros((3, 2), np.float32), np.zeros((9, 2), np.float32)
    net = torch.nn.Conv2d(3, 2, 2, bias=False).to(memory_format=torch.channels_last)

    def reply(i):
        buffer[:] = i
        flat[i : i + 6, 0] = i
        with torch.no_grad():
            net.weight.fill_(float(i))
        return {
            "nested": {"a": {"w": buffer}},
            "channels last": {"a": net.state_dict()},
            "transposed": {"w": buffer.T},
            "offset": flat[i : i + 6, 0],
            "dlpack": Dlpack(buffer.reshape(-1)),
            "contiguous": buffer.reshape(-1)[:6],
        }[form]

    first = reply(0)
    params = np.zeros(6, np.float32) if form in ("offset", "dlpack", "contiguous") else deepcopy(first)
    server = Server(fedavg(), params, plane=plane and ShardedPlane(plane))
    pushes = [{"client": i, "version": 0, "update": reply(i)} for i in (0, 3)]
    check_error(
        r"\[step\] push 0 .*client 0.* and push 1 .*client 3.* share the memory of .* copy", server.step, pushes
    )
    assert (server.version, server.joins) == (0, 0)
    pushes = [{"client": i, "version": 0, "update": deepcopy(reply(i))} for i in (0, 3)]
    server.step(pushes)
    assert server.params.tolist() == [1.5] * server.params.size


def test_columns_of_one_matrix_share_no_element():
    matrix = np.arange(60, dtype=np.float32).reshape(6, 10)
    server = Server(fedavg(), np.zeros(6, np.float32))
    server.step([(i, 0, matrix[:, i]) for i in range(10)])
    assert server.params.tolist() == matrix.mean(axis=1).tolist()


VECTORS = np.random.default_rng(5).standard_normal((3, D)).astype(np.float32)
DICTS = [{"w": vector[:48].reshape(8, 6), "b": vector[48:]} for vector in VECTORS]
#: An entry of a step to a server of version 1, by what it has; `task` is checked out at version 0.
PLAIN = {
    "a tuple": lambda server, task, i: (i, 0, DICTS[i]),
    "a dict": lambda server, task, i: {"client": f"c{i}", "version": 1, "update": DICTS[i], "loss": 0.5 * i},
    "a version": lambda server, task, i: {"client": i, "version": server.pull(), "update": DICTS[i]},
    "a model": lambda server, task, i: {"client": i, "version": server.pull(), "model": DICTS[i]},
    "two versions": lambda server, task, i: {"client": i, "version": i % 2, "model": DICTS[i]},
    "a task": lambda server, task, i: {"task": task, "model": DICTS[i], "num_examples": 3 + i},
    "a task's id": lambda server, task, i: {"task": task.id, "update": DICTS[i], "gradient": None},
}
#: Entries that Python reads.
OTHER = {
    "local steps": lambda server, task, i: {"client": i, "version": 1, "update": DICTS[i], "local_steps": 2},
    "staleness": lambda server, task, i: {"client": i, "staleness": 1, "update": DICTS[i]},
    "no examples": lambda server, task, i: {"client": i, "version": 1, "num_examples": 0},
    "a closed task": lambda server, task, i: {"task": "closed", "update": DICTS[i]},
    "a large id": lambda server, task, i: (2**64 - 1 - i, 1, DICTS[i]),
    "a text of another script": lambda server, task, i: (f"é{i}", 1, DICTS[i]),
}


@pytest.mark.parametrize("what", [*PLAIN, *OTHER, "both"])
def test_entries_that_the_engine_reads_are_as_those_that_python_reads(what):
    """A step of plain entries is taken in by one call; the receipts, the params and the log are those of pushes."""
    servers = [made(fedbuff(buffer_size=3), DICTS[0], duplicates="latest") for _ in range(2)]
    found, tasks = [], [[], []]
    for server, opened in zip(servers, tasks, strict=True):
        opened.extend(server.checkout(i) for i in range(3))
        server.step([(9, 0, DICTS[0])])
        kinds = ["a task", "local steps", "a tuple"] if what == "both" else [what] * 3
        entries = [{**PLAIN, **OTHER}[each](server, opened[i], i) for i, each in enumerate(kinds)]
        if server is servers[0]:
            lent = [*map(bool, aggregator_of(server).admission.take_all(entries, True))]
            assert lent == [each in PLAIN for each in kinds]
            receipts, report = server.step(entries)
        else:
            names = "client", "version", "update"
            given = [each if type(each) is dict else dict(zip(names, each, strict=True)) for each in entries]
            receipts, report = pushed(server, given)
        found.append(([receipt[:4] for receipt in receipts], report and bits(report.weights), bits(server.params)))
        found[-1] += ([entry for entry in server.log if isinstance(entry, Join | Cut)], len(server.tasks))
    assert found[0] == found[1]


@pytest.mark.parametrize("what", PLAIN)
def test_entries_that_the_engine_copies(what):
    """They are copied into slots where the round must not read them; models are left to Python."""
    servers = [made(fedbuff(buffer_size=3), DICTS[0], max_norm=1e6) for _ in range(2)]
    tasks = [[server.checkout(i) for i in range(3)] for server in servers]
    entries = []
    for server, opened in zip(servers, tasks, strict=True):
        server.step([(9, 0, DICTS[0])])
        entries.append([PLAIN[what](server, opened[i], i) for i in range(3)])
    takes = aggregator_of(servers[0]).admission.take_all(entries[0], False)
    assert (takes is None) == any("model" in entry for entry in entries[0] if type(entry) is dict)
    without_fast_path(servers[1])
    receipts, reports = zip(*[server.step(given) for server, given in zip(servers, entries, strict=True)], strict=True)
    assert receipts[0] == receipts[1]
    assert bits(reports[0].norms) == bits(reports[1].norms)
    assert bits(servers[0].params) == bits(servers[1].params)
    takes = None
    assert slots_taken(servers[0]) == slots_taken(servers[1]) == 0


def test_one_task_twice_and_shared_memory_are_left_to_python():
    server, shared = made(fedbuff(buffer_size=2), DICTS[0]), DICTS[0]
    task = server.checkout(1)
    twice = [{"task": task, "update": each} for each in DICTS[:2]]
    assert [receipt.status for receipt in server.step(twice)[0]] == ["joined", "expired"]
    check_error("push 0 of the list .* share the memory", server.step, [(1, 1, shared), (2, 1, shared)])


@pytest.mark.parametrize("faults", ["raise", "record"])
@pytest.mark.parametrize("rule", [ca2fl(buffer_size=2), gsgm(buffer_size=5)], ids=["rows", "pass"])
def test_one_client_more_than_there_is_room_for(rule, faults):
    server = Server(rule, DICTS[0], num_clients=2, faults=faults, log=True)
    entries = [(client, 0, each) for client, each in enumerate(DICTS)]
    assert all(aggregator_of(server).admission.take_all(entries, True))
    if faults == "raise":
        check_error("client 2 would be number 3, but num_clients|of this pass", server.step, entries)
        assert (server.version, server.log, server.clients, slots_taken(server)) == (0, (), set(), 0)
        entries[2] = (0, 0, DICTS[2])
    receipts, report = server.step(entries)
    last = "faulty" if faults == "record" else "replaced" if rule.name == "ca2fl" else "rejected"
    assert [receipt.status for receipt in receipts] == ["joined", "joined", last]
    assert report.client_ids == (0, 1)
    assert server.clients == ({0, 1} if rule.name == "ca2fl" else set())


@pytest.mark.parametrize("shrink", ["numpy", "torch"])
def test_an_array_that_loses_its_memory_while_the_rule_weighs(shrink):
    """The round reads arrays where they are: it looks again at where that is."""
    torch = pytest.importorskip("torch")
    mine = np.ones(D, np.float32) if shrink == "numpy" else torch.ones(D)

    class Shrinking:
        def __call__(self, arrivals):
            mine.resize(0, refcheck=False) if shrink == "numpy" else mine.untyped_storage().resize_(0)
            return np.ones(len(arrivals))

    server = Server(replace(fedavg(), weigh=Shrinking()), np.zeros(D, np.float32))
    check_error("client 1's update", server.step, [(1, 0, mine), (2, 0, VECTORS[0])])
    assert (server.version, slots_taken(server)) == (0, 0)


def test_a_step_that_gives_up_the_version_of_a_task():
    server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32), max_versions=2)
    server.checkout(1)
    for version in range(3):
        receipts, _ = server.step([(2, version, VECTORS[0])])
        assert [receipt.status for receipt in receipts] == ["joined"]
    assert server.counts["refused"] == 0


def test_an_entry_is_read_once():
    """Also if the vectors are then copied, because the round does not read one where it is."""
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32), max_staleness=0)
    server.step([(0, 0, VECTORS[0])])
    receipts, _ = server.step([iter((1, 0, VECTORS[0])), iter((2, 1, VECTORS[1]))])
    assert [receipt.status for receipt in receipts] == ["dropped", "joined"]


def test_an_interrupt_amid_the_publication_of_a_step(monkeypatch):
    """The next call publishes the round."""
    server = Server(fedbuff(buffer_size=9), np.zeros(D, np.float32))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(aggregator_of(server), "_publish", raising(KeyboardInterrupt))
        server.step([(0, 0, VECTORS[0])])
    server.push(client=1, version=0, update=VECTORS[1])
    assert (server.version, server.pull().version, server.arrivals_waiting) == (1, 1, 1)
