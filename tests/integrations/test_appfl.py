"""APPFL's aggregator by its methods: against FedBuffAggregator, replay, faults, what is sent without an id, resume."""

import importlib
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("appfl", reason="needs appfl: make test-integrations")

import torch
from appfl.algorithm.aggregator import FedBuffAggregator
from appfl.algorithm.scheduler import AsyncScheduler
from appfl.misc.utils import create_instance_from_file
from omegaconf import OmegaConf

from afflux import AffluxError, Server, replay
from afflux.integrations import _core
from afflux.integrations import appfl as adapter
from afflux.integrations._core import TrainingRun
from afflux.integrations.appfl import AffluxAggregator
from afflux.rules import ca2fl, fadas, fedasync, fedbuff, make
from appfl_here import Net, flat, moved

ROOT = Path(__file__).parents[2]
U32 = 2.0**-24
IDS = [2**63 + 7, "ann", -3, 2**64 - 1]


class Lines(list):
    """A logger."""

    info = list.append


def aggregator(model=None, logger=None, **configs):
    configs = {"K": 2, "num_clients": 4, **configs}
    return AffluxAggregator(model or Net(), OmegaConf.create(configs), logger)


def params(own):
    return own.server.params.tobytes()


def counted(own):
    return {name: count for name, count in own.counts.items() if count}


# The result


@pytest.mark.parametrize(
    "law", [("constant", {}), ("polynomial", {"a": 0.5}), ("hinge", {"a": 10, "b": 1})], ids=lambda law: law[0]
)
def test_the_dialect_equals_fedbuff_of_appfl(law, rng):
    """Theirs rounds each of K differences, their products and sums to float32; ours the result. An earlier error is
    multiplied by |1 - sum of the weights|, which is at most 1.
    """
    size, clients, alpha = 4, 5, 0.9
    settings = {
        "K": size,
        "alpha": alpha,
        "staleness_fn": law[0],
        "staleness_fn_kwargs": law[1],
        "num_clients": clients,
    }
    ours = aggregator(dialect="appfl", **settings)
    theirs = FedBuffAggregator(Net(), OmegaConf.create({**settings, "optimize_memory": False}))
    for own in (ours, theirs):
        for client in range(clients):
            own.get_parameters(client_id=client)
    allowed, stale = 0.0, False
    names = [*Net().state_dict()]
    for step in range(8 * size):
        client = int(rng.integers(clients))
        model = {n: torch.tensor(rng.standard_normal(a.shape), dtype=a.dtype) for n, a in Net().state_dict().items()}
        if rng.random() < 0.3:
            for own in (ours, theirs):
                own.get_parameters(client_id=client, init_model=False)
        mine, other = (own.aggregate(client, model, round=step) for own in (ours, theirs))
        if step % size == size - 1:
            largest = max(np.abs(flat(each)).max() for each in (mine, other, model)) * 1.5
            allowed += U32 * largest * (2 * alpha * size / clients * (size + 3) + 4)
        difference = np.abs(flat({n: mine[n] for n in names}) - flat({n: other[n] for n in names})).max()
        assert difference <= allowed
        stale |= bool(difference)
    assert ours.server.version == 8
    assert stale
    assert np.abs(flat(Net().state_dict()) - flat(mine)).max() > 1000 * allowed  # the bound says something


@pytest.mark.parametrize("rule", ["fedbuff", "ca2fl", "fadas"])
def test_a_run_replays_to_the_same_bits(rule, monkeypatch, rng):
    models, versions, receive = {}, {}, TrainingRun.receive

    def noted(self, key, read):
        versions[self.server.version] = np.array(self.server.params)
        receipt = receive(self, key, read)
        models[receipt.join] = {name: array.numpy().copy() for name, array in read().arrays.items()}
        return receipt

    monkeypatch.setattr(TrainingRun, "receive", noted)
    own = aggregator(rule=rule, server_options={"log": True})
    held = {client: own.get_parameters(client_id=client) for client in IDS}
    for step in range(13):
        client = IDS[int(rng.integers(4))]
        held[client] = own.aggregate(client, moved(held[client], float(rng.standard_normal())), round=step)
    server = own.server
    assert server.version == 6
    assert max(entry.staleness for entry in server.log if hasattr(entry, "staleness")) > 0
    fresh = Server(server.rule, Net(), log=True, num_clients=server.options.num_clients, faults="record")

    def update(join):
        base = fresh.layout.views(versions[join.version])
        return {name: array - base[name] for name, array in models[join.number].items()}

    assert replay(server.log, fresh, update).params.tobytes() == params(own)


