"""NVFlare's Collab over sites that are functions: its own FedBuff, replay, faults, resume, events, configuration."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare.collab", reason="needs nvflare: make test-integrations")

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.collab import CollabRecipe
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.utils.class_utils import ModuleScanner
from nvflare.fuel.utils.component_builder import ComponentBuilder

from afflux import AffluxError, Server, replay
from afflux.integrations import nvflare as adapter
from afflux.integrations._core import TrainingRun
from afflux.integrations.nvflare import AsyncServer
from afflux.rules import RULES, ca2fl, fadas, fedbuff
from nvflare_sites import Client, Lost, Sites, adds, flat

ROUNDING = 2.0**-24  #: relative error of one operation in float32
NAMES = ["site-1", "9223372036854775815", "18446744073709551615", "-1"]  # NVFlare's ids are texts


def initial(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((3, 4), np.float32), "b": rng.standard_normal(5, np.float32)}


class Small(AsyncServer):
    """The server object of these tests."""

    model = staticmethod(initial)

    def initial_model(self):
        return self.model()


def small(rule, options=None, rounds=3, *, settings=None, **arguments):
    settings = {"concurrency": 3, "poll_interval": 0.001, "retry_after": 0.0, **(settings or {})}
    return Small(rule, options, rounds, settings=settings, **arguments)


def run(server, sites, monkeypatch):
    with sites.around(server, monkeypatch):
        return server.run()


def four(*values, kind=Sites, **options):
    functions = {name: adds(value, 10 * (i + 1)) for i, (name, value) in enumerate(zip(NAMES, values, strict=True))}
    return kind(functions, **options)


@pytest.fixture
def received(monkeypatch):
    """What has joined, by the number of the join, and all versions."""
    models, versions, receive = {}, {}, TrainingRun.receive

    def noted(self, key, read):
        versions[self.server.version] = np.array(self.server.params)
        kept = []

        def reading():
            kept.append(read())
            return kept[0]

        receipt = receive(self, key, reading)
        versions[self.server.version] = np.array(self.server.params)
        if receipt is not None and receipt.join is not None:
            models[receipt.join] = {name: np.array(array) for name, array in kept[0].arrays.items()}
        return receipt

    monkeypatch.setattr(TrainingRun, "receive", noted)
    return models, versions


def joins(server):
    return [entry for entry in server.log if hasattr(entry, "staleness")]


# NVFlare's own results


@pytest.mark.parametrize("weighted", [True, False])
def test_its_dialect_of_fedbuff_is_its_manager_of_buffers(weighted, received, monkeypatch):
    """A step of theirs: at most M + 4 operations in float32 on numbers up to the largest update U, then float64; of
    ours: exact weights and sums, and one rounding of params, up to X. Updates do not depend on params.
    """
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.edge.assessors.buff_model_manager import BuffModelManager
    from nvflare.edge.mud import ModelUpdate

    size, steps, rng = 4, 12, np.random.default_rng(5)

    def site(model, version):
        return {name: rng.standard_normal(array.shape, np.float32) for name, array in model.items()}

    knobs = {"num_updates_for_model": size, "global_lr": 0.7, "staleness_weight": weighted}
    ours = small(
        "fedbuff", knobs, steps, params_type="DIFF", settings={"concurrency": 7, "server_options": {"log": True}}
    )
    result = run(ours, Sites({f"site-{i}": site for i in range(8)}, seed=2), monkeypatch)

    theirs, context = BuffModelManager(**knobs), FLContext()
    theirs.fire_event = lambda event, fl_ctx: None
    theirs.initialize_model(DXO(DataKind.WEIGHTS, data=initial()), context)
    theirs.generate_new_model(context)  # their version 1 is the initial model
    updates, versions = received
    for join in joins(ours.server):
        delta = {name: array.copy() for name, array in updates[join.number].items()}
        diff = DXO(DataKind.WEIGHT_DIFF, data={"dict": delta, "count": 1})
        theirs.process_updates(
            {join.version + 1: ModelUpdate(join.version + 1, diff.to_shareable(), {str(join.number): 0.0})}, context
        )
    assert theirs.current_model_version == steps + 1
    assert max(join.staleness for join in joins(ours.server)) > 1
    largest_update = max(np.abs(flat(update)).max() for update in updates.values())
    largest = max(np.abs(version).max() for version in versions.values())
    bound = steps * ROUNDING * ((size + 4) * largest_update + largest)
    found = {name: np.array(array) for name, array in theirs.current_model.data.items()}
    assert np.abs(flat(result).astype(np.float64) - flat(found)).max() <= bound < 1e-4


def test_steps_weighted_by_local_steps_are_those_of_its_example(received, monkeypatch):
    """Its example of FedBuff adds the mean, weighted by num_steps, of what clients added to the versions that they had:
    M + 2 operations in float32 on numbers up to the largest update U, and two on params up to X; ours: one rounding.
    """
    size, steps = 3, 6
    ours = small("fedavg", {"buffer_size": size}, steps, settings={"server_options": {"log": True}})
    run(ours, four(1.0, -2.0, 0.5, 3.0, seed=4), monkeypatch)
    models, versions = received
    helper, log = WeightedAggregationHelper(), joins(ours.server)
    assert max(join.staleness for join in log) > 0
    for step in range(steps):
        largest = np.abs(versions[step]).max()
        for join in log[step * size : (step + 1) * size]:
            delta = flat(models[join.number]) - versions[join.version]
            largest = max(largest, np.abs(delta).max())
            helper.add({"x": delta}, float(join.num_examples), join.client_id, step)
        theirs = versions[step] + helper.get_result()["x"]
        bound = ROUNDING * ((size + 2) * largest + 3 * 2 * largest)
        assert np.abs(versions[step + 1] - theirs).max() <= bound


# The same bits


@pytest.mark.parametrize("params_type", ["FULL", "DIFF"])
@pytest.mark.parametrize("rule", [fedbuff, ca2fl, fadas], ids=lambda rule: rule.__name__)
def test_a_run_replays_to_the_same_bits(rule, params_type, received, monkeypatch):
    def difference(value):
        full = adds(value)

        def site(model, version):
            moved, metrics = full(model, version)
            return {name: array - model[name] for name, array in moved.items()}, metrics

        return site

    values = (1.0, -2.0, 0.5, 3.0)
    sites = four(*values, seed=3)
    if params_type == "DIFF":
        sites = Sites({name: difference(value) for name, value in zip(NAMES, values, strict=True)}, seed=3)
    own = small(rule(buffer_size=3), rounds=6, params_type=params_type, settings={"server_options": {"log": True}})
    result = run(own, sites, monkeypatch)
    models, versions = received
    server = own.server
    assert server.version == 6
    assert max(join.staleness for join in joins(server)) > 0
    fresh = Server(rule(buffer_size=3), initial(), log=True, num_clients=server.options.num_clients, faults="record")

    def update(join):
        base = fresh.layout.views(versions[join.version])
        return {
            name: array - base[name] if params_type == "FULL" else array for name, array in models[join.number].items()
        }

    again = replay(server.log, fresh, update)
    assert again.params.tobytes() == server.params.tobytes() == flat(result).tobytes()


KILLED = """
import os, signal, sys, pytest
sys.path[:0] = {path!r}
import test_nvflare as tests
from nvflare_sites import Sites
class Kill(Sites):
    def deliver(self):
        if self.sent > 14:
            os.kill(os.getpid(), signal.SIGKILL)
        super().deliver()
