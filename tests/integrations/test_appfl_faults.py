"""What APPFL's clients send, whatever it is: models, reports, ids."""

import numpy as np
import pytest
import torch

from appfl_here import Lines, aggregator, counted, flat, moved, params
from pairwise import soak


def spoiled(kind, model):
    """A model and what the trainer says, of no use."""
    first = next(iter(model))
    if kind == "text":
        return {**model, first: "text"}
    if kind == "device":
        return {**model, first: torch.empty(3, 4, device="meta")}
    if kind == "sparse":
        return {**model, first: model[first].to_sparse()}
    if kind == "objects":
        return {**model, first: np.array([object()] * 12).reshape(3, 4)}
    return {"none": None, "bytes": b"model", "list": [*model.values()], "number": 10**400}[kind]


MODELS = ["text", "objects", "device", "sparse", "none", "bytes", "list", "number"]
SIZES = {"huge": 10**400, "text size": "ten"}


@pytest.mark.parametrize("rule", ["fedbuff", *soak("ca2fl"), *soak("fedavg")])
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
    assert counted(own) == {"joined": 6, "faulty": 6}


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