def test_what_clients_get_is_theirs():
    """In whatever way they write to it."""
    own = aggregator()
    before, models = params(own), [own.get_parameters(client_id=client) for client in range(4)]
    models.append(own.aggregate(0, moved(models[0], 1.0)))
    other = own.get_parameters(client_id="other")
    for write, model in zip(
        (
            lambda array: array.zero_(),
            lambda array: array.numpy().fill(0),
            lambda array: array.data.mul_(0),
            lambda array: array.view(-1)[1:].zero_(),
            lambda array: torch.from_dlpack(array).zero_(),
        ),
        models,
        strict=True,
    ):
        for array in model.values():
            write(array)
        assert params(own) == before
        assert flat(other).astype(np.float32).tobytes() == before
        assert flat(own.get_parameters()).astype(np.float32).tobytes() == before
        assert flat(model).astype(np.float32).tobytes() != before


def test_batch_norm_other_buffers_and_bfloat16():
    """APPFL's trainers send buffers that a state_dict leaves out, too."""
    net = Net(statistics=True)
    net.brief = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    own = aggregator(net)
    for client in (1, 2):
        model = own.get_parameters(client_id=client)
        assert {name: array.dtype for name, array in model.items()} == {n: a.dtype for n, a in net.state_dict().items()}
        result = own.aggregate(client, {**moved(model, 2.0), "unsaved": torch.ones(3)})
    assert own.counts["joined"] == 2
    for name, array in net.state_dict().items():
        added = 2.0 if array.is_floating_point() else 1
        assert torch.allclose(result[name], array + added, rtol=0, atol=1e-6), name
    net.load_state_dict(result)


# What clients send


def spoiled(kind, model):
    """A model and what the trainer says, of no use."""
    first = next(iter(model))
    if kind == "nan":
        return {**model, first: model[first] * float("nan")}
    if kind == "shape":
        return {**model, first: torch.zeros(7)}
    if kind == "name":
        return {f"{name}_": array for name, array in model.items()}
    if kind == "missing":
        return {name: array for name, array in model.items() if name != first}
    if kind == "more":
        return {**model, "more": torch.zeros(2)}
    if kind == "text":
        return {**model, first: "text"}
    if kind == "device":
        return {**model, first: torch.empty(3, 4, device="meta")}
    if kind == "sparse":
        return {**model, first: model[first].to_sparse()}
    if kind == "complex":
        return {**model, first: model[first].to(torch.complex64)}
    if kind == "objects":
        return {**model, first: np.array([object()] * 12).reshape(3, 4)}
    return {"none": None, "bytes": b"model", "list": [*model.values()], "empty": {}, "number": 10**400}[kind]


MODELS = [
    "nan",
    "shape",
    "name",
    "missing",
    "more",
    "text",
    "objects",
    "device",
    "sparse",
    "complex",
    "none",
    "bytes",
    "list",
    "empty",
    "number",
]
SIZES = {"zero": 0, "negative": -3, "huge": 10**400, "text size": "ten", "half": 0.5}