with pytest.MonkeyPatch.context() as patch:
    tests.run(tests.stored({store!r}, 9), tests.four(1.0, -2.0, 0.5, 3.0, kind=Kill), patch)
"""


def stored(store, rounds):
    return small(ca2fl(buffer_size=2), rounds=rounds, settings={"store": str(store), "checkpoint_every": 2})


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    """Calls end with the process that made them: their tasks are cancelled, and the clients train again."""
    script = KILLED.format(path=[str(Path(__file__).parent)], store=str(tmp_path / "store"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Server.open(tmp_path / "store") as server:
        assert 0 < server.version < 9
        assert server.tasks
        before = server.counts["joined"]
    own = stored(tmp_path / "store", 9)
    sites = four(1.0, -2.0, 0.5, 3.0)
    run(own, sites, monkeypatch)
    assert own.server.version == 9
    assert own.server.counts["joined"] >= 18 > before
    assert own.lost["unknown"] == own.lost["failed"] == 0
    assert min(version for _, _, version in sites.calls) > 0  # it went on
    with Server.open(tmp_path / "store") as server:
        assert server.tasks == ()
    other = small(ca2fl(buffer_size=2), settings={"store": str(tmp_path / "store")})
    other.model = lambda: {"w": np.zeros(3, np.float32)}
    with pytest.raises(AffluxError, match="another model"):
        run(other, sites, monkeypatch)


# What clients send


def bad(kind):
    """A site whose results are of no use."""
    good = adds(1.0)

    def site(model, version):
        if kind == "lost":
            raise Lost
        if kind == "error":
            raise MemoryError("out of memory")
        params, metrics = good(model, version)
        if kind == "nothing":
            return None
        if kind == "text":
            return "done"
        if kind == "three":
            return params, metrics, {}
        if kind == "metrics":
            return params, [1, 2]
        if kind == "diff":
            return FLModel(params_type="DIFF", params=params)
        if kind == "none":
            return FLModel(metrics={"accuracy": 0.5})
        if kind == "nan":
            params["b"] = np.full(5, np.nan, np.float32)
        elif kind == "shape":
            params["b"] = np.zeros(6, np.float32)
        elif kind == "name":
            params["c"] = params.pop("b")
        elif kind == "number":
            params["b"] = 3
        elif kind == "texts":
            params["b"] = np.array(["a"] * 5)
        elif kind == "objects":
            params["b"] = np.array([None] * 5)
        elif kind == "keys":
            params = {0: params["w"], 1: params["b"]}
        steps = {"zero": 0, "negative": -3, "list": [1, 2], "large": 2**64, "nan steps": float("nan")}
        return params, {**metrics, "num_steps": steps.get(kind, 10)}

    return site


FAULTS = {
    "error": "failed",
    "nothing": "faulty",
    "text": "faulty",
    "three": "faulty",
    "metrics": "faulty",
    "diff": "faulty",
    "none": "faulty",
    "nan": "faulty",
    "shape": "faulty",
    "name": "faulty",
    "number": "faulty",
    "texts": "faulty",
    "objects": "faulty",
    "keys": "faulty",
    "zero": "empty",
    "negative": "faulty",
    "list": "faulty",
    "large": "faulty",
    "nan steps": "faulty",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_result_that_is_of_no_use_changes_nothing_but_a_count(kind, monkeypatch):
    """With one site that trains, and beside it another one, the bits are those of the site alone."""
    alone = small(fedbuff(buffer_size=2), settings={"concurrency": 1})
    first = run(alone, Sites({"site-1": adds(0.5)}), monkeypatch)
    sites = Sites({"site-1": adds(0.5), "9223372036854775808": bad(kind)}, seed=1)
    own = small(fedbuff(buffer_size=2), settings={"concurrency": 2, "max_failures": 10**6})
    result = run(own, sites, monkeypatch)
    assert flat(result).tobytes() == flat(first).tobytes()
    counts = {**own.server.counts, **own.lost}
    assert counts.pop(FAULTS[kind]) > 0
    assert counts.pop("joined") == 6
    assert not any(counts.values())
    if FAULTS[kind] == "faulty":
        assert own.server.faults[0].client_id == "9223372036854775808"
        assert own.server.faults[0].reason


def test_lost_late_and_repeated_results(monkeypatch):
    """Site 7's first result comes after its time is over, those of site 5 come twice, site 9 returns nothing."""
    late, again = [], []

    class Slow(Sites):
        def deliver(self):
            time.sleep(0.001)
            with self.lock:
                for each in [*self.under_way]:
                    if each[1].target_name == "site-7" and not late:
                        late.append(each)
                        self.under_way.remove(each)
            if late and len(again) > 200:
                late[0][1].set_result(late[0][2])
            super().deliver()

    class Twice(adapter.CollabTransport):
        def _take(self, call, result, key):
            super()._take(call, result, key)
            if call.target_name == "site-5":
                again.append(key)
                super()._take(call, result, key)

    monkeypatch.setattr("nvflare_sites.CollabTransport", Twice)
    sites = Slow({"site-5": adds(0.5), "site-7": adds(0.5), "site-9": bad("lost")})
    own = small(fedbuff(buffer_size=2), rounds=200, settings={"timeout": 0.1, "max_failures": 10**6})
    result = run(own, sites, monkeypatch)
    assert own.lost["overdue"] >= 2
    assert own.lost["unknown"] >= len(again) - 2 > 100
    assert late[0][1]._completed is False or own.lost["unknown"] > len(again) - 2
    assert own.server.counts["joined"] == 400
    assert own.server.counts["faulty"] == 0
    assert own.server.tasks == ()
    assert np.isfinite(flat(result)).all()


