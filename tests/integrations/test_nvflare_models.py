"""Models to and from NVFlare's clients: dtypes, copies, how many versions are held; events and metrics."""

import random
import sys

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel

from afflux.rules import fedbuff
from nvflare_servers import Small, initial, run, small
from nvflare_sites import Lost, Sites, adds, flat


@pytest.mark.parametrize("params_type", ["FULL", "DIFF"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_batch_norm_and_bfloat16(library, params_type, monkeypatch):
    if library == "numpy":
        from ml_dtypes import bfloat16

        make = np.ones
    else:
        import torch

        bfloat16, make = torch.bfloat16, torch.ones
    library = sys.modules[library]
    arrays = {
        "bn.weight": make(4, dtype=library.float32),
        "bn.running_mean": make(4, dtype=library.float32),
        "bn.num_batches_tracked": make((), dtype=library.int64),
        "half": make(6, dtype=bfloat16),
    }

    def site(model, version):
        assert [(type(array), array.dtype, array.shape) for array in model.values()] == [
            (type(array), array.dtype, array.shape) for array in arrays.values()
        ]
        one = {name: make(tuple(array.shape), dtype=array.dtype) for name, array in model.items()}
        if params_type == "DIFF":
            return FLModel(params_type="DIFF", params=one, meta={"NUM_STEPS_CURRENT_ROUND": 2})
        return {name: model[name] + one[name] for name in one}, {"num_steps": 2}

    own = small("fedavg", {"buffer_size": 2}, 2, params_type=params_type, settings={"concurrency": 2})
    own.model = lambda: arrays
    result = run(own, Sites({"a": site, "b": site}, most=9), monkeypatch)
    assert own.server.counts["joined"] == 4
    for name, array in result.items():
        assert (type(array), array.dtype, array.shape) == (type(arrays[name]), arrays[name].dtype, arrays[name].shape)
        assert (array == 3).all()


def test_a_version_that_is_sent_is_copied_once(monkeypatch):
    seen = []

    def site(model, version):
        seen.append((version, model["w"]))
        return adds(1.0)(model, version)

    own = small(fedbuff(buffer_size=2), rounds=2)
    last = run(own, Sites(dict.fromkeys("abc", site)), monkeypatch)
    assert not any(array.flags.writeable for _, array in seen)
    first = [array for version, array in seen if version == 0]
    assert all(np.shares_memory(first[0], array) for array in first)
    assert not any(np.shares_memory(own.server.params, array) for _, array in seen)
    last["w"] += 1  # the result is a copy
    assert not np.shares_memory(last["w"], own.server.params)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_models_that_something_still_refers_to_hold_no_versions(library, monkeypatch):
    """70 calls are open at a time, which bounds the versions, and all sites keep the models of their calls.

    The calls of one site that succeed get models of different versions, and one of four sites has 75 of 300 calls.
    """
    if library == "torch":
        import torch
    held = []

    def fails(model, version):
        held.append(model)
        raise RuntimeError("out of memory")

    def site(model, version):
        held.append(model)
        return {name: array + 1 for name, array in model.items()}, {"num_steps": 1}

    sites = Sites({**{f"good {i}": site for i in range(4)}, **{f"bad {i}": fails for i in range(66)}})
    settings = {"concurrency": 70, "max_failures": 10**6}
    own = small("fedasync", {"alpha": 0.5}, rounds=300, settings=settings)
    if library == "torch":
        own.model = lambda: {name: torch.from_numpy(array) for name, array in initial().items()}
    run(own, sites, monkeypatch)
    assert own.server.version == 300
    assert own.server.options.max_versions == 72
    assert len({id(model) for model in held}) > 72
    assert own.server.versions_held <= 72


def test_arrays_that_are_left_on_disk_are_read(monkeypatch):
    class OnDisk:
        def __init__(self, array):
            self.array = array

        def materialize(self):
            return self.array

    def site(model, version):
        params, metrics = adds(1.0)(model, version)
        return {name: OnDisk(array) for name, array in params.items()}, metrics

    own = small(fedbuff(buffer_size=2))
    run(own, Sites({"a": site, "b": site}), monkeypatch)
    assert own.server.counts["joined"] == 6
    assert own.server.counts["faulty"] == 0


def test_versions_and_tasks_are_bounded_over_many_results(monkeypatch):
    """10,000 results; 1 per cent of the calls never end."""
    rng, good, held = random.Random(0), adds(0.001), []

    def site(model, version):
        if rng.random() < 0.01:
            raise Lost
        return good(model, version)

    own = small(
        fedbuff(buffer_size=10), rounds=1000, settings={"concurrency": 20, "timeout": 0.2, "max_failures": 10**6}
    )

    class Watched(Sites):
        def deliver(self):
            held.append((own.server.versions_held, len(own.server.tasks)))
            super().deliver()

    run(own, Watched({f"site-{i}": site for i in range(100)}, most=20), monkeypatch)
    assert own.server.counts["joined"] == 10_000
    assert own.lost["overdue"] > 10
    assert max(versions for versions, _ in held) <= 24
    assert max(tasks for _, tasks in held) <= 20


def test_events_and_metrics(monkeypatch):
    class Evaluated(Small):
        def evaluate(self, version, model):
            return {"mean": float(flat(model).mean()), "model": model}  # what is no number is left out

    own = Evaluated(fedbuff(buffer_size=2), None, 5, settings={"evaluate_every": 2, "concurrency": 1})
    others = {"x" * 1000: 1.0, "two\nlines": 1.0, "\ud800": 1.0, "large": 10**400}
    sites = Sites({"a": adds(1.0, accuracy=0.5, note="fine", worst=float("nan"), **others)})
    run(own, sites, monkeypatch)
    updated = [fields for event, fields in sites.engine.events if event == "_global_weights_updated"]
    assert [fields["current_round"] for fields in updated] == [0, 2, 4, 5]
    assert updated[-1]["global_model"]["weights"]["w"].tobytes() == own.server.params[:12].tobytes()
    sent = [fields["data"] for event, fields in sites.engine.events if event == "analytix_log_stats"]
    tags = [(own["track_key"], own["global_step"], own["track_value"]) for own in sent]
    assert [(tag, step) for tag, step, _ in tags if tag.startswith("evaluate")] == [
        ("evaluate/mean", step) for step in (0, 2, 4, 5)
    ]
    assert {tag for tag, _, _ in tags} == {"evaluate/mean", "train/accuracy", "train/train_loss", "train/num_steps"}
    assert [(step, value) for tag, step, value in tags if tag == "train/accuracy"] == [(i, 0.5) for i in range(1, 6)]