@pytest.mark.parametrize("rule", ["fedbuff", "ca2fl", "fedavg"])
@pytest.mark.parametrize("kind", [*MODELS, *SIZES])
def test_a_model_that_is_of_no_use_changes_nothing_but_a_count(kind, rule):
    """Beside another client that sends such models, the bits are those of the first client alone."""

    def run(others):
        own = aggregator(rule=rule, server_options={"duplicates": "both"})
        own.set_client_sample_size("good", 10)
        own.set_client_sample_size("bad", SIZES.get(kind, 10))
        own.get_parameters(init_model=True)
        for client in ("good", *others):
            held = own.get_parameters(client_id=client)
        for step in range(6):
            for other in others:
                sent = own.aggregate(other, spoiled(kind, held) if kind in MODELS else moved(held, 3.0), round=step)
                assert [*sent] == [*held]
            held = own.aggregate("good", moved(held, 1.0), round=step)
        return own

    alone, own = run(()), run(("bad",))
    assert params(own) == params(alone)
    assert own.server.version == 3
    counts = counted(own)
    assert counts.pop("joined") == 6
    assert counts == {"empty" if kind == "zero" else "faulty": 6}


@pytest.mark.parametrize(
    "report",
    [
        {"val_accuracy": 10**400, "val_loss": -(10**5000), "round": 10**400, "current_local_steps": 10**400},
        {"val_accuracy": float("nan"), "val_loss": float("inf"), "round": float("nan")},
        {"val_accuracy": [0.1, "x"], "val_loss": [], "round": None, "current_local_steps": -1},
        {"val_accuracy": torch.ones(3), "val_loss": {"a": 1}, "round": "first", "self": 3, "": 10**400},
        {"val_accuracy": 1.7e308, "val_loss": 1.7e308, "client_lr": "x", "\ud800": "\ud800"},
    ],
    ids=["huge", "not finite", "lists", "types", "sums"],
)
def test_what_a_trainer_reports_raises_at_no_other_client(report, tmp_path):
    own = aggregator(store=tmp_path / "store", checkpoint_every=1, rule="fedavg", K=4)
    report = {name: value for name, value in report.items() if name != "self"}
    for client in range(4):
        own.set_client_sample_size(client, 2**62)
        own.get_parameters(client_id=client)
    held = own.get_parameters(init_model=False)
    own.aggregate(0, moved(held, 1.0), **report)
    own.aggregate(1, moved(held, 1.0), **report)
    own.aggregate(2, moved(held, 1.0), val_loss=2.0)
    own.aggregate(3, moved(held, 1.0), val_accuracy=[0.25, 0.5], val_loss=torch.tensor(4.0))
    assert own.counts["joined"] == 4
    assert set(own.metrics[1]) <= {"val_loss", "val_accuracy"}
    own.close()
    again = aggregator(store=tmp_path / "store", rule="fedavg", K=4)
    assert again.metrics == own.metrics
    again.close()


@pytest.mark.parametrize(
    "client", [None, 1.5, True, [1], {}, object(), 2**64, -(2**63) - 1, "\ud800", b"ann", torch.ones(1)]
)
def test_what_is_no_id_changes_nothing_but_a_count(client):
    own = aggregator()
    before, held = params(own), own.get_parameters(client_id=client)
    own.set_client_sample_size(client, 3)
    assert flat(own.aggregate(client, moved(held, 1.0))).astype(np.float32).tobytes() == before
    assert counted(own) == {"unknown": 1}
    assert own.server.tasks == ()


def test_parameters_and_strided_tensors_are_models():
    own = aggregator()
    held = own.get_parameters(client_id="a")
    own.aggregate("a", {name: torch.nn.Parameter(array + 1) for name, array in held.items()})
    held = own.get_parameters(client_id="b")
    own.aggregate("b", {name: torch.stack([array + 1] * 2, -1)[..., 0] for name, array in held.items()})
    assert counted(own) == {"joined": 2}
    assert flat(own.get_parameters()) == pytest.approx(flat(held) + 1, abs=1e-6)


def test_ids_of_all_kinds_are_different_clients():
    own = aggregator(K=10, server_options={"log": True}, num_clients=10)
    for client in (1, "1", np.int64(2), -(2**63), 2**64 - 1, "ü"):
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0))
    joined = [entry.client_id for entry in own.server.log if hasattr(entry, "staleness")]
    assert joined == [1, "1", 2, -(2**63), 2**64 - 1, "ü"]