def test_a_run_with_useless_clients_alone_ends(monkeypatch):
    own = small("fedbuff", settings={"max_failures": 2})
    with pytest.raises(RuntimeError, match=r"none of 1 clients is of use.*out of memory"):
        run(own, Sites({"site-1": bad("error")}), monkeypatch)


def test_a_client_that_publishes_no_such_function_is_not_called(monkeypatch):
    own = small("fedbuff", call="learn", settings={"max_failures": 2})
    with pytest.raises(RuntimeError, match=r"none of 1 clients is of use"):
        run(own, Sites({"site-1": adds(1.0)}), monkeypatch)
    assert own.lost["failed"] == 2


def test_a_job_that_is_aborted_ends_with_its_state_stored(tmp_path, monkeypatch):
    sites = Sites({"site-1": adds(1.0), "site-2": bad("lost")})

    def stop(model, version):
        if version == 3:
            sites.abort_signal.trigger(True)
        return adds(1.0)(model, version)

    sites.functions["site-1"] = stop
    own = small(fedbuff(buffer_size=1), rounds=10**6, settings={"store": str(tmp_path / "store")})
    with pytest.raises(RunAborted):
        run(own, sites, monkeypatch)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 3
        assert server.tasks  # closed at the next start


# Models


@pytest.mark.parametrize("params_type", ["FULL", "DIFF"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_batch_norm_and_bfloat16(library, params_type, monkeypatch):
    if library == "numpy":
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        make = np.ones
    else:
        torch = pytest.importorskip("torch")
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
        torch = pytest.importorskip("torch")
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


# Events and metrics


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


# Configuration


class Builder(ComponentBuilder):
    """NVFlare's, which takes a dict with a name for a component if there is a class of this name."""

    def get_module_scanner(self):
        return ModuleScanner(["nvflare"], ["apis", "app_common", "widgets", "app_opt"], True)


def test_arguments_go_through_the_configuration_of_a_job(tmp_path):
    """They are JSON there, from which NVFlare makes the object again."""
    rule = fadas(buffer_size=3, server_lr=0.5)
    arguments = {"settings": {"concurrency": 2, "server_options": {"max_staleness": 4}}, "params_type": "DIFF"}
    own = Small(rule, num_rounds=7, weight_key="n", call_args={"epochs": 3}, **arguments)
    recipe = CollabRecipe("job", server=own, client=Client(), min_clients=1)
    recipe.export(str(tmp_path))
    (path,) = tmp_path.rglob("config_fed_server.json")
    (component,) = [each for each in json.loads(path.read_text())["components"] if each["id"] == "_server"]
    again = Builder().build_component(component)
    assert again.configured() == own.configured() == (rule, own.configured()[1])
    for name in ("num_rounds", "params_type", "weight_key", "loss_key", "call", "call_args", "settings"):
        assert getattr(again, name) == getattr(own, name)
    assert not [*tmp_path.rglob("nvflare"), *tmp_path.rglob("nvflare.py")]  # which would hide NVFlare itself


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_has_a_configuration(name):
    rule = RULES[name]()
    assert Small(rule).configured()[0] == Small(json.loads(json.dumps(rule.to_config()))).configured()[0] == rule
    assert Small(name).configured()[0] == rule


def test_its_own_names_of_options():
    yaml = pytest.importorskip("yaml")
    text = "{num_updates_for_model: 4, global_lr: 0.5, staleness_weight: true, max_model_history: 3}"
    rule, settings = Small("fedbuff", yaml.safe_load(text)).configured()
    assert rule == fedbuff(buffer_size=4, server_lr=0.5, dialect="nvflare")
    assert settings.server_options == {"max_staleness": 2}
    rule, settings = Small(
        "ca2fl", {"num_updates_for_model": 4, "global_lr": 0.5, "max_model_history": None}
    ).configured()
    assert rule == ca2fl(buffer_size=4, server_lr=0.5)
    assert settings.server_options == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "fedbufff"}, "must be a rule"),
        ({"rule": 3}, "rule is 3, must be a dict"),
        (
            {"rule": {"part": "rule"}, "rule_options": {"buffer_size": 3}},
            "a rule that is given whole has its options inside",
        ),
        ({"rule_options": {"buffer_size": 0}}, "buffer_size"),
        ({"rule_options": {"staleness": np.ones(3)}}, "rule_options is .*must be a dict as JSON has it"),
        (
            {"rule": "ca2fl", "rule_options": {"global_lr": 1.0, "server_lr": 1.0}},
            "global_lr is the name of server_lr in nvflare: both are given",
        ),
        ({"rule": "ca2fl", "rule_options": {"staleness_weight": True}}, "staleness_weight is a name of nvflare"),
        ({"rule_options": {"max_model_history": 0}}, "max_model_history is 0, must be an int of at least 1"),
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"params_type": "full"}, "params_type is 'full', must be 'FULL' or 'DIFF'"),
        ({"call": 3}, "call is 3, must be a str"),
        ({"settings": {"concurency": 3}}, "settings has 'concurency', which is no setting"),
        ({"settings": {"timeout": -1}}, "timeout is -1"),
        ({"settings": {"store": "here"}}, "store is 'here', must be an absolute path"),
        ({"settings": {"server_options": {"faults": "raise"}}}, "faults"),
        (
            {"rule_options": {"max_model_history": 2}, "settings": {"server_options": {"max_staleness": 1}}},
            "max_model_history and max_staleness are both given",
        ),
    ],
)
def test_errors_are_raised_where_the_job_is_made(arguments, message):
    with pytest.raises(AffluxError, match=message):
        Small(**arguments)