def test_metrics_are_means_by_examples():
    lines = Lines()
    own = aggregator(logger=lines, metrics=["val_accuracy", "own"])
    for client, (size, accuracy) in enumerate([(1, 0.5), (3, 0.9)]):
        own.set_client_sample_size(client, size)
        own.aggregate(
            client, moved(own.get_parameters(client_id=client), 1.0), val_accuracy=accuracy, own=client, other=3
        )
    assert own.metrics == {1: {"val_accuracy": pytest.approx(0.8), "own": pytest.approx(0.75)}}
    assert any("step 1: {'val_accuracy'" in line for line in lines)


# What a client trains from


def two_steps(own):
    """Makes two steps with clients of their own."""
    for _ in range(2):
        for client in ("x", "y"):
            own.aggregate(client, moved(own.get_parameters(client_id=client, init_model=False), 1.0))
    assert own.server.version == 2


def last_join(own):
    return [entry for entry in own.server.log if hasattr(entry, "staleness")][-1]


@pytest.mark.parametrize("given", [{}, {"serial_run": True}, {"init_model": True, "num_batched_clients": 4}])
def test_a_first_model_is_taken_against_what_was_sent_without_an_id(given):
    """gRPC, MPI and serial runs ask for it so."""
    own = aggregator(server_options={"log": True}, num_clients=9)
    first = own.get_parameters(**given)
    two_steps(own)
    for client in ("a", "b"):
        own.aggregate(client, moved(first, 1.0), round=1)
    last = last_join(own)
    assert (last.client_id, last.version, last.staleness) == ("b", 0, 2)
    weight = 1 / np.sqrt(3)  # of staleness 2, the mean of two equal ones
    assert flat(own.get_parameters()) == pytest.approx(flat(first) + 2 + weight, abs=1e-5)
    own.aggregate("a", moved(first, 1.0), round=2)  # its second one is of what the first has returned
    assert last_join(own).version == 2


def test_what_was_sent_without_an_id_counts_while_it_is_one_version():
    own = aggregator(num_clients=9)
    first = own.get_parameters()
    two_steps(own)
    own.get_parameters(init_model=False)  # nobody trains from it
    own.aggregate("a", moved(first, 1.0))
    assert counted(own) == {"joined": 5}
    later = own.get_parameters()  # another client that is not known: which one has which?
    for client, model in (("b", first), ("c", later)):
        before = params(own)
        own.aggregate(client, moved(model, 1.0))
        assert params(own) == before
    assert counted(own) == {"joined": 5, "unknown": 2}
    own.aggregate("b", moved(later, 1.5))
    assert counted(own) == {"joined": 6, "unknown": 2}


def test_same_init_model_sends_one_version_to_all():
    """The scheduler asks once for all, with what the last client says."""
    own = aggregator(num_clients=3)
    scheduler = AsyncScheduler(OmegaConf.create({"num_clients": 3, "optimize_memory": False}), own, None)
    futures = [scheduler.get_parameters(init_model=True, client_id=client) for client in "abc"]
    models = [future.result() for future in futures]
    for client, model in zip("abc", models, strict=True):
        scheduler.schedule(client, moved(model, 1.0), round=1)
    assert counted(own) == {"joined": 3}
    assert scheduler.get_num_global_epochs() == 3  # models of this run, not steps


def test_models_of_another_run_do_not_join(tmp_path):
    own = aggregator(store=tmp_path / "store")
    first = own.get_parameters()
    own.aggregate("a", moved(first, 1.0), round=1)
    held = {client: own.get_parameters(client_id=client) for client in ("b", "c")}
    own.run.checkpoint({"metrics": {}})
    own.server.close(checkpoint=False)  # as if the process had ended
    own = aggregator(store=tmp_path / "store")
    assert own.server.tasks == ()
    before = params(own)
    own.get_parameters()  # of a client that starts again
    for client, model in held.items():
        own.aggregate(client, moved(model, 1.0), round=1)
    assert counted(own) == {"joined": 1, "unknown": 2}
    assert params(own) == before
    for client in held:  # from now on they train for this run
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0), round=2)
    assert counted(own) == {"joined": 3, "unknown": 2}
    own.close()


def test_a_client_that_has_trained_for_another_server_is_not_new():
    own = aggregator()
    held = own.get_parameters()
    own.aggregate("old", moved(held, 1.0), round=7)
    assert counted(own) == {"unknown": 1}


def test_a_client_that_starts_again_without_its_id_is_not_taken_against_its_last_version():
    own = aggregator(num_clients=9)
    held = own.get_parameters(client_id="a")
    for count in (1, 2, 3):
        held = own.aggregate("a", moved(held, 1.0), round=count)
    own.aggregate("a", moved(own.get_parameters(), 9.0), round=1)
    assert counted(own) == {"joined": 3, "unknown": 1}
    own.get_parameters(client_id="a", init_model=False)
    own.aggregate("a", moved(held, 1.0), round=1)
    assert counted(own) == {"joined": 4, "unknown": 1}


def test_a_late_model_has_no_effect_and_its_client_goes_on():
    own = aggregator(timeout=0.05)
    held, without = own.get_parameters(client_id="a"), own.get_parameters()
    time.sleep(0.06)
    before = params(own)
    fresh = own.aggregate("a", moved(held, 1.0))
    own.aggregate("b", moved(without, 1.0))
    assert params(own) == before
    assert counted(own) == {"expired": 1, "unknown": 1}
    own.aggregate("a", moved(fresh, 2.0))
    assert own.counts["joined"] == 1


class Partly(torch.nn.Module):
    """Of which the first, the middle and the last array are frozen."""

    def __init__(self):
        super().__init__()
        for name in "abcde":
            setattr(self, name, torch.nn.Parameter(torch.zeros(3), requires_grad=name in "bd"))


@pytest.mark.parametrize("rounds", [True, False])
def test_trainings_that_look_the_same_are_no_duplicates(rounds):
    """Of arrays that are frozen, of rows of an embedding, and of no change at all."""

    def trained(model, count, kind):
        model = {name: array.clone() for name, array in model.items()}
        if kind == "frozen":
            model["b"] += 1
        elif kind == "sparse":
            model["w"][count * 7 + 3] += 1
        return model

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1000, 8))

    for kind, net in (("frozen", Partly()), ("sparse", Rows()), ("unchanged", Net())):
        own = aggregator(net, K=1)
        held = own.get_parameters(client_id=1)
        for count in range(5):
            report = {"round": count + 1} if rounds else {}
            held = own.aggregate(1, trained(held, count, kind), **report)
        assert counted(own) == {"joined": 5}
        assert own.server.version == 5


def test_a_model_that_comes_twice_counts_once():
    report = {"round": 3, "val_loss": 0.5}
    own = aggregator(K=3)
    held = own.get_parameters(client_id="a")
    sent = moved(held, 1.0)
    answer = own.aggregate("a", sent, **report)
    again = own.aggregate("a", {name: array.clone() for name, array in sent.items()}, **report)
    assert flat(again).tobytes() == flat(answer).tobytes()
    assert counted(own) == {"joined": 1, "unknown": 1}
    own.aggregate("b", moved(own.get_parameters(client_id="b"), 1.0))
    own.aggregate("c", moved(own.get_parameters(client_id="c"), 1.0))
    assert own.server.version == 1
    late = own.aggregate("a", sent, **report)  # what it trains from is what it was sent, not the newest
    assert flat(late).tobytes() == flat(answer).tobytes()
    own.aggregate("a", moved(answer, 1.5), **report)
    assert counted(own) == {"joined": 4, "unknown": 2}
    for _ in range(2):  # two trainings with one result, because each was sent a model
        own.get_parameters(client_id="d")
        own.aggregate("d", sent, **report)
    assert counted(own) == {"joined": 6, "unknown": 2}