def test_the_class_itself_is_no_server_object():
    with pytest.raises(AffluxError, match=r"AsyncServer lacks initial_model\(\): define it in a subclass"):
        AsyncServer()


def test_without_nvflare_the_error_says_what_to_install():
    code = "import sys; sys.modules['nvflare'] = None; import afflux.integrations.nvflare"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(
        r"ImportError: afflux.integrations.nvflare needs nvflare.*pip install 'afflux\[nvflare\]'", done.stderr
    )


# The page

AROUND_THE_PAGE = """
import json
import numpy as np
import yaml

class Model:
    def __init__(self):
        self.arrays = {"w": np.zeros(3, np.float32)}

    def state_dict(self):
        return self.arrays

    def load_state_dict(self, arrays):
        self.arrays = {name: np.array(array) for name, array in arrays.items()}

new_model = Model

def fit(own):
    own.arrays["w"] += 1
    return 0.5, 3
"""


def test_the_page_runs(tmp_path, monkeypatch):
    """Its first block is a job, which is exported, and runs over functions; its second makes server objects."""
    pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "nvflare.md").read_text()
    job, rules = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "job_of_the_page.py").write_text(AROUND_THE_PAGE + job)
    monkeypatch.syspath_prepend(str(tmp_path))
    import job_of_the_page

    recipe = job_of_the_page.recipe()
    recipe.export(str(tmp_path / "exported"))
    assert [*(tmp_path / "exported").rglob("job_of_the_page.py")]
    train, server = job_of_the_page.Client().train, recipe.server
    server.num_rounds = 3
    last = run(
        server,
        Sites({f"site-{i}": lambda model, version: train(model=model, version=version) for i in range(8)}),
        monkeypatch,
    )
    assert last["w"].min() > 0
    assert server.server.counts["joined"] == 12
    names = dict(vars(job_of_the_page))
    made = [eval(line, names) for line in rules.splitlines() if line.startswith("Server(") and "settings=" not in line]
    exec(compile(rules, "nvflare.md", "exec"), names)
    assert [each.configured()[0].name for each in made] == ["fadas", "fedbuff"]
    assert names["settings"] == {"server_options": {"max_staleness": 20}}