def test_new_ids_without_end_take_no_memory():
    own = aggregator(num_clients=20, K=10, server_options={"max_versions": 8})
    held = own.get_parameters(client_id="good")
    good = own.aggregate("good", moved(held, 1.0))
    first = own.get_parameters()
    for number in range(3000):
        own.set_client_sample_size(f"sized {number}", 3)
        model = own.get_parameters(client_id=f"asks {number}", init_model=False)
        own.aggregate(f"first {number}", moved(first, 1.0))
        if number % 3 == 0:
            own.aggregate(f"asks {number}", moved(model, float("nan")))
        if number % 10 == 0:
            good = own.aggregate("good", moved(good, 1.0))
    assert len(own.server.tasks) == own.run.open <= 40
    assert own.server.versions_held <= 8
    clients = own._clients
    for kept in (clients._seen, clients._known, own.run.clients._failures, own.run.clients._ids):
        assert len(kept) <= 40
    joined = own.counts["joined"]
    own.aggregate("good", moved(good, 1.0))
    assert own.counts["joined"] == joined + 1


def test_invented_ids_take_no_place_of_a_client():
    """Neither of one whose model has joined, nor of one that comes later."""
    own = aggregator(rule="fedavg", K=100, num_clients=4, client_weights_mode="sample_size")
    own.set_client_sample_size("early", 10)
    early = own.aggregate("early", moved(own.get_parameters(client_id="early"), 1.0))
    for number in range(50):
        own.set_client_sample_size(f"invented {number}", 3)
        own.aggregate(f"invented {number}", {})
    assert own.run.open == 8
    before = own.counts["unknown"]
    own.set_client_sample_size("late", 10)
    late = own.get_parameters(client_id="late")
    for client, model in (("early", early), ("late", late)):
        own.aggregate(client, moved(model, 1.0))
    assert own.counts["unknown"] == before
    assert own.counts["joined"] == 3
    assert own.run.open == len(own._clients._known) == 8


def test_clients_whose_time_is_over_give_way_to_others():
    own = aggregator(num_clients=4, timeout=0.05, K=100)
    for client in range(8):
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0))
    time.sleep(0.06)
    held = {f"new {client}": own.get_parameters(client_id=f"new {client}") for client in range(8)}
    assert own.run.open == 8
    assert own.counts["overdue"] == 8
    for client, model in held.items():
        own.aggregate(client, moved(model, 1.0))
    assert own.counts["joined"] == 16
    assert own.counts["unknown"] == 0


def test_versions_are_bounded_over_many_models():
    own = aggregator(num_clients=50, K=5)
    held = {client: own.get_parameters(client_id=client) for client in range(50)}
    rng, most = np.random.default_rng(0), 0
    for step in range(10_000):
        client = int(rng.integers(50)) if step % 100 else int(rng.integers(10**9, 10**10))
        held[client % 50] = own.aggregate(client, moved(held[client % 50], 0.001), round=step)
        most = max(most, own.server.versions_held)
    assert own.counts["joined"] == 9_900
    assert own.counts["unknown"] == 100
    assert most <= 64
    assert len(own.metrics) == 1000


def test_threads_may_call_at_the_same_time():
    """As in APPFL's gRPC server: only `aggregate` is inside the scheduler's lock."""
    own = aggregator(num_clients=8, K=3)
    failed = []

    def client(name):
        try:
            held = own.get_parameters(client_id=name)
            own.set_client_sample_size(name, 5)
            for count in range(50):
                held = own.aggregate(name, moved(held, 0.5), round=count + 1)
                own.get_parameters(init_model=False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert counted(own) == {"joined": 400}


# Configuration


def test_rules_from_configurations():
    assert aggregator(rule="fedbuff", K=3).server.rule == fedbuff(buffer_size=3)
    assert AffluxAggregator(Net(), {"rule": "fedasync", "alpha": 0.25}).server.rule == fedasync(alpha=0.25)
    assert aggregator(rule="ca2fl", alpha=0.5).server.rule == ca2fl(buffer_size=2, server_lr=0.5)
    text = OmegaConf.create("{K: 4, alpha: 0.5, staleness_fn: hinge, staleness_fn_kwargs: {a: 5, b: 2}}")
    law = {"part": "hinge", "a": 5, "b": 2}
    assert AffluxAggregator(Net(), text).server.rule == make("fedbuff", buffer_size=4, server_lr=0.5, staleness=law)
    whole = AffluxAggregator(Net(), {"rule": fadas(buffer_size=3).to_config()})
    assert whole.server.rule == fadas(buffer_size=3)
    by_default = AffluxAggregator(Net(), OmegaConf.create({"optimize_memory": False}))
    assert by_default.server.rule == fedbuff()


def test_equal_weights_are_equal():
    def run(**configs):
        own = aggregator(rule="fedavg", K=2, **configs)
        for client, size in ((1, 1), (2, 99)):
            own.set_client_sample_size(client, size)
        held = {client: own.get_parameters(client_id=client) for client in (1, 2)}
        for client, value in ((1, 0.0), (2, 2.0)):
            result = own.aggregate(client, moved(held[client], value))
        return (flat(result) - flat(held[1])).mean()

    assert run(client_weights_mode="equal") == pytest.approx(1.0, abs=1e-6)
    assert run(client_weights_mode="sample_size") == run() == pytest.approx(1.98, abs=1e-6)
    lacks = aggregator(rule="fedavg", client_weights_mode="equal")
    lacks.aggregate(1, moved(lacks.get_parameters(client_id=1), 1.0))
    assert lacks.counts["joined"] == 1


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"rule": "fedbufff"}, "must be a rule"),
        ({"staleness": "linear"}, "staleness"),
        ({"buffer_size": 3}, "K is the name of buffer_size"),
        ({"poll_interval": 1}, "no option 'poll_interval'"),
        ({"K": "many"}, "buffer_size"),
        ({"server_options": {"faults": "raise"}}, 'faults="raise"'),
        ({"server_options": {"inplace": True}}, "inplace=True"),
        ({"server_options": {"stalenes": 3}}, "server_options"),
        ({"gradient_based": True}, "send_gradient"),
        ({"use_secure_agg": True}, "use_secure_agg"),
        ({"client_weights_mode": "other"}, "client_weights_mode"),
        ({"dialect": "appfl", "client_weights_mode": "sample_size"}, "client_weights_mode"),
        ({"rule": "ca2fl", "num_clients": None}, "num_clients is missing"),
        ({"rule": "ca2fl", "num_clients": 1}, "exceeds num_clients"),
        ({"rule": "wkafl"}, "client_lr is missing"),
        ({"timeout": 0}, "timeout"),
        ({"metrics": "val_loss"}, "metrics"),
        ({"num_clients": 0}, "num_clients"),
        ({"model": [np.zeros(3)]}, "torch module"),
        ({"rule": {"part": "rule"}}, "given whole"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_configuration_is_refused(configs, message):
    with pytest.raises(AffluxError, match=re.escape(message)):
        aggregator(**configs)


def test_rules_that_take_gradients():
    own = aggregator(rule="wkafl", client_lr=0.1, num_clients=4)
    for client in range(4):
        steps = {} if client == 3 else {"current_local_steps": 5}
        own.aggregate(client, moved(own.get_parameters(client_id=client), 1.0), **steps)
    assert counted(own) == {"joined": 3, "faulty": 1}
    assert "local_steps" in own.server.faults[0].reason


MODEL_FILE = """
import torch

class Small(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(size))

def small(size=2):
    return Small(size)
"""


def test_the_model_of_the_configuration(tmp_path):
    """`aggregator_path` passes no model: it is made as APPFL's ServerAgent makes it."""
    path = tmp_path / "small.py"
    path.write_text(MODEL_FILE)
    state = torch.get_rng_state()
    named = AffluxAggregator(
        aggregator_configs={
            "model_configs": {"model_path": str(path), "model_name": "Small", "model_kwargs": {"size": 3}}
        }
    )
    by_function = AffluxAggregator(aggregator_configs={"model_configs": {"model_path": str(path), "seed": 1}})
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(42)
    assert torch.equal(named.get_parameters()["w"], torch.randn(3))
    torch.manual_seed(1)
    assert torch.equal(by_function.get_parameters()["w"], torch.randn(2))
    with pytest.raises(AffluxError, match="there is no model"):
        AffluxAggregator(aggregator_configs={"K": 2})
    with pytest.raises(AffluxError, match="gives no model"):
        AffluxAggregator(aggregator_configs={"model_configs": {"model_path": str(tmp_path / "none.py")}})


def test_a_store_goes_on_and_knows_its_own(tmp_path):
    def own(model=None, **configs):
        return aggregator(model, store=str(tmp_path / "store"), checkpoint_every=1, **configs)

    first = own(rule="ca2fl")
    held = {client: first.get_parameters(client_id=client) for client in "ab"}
    for client in "ab":
        first.aggregate(client, moved(held[client], 1.0), val_loss=2.0)
    first.aggregate("a", moved(held["a"], 3.0))
    first.close()
    second = own(rule="ca2fl")
    assert second.server.version == 1
    assert second.server.arrivals_waiting == 1
    assert second.metrics == {1: {"val_loss": 2.0}}
    assert len(second.server.rows) == 2
    second.close()
    with pytest.raises(AffluxError, match="another model"):
        own(torch.nn.Linear(2, 2), rule="ca2fl")
    with pytest.raises(Exception, match="fadas"):
        own(rule="fadas")
    third = own(rule="ca2fl")
    third.server.checkpoint({"epoch": 3})
    third.server.close(checkpoint=False)
    with pytest.raises(AffluxError, match="notes are not those of this adapter"):
        own(rule="ca2fl")


# Versions of APPFL


def test_another_version_of_appfl_warns(monkeypatch):
    monkeypatch.setattr(_core, "version", lambda name: "1.13.0")
    with pytest.warns(RuntimeWarning, match=r"tested with appfl 1\.12; 1\.13\.0 is installed"):
        importlib.reload(adapter)


def test_without_appfl_the_error_says_what_to_install():
    code = "import sys; sys.modules['appfl'] = None; import afflux.integrations.appfl"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT / "python"
    )
    assert "afflux.integrations.appfl needs appfl: pip install 'afflux[appfl]'" in done.stderr


# The page


def test_the_page_runs(tmp_path, capsys):
    """Its Python and its configuration, which are one run."""
    page = (ROOT / "docs" / "appfl.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(second, "appfl.md", "exec"), {})
    assert capsys.readouterr().out == "1 0\n"
    (tmp_path / "aggregator.py").write_text(first)
    shutil.copy(ROOT / "examples" / "appfl" / "model.py", tmp_path)
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    server = OmegaConf.create(config.replace("aggregator.py", f"{tmp_path}/aggregator.py")).server_configs
    server.aggregator_kwargs.model_configs.model_path = str(tmp_path / "model.py")
    server.aggregator_kwargs.num_clients = server.num_clients
    made = create_instance_from_file(
        server.aggregator_path, server.aggregator, aggregator_configs=server.aggregator_kwargs, logger=None
    )
    assert made.server.rule == ca2fl(buffer_size=5)
    assert made.server.options.num_clients == 10


def test_the_module_itself_is_an_aggregator_path(tmp_path):
    """APPFL runs the file once more, under the name of its own package."""
    (tmp_path / "small.py").write_text(MODEL_FILE)
    configs = OmegaConf.create({"K": 3, "model_configs": {"model_path": str(tmp_path / "small.py")}})
    made = create_instance_from_file(adapter.__file__, "AffluxAggregator", aggregator_configs=configs, logger=None)
    assert made.server.rule == fedbuff(buffer_size=3)
