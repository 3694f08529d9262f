"""FLGo's server with afflux's aggregation, in FLGo's own driver: against FLGo's FedBuff, replay, faults, resume."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import flgo_points as points
from afflux import AffluxError, Server, replay, rules
from afflux.integrations import flgo as adapter
from afflux.integrations._core import TrainingRun
from afflux.integrations.flgo import BasicClient, algorithm
from afflux.rules import ca2fl, fadas, fedasync, fedavg, fedbuff, gsgm, wkafl
from flgo_points import OPTIONS, Latencies, flgo, torch

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own
ROOT = Path(__file__).parents[2]
U32 = 2.0**-24
RULES = [fedbuff(buffer_size=3), ca2fl(buffer_size=3), fadas(buffer_size=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("flgo")


@pytest.fixture
def started(folder, monkeypatch):
    """Makes a runner: started(algorithm, clients, simulator, **options)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def make(chosen, clients=6, simulator=Latencies, model=None, **options):
        task = points.make_task(folder, clients, f"of{clients}")
        return flgo.init(task, chosen, {**OPTIONS, **options}, model=model, Simulator=simulator)

    return make


def simulator(**attributes):
    return type("Simulator", (Latencies,), attributes)


def flat(model):
    return torch.cat([part.detach().reshape(-1) for part in model.state_dict().values()]).numpy()


def order_of(server):
    """Notes the clients of the packages that a server class handles, in their order."""
    seen, handle = [], server.package_handler

    def noted(self, received):
        seen.extend(map(int, received["__cid"]))
        return handle(self, received)

    server.package_handler = noted
    return seen


def test_a_run_equals_flgos_fedbuff(started):
    """The same clients train at the same times; the two runs differ by rounding, which the clients' training damps.

    Let E be the largest difference so far, L the largest number, u = 2**-24, a = 0.2 the clients' learning rate. A
    client's model is x - a (x - c): of two versions that differ by E it makes updates that differ by a E, and rounds
    three times. FLGo rounds each update and its product with the weight (s <= 1), each of M partial sums of at most
    2 M L, and three times more; afflux rounds the update and the result. Each rounding is of numbers of at most 2 L
    after the division by M, so a round adds at most r = 2 L u (M + 16): E grows to E (1 + a) + r.
    """
    rounds, size, eta = 14, 3, 1.0
    theirs = flgo.algorithm.fedbuff
    own = type("fedbuff", (), {name: type(name, (getattr(theirs, name),), {}) for name in ("Server", "Client")})
    expected_order = order_of(own.Server)
    expected = started(own, algo_para=[size / 6, eta], num_rounds=rounds)
    expected.run()

    chosen = algorithm({"name": "fedbuff", "dialect": "flgo", "buffer_ratio": size / 6, "eta": eta})
    order = order_of(chosen.Server)
    runner = started(chosen, num_rounds=rounds)
    start = flat(runner.model)
    runner.run()
    assert order == expected_order
    assert runner.server.version == rounds
    assert runner.server.counts["joined"] == size * rounds
    output, expected_output = runner.gv.logger.output, expected.gv.logger.output
    assert output["time"] == expected_output["time"]
    assert max(output["step_staleness_max"]) > 0

    largest = max(points.train_data.tensors[0].abs().max().item(), abs(start).max())
    rate, bound = OPTIONS["learning_rate"], 0.0
    for _ in range(rounds):
        bound = bound * (1 + rate) + 2 * largest * U32 * (size + 16)
    assert np.abs(flat(runner.model) - flat(expected.model)).max() <= bound
    assert np.abs(flat(runner.model) - start).max() > 100 * bound
    assert np.array_equal(flat(runner.model), runner.server.params)


@pytest.fixture
def received(monkeypatch):
    """The models that have joined, by the number of their join, and all versions."""
    models, versions, receive = {}, {}, TrainingRun.receive

    def noted(self, key, read):
        versions[self.server.version] = np.array(self.server.params)
        kept = {}

        def reading():
            trained = read()
            kept.update({name: part.numpy().copy() for name, part in trained.arrays.items()})
            return trained

        receipt = receive(self, key, reading)
        if receipt is not None and receipt.join is not None:
            models[receipt.join] = kept
        return receipt

    monkeypatch.setattr(TrainingRun, "receive", noted)
    return models, versions


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_run_replays_to_the_same_bits(rule, started, received):
    models, versions = received
    runner = started(algorithm(rule, server_options={"log": True}))
    start = {name: part.numpy().copy() for name, part in runner.model.state_dict().items()}
    runner.run()
    server = runner.server
    assert server.version == OPTIONS["num_rounds"]
    assert max(entry.staleness for entry in server.log if hasattr(entry, "staleness")) > 0
    fresh = Server(rule, start, log=True, num_clients=server.options.num_clients, faults="record")

    def update(join):
        base = fresh.layout.views(versions[join.version])
        return {name: array - base[name] for name, array in models[join.number].items()}

    again = replay(server.log, fresh, update)
    assert again.params.tobytes() == server.params.tobytes() == flat(runner.model).tobytes()


def test_every_step_is_a_round(started):
    """Packages that arrive at one time make several steps: each is logged, evaluated and stored as a round."""
    runner = started(
        algorithm(fedbuff(buffer_size=2)),
        simulator=simulator(apart=False, latencies=(3,)),
        num_rounds=7,
        save_optimal=True,
    )
    runner.run()
    output = runner.gv.logger.output
    assert runner.server.version == 7
    assert output["step_version"] == [1, 2, 3, 4, 5, 6, 7]
    assert len(output["test_distance"]) == 8  # with that of the initial model
    assert len(set(output["time"])) < 7
    assert output["counts"]["joined"] == 14
    assert np.array_equal(flat(runner.model), runner.server.params)


def bad(kind):
    """The class of clients whose second one sends what is of no use."""

    class Client(BasicClient):
        def reply(self, package):
            reply = super().reply(package)
            if self.id != 1:
                return reply
            model = reply["model"]
            if kind == "nothing":
                return None
            if kind == "text":
                return "model"
            if kind == "empty":
                return {}
            if kind == "none":
                reply["model"] = None
            elif kind == "number":
                reply["model"] = 3.5
            elif kind == "nan":
                model.model.b.data[2] = float("nan")
            elif kind == "shape":
                model.model.b.data = torch.zeros(6)
            elif kind == "name":
                model.model.c = model.model.b
                del model.model.b
            elif kind == "complex":
                model.model.b.data = torch.zeros(5, dtype=torch.complex64)
            elif kind == "zero":
                reply["num_examples"] = 0
            elif kind == "negative":
                reply["num_examples"] = -2
            elif kind == "examples":
                reply["num_examples"] = "many"
            return reply

    return Client


FAULTS = ["nothing", "text", "empty", "none", "number", "nan", "shape", "name", "complex", "negative", "examples"]
FAULTS = {**dict.fromkeys(FAULTS, "faulty"), "zero": "empty"}


@pytest.fixture(scope="module")
def alone(folder):
    """The params that one client makes alone in six rounds."""
    task = points.make_task(folder, 1, "of1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = flgo.init(task, algorithm(fedbuff(buffer_size=1)), OPTIONS, Simulator=Latencies)
        runner.run()
    return runner.server.params.tobytes()


@pytest.mark.parametrize("kind", FAULTS)
def test_a_package_that_is_of_no_use_changes_nothing_but_a_count(kind, started, alone):
    runner = started(algorithm(fedbuff(buffer_size=1), client=bad(kind), max_failures=10**6), clients=2)
    runner.run()
    assert runner.server.params.tobytes() == flat(runner.model).tobytes() == alone
    counts = {**runner.server.counts, **runner.lost}
    assert counts.pop(FAULTS[kind]) > 0
    assert counts.pop("joined") == 6
    assert not any(counts.values())
    if FAULTS[kind] == "faulty":
        assert runner.server.faults[0].client_id == 1
        assert runner.server.faults[0].reason


def test_a_client_that_is_drawn_alone_and_always_fails_ends_the_run(started):
    """The buffer needs both clients, and FLGo draws no client again whose model is in it."""
    runner = started(algorithm(fedbuff(buffer_size=2), client=bad("nan"), max_failures=4), clients=2)
    with pytest.raises(RuntimeError, match=r"none of 1 clients is of use: each has failed 4 times in a row"):
        runner.run()


def test_packages_that_are_late_lost_or_repeated(started, alone):
    late = simulator(latencies=(3, 50))
    runner = started(algorithm(fedbuff(buffer_size=1), timeout=20), clients=2, simulator=late, num_rounds=40)
    runner.run()
    assert runner.lost["overdue"] >= 2
    assert runner.lost["unknown"] >= 1
    assert runner.server.counts["joined"] == 40
    assert not runner.server.tasks

    repeated = algorithm(fedbuff(buffer_size=1))
    handle = repeated.Server.package_handler
    repeated.Server.package_handler = lambda self, received: handle(
        self, {name: [*values, *values] for name, values in received.items()}
    )
    runner = started(repeated, clients=1)
    runner.run()
    assert runner.server.params.tobytes() == alone
    assert runner.lost["unknown"] >= 6 - 1  # the last one of a run may be left

    # One client at a time: the place of a client that drops out is free again.
    lost = simulator(drops=(1,))
    runner = started(algorithm(fedbuff(buffer_size=1)), clients=2, simulator=lost, proportion=0.5)
    runner.run()
    assert runner.server.params.tobytes() == alone
    assert sum({**runner.server.counts, **runner.lost}.values()) == 6


def test_a_client_drawn_twice_at_a_time_counts_once(started):
    """FLGo's sampling with replacement hands its package over twice."""
    runner = started(algorithm(fedbuff(buffer_size=2)), sample="md", num_rounds=20)
    runner.run()
    assert runner.lost["unknown"] > 0
    assert runner.server.counts["joined"] == 40


def test_batch_norm(started):
    """Statistics are averaged, not stepped with, and the counter stays an integer."""

    class Norm(flgo.utils.fmodule.FModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.BatchNorm1d(4)

    class Client(BasicClient):
        def train(self, model):
            model.layer.weight.data += 1
            model.layer.running_mean += self.id
            model.layer.num_batches_tracked += 2

    class Model:
        @staticmethod
        def init_global_module(party):
            if "Server" in type(party).__name__:
                party.model = Norm()

    runner = started(
        algorithm(fedavg(buffer_size=3), client=Client), clients=3, model=Model, num_rounds=2, eval_interval=0
    )
    runner.run()
    norm = runner.model.layer
    assert runner.server.version == 2
    assert norm.weight.tolist() == [3.0] * 4
    assert norm.running_mean.tolist() == [2.0] * 4  # 0 + (0 + 1 + 2) / 3, twice
    assert (norm.num_batches_tracked.item(), norm.num_batches_tracked.dtype) == (4, torch.int64)


def test_rules_of_every_kind_get_what_they_need(started):
    """Models, and gradients with the learning rate and the steps of FLGo's clients."""
    runner = started(algorithm(fedasync(alpha=0.5)))
    runner.run()
    assert runner.server.version == 6
    runner = started(algorithm(wkafl(buffer_size=2, server_lr=0.3), server_options={"log": True}), num_steps=2)
    runner.run()
    assert runner.server.version == 6
    assert np.isfinite(runner.server.params).all()


def test_rules_from_configurations(started):
    """In the call or in FLGo's options, from JSON or YAML, in FLGo's names or afflux's."""
    config = json.loads('{"name": "ca2fl", "buffer_ratio": 0.5, "eta": 0.25, "codec": "affine-8"}')
    runner = started(algorithm(config))
    expected = rules.make("ca2fl", buffer_size=3, server_lr=0.25, codec="affine-8")
    assert runner.server.rule == expected
    Path("options.yml").write_text("rule:\n  name: ca2fl\n  buffer_ratio: 0.5\n  eta: 0.25\n  codec: affine-8\n")
    assert started(algorithm(), **flgo.utils.fflow.load_configuration("options.yml")).server.rule == expected
    assert started(algorithm(), rule=expected.to_config()).server.rule == expected
    assert started(algorithm(), rule={"name": "fedbuff", "buffer_size": 2}).server.rule == fedbuff(buffer_size=2)
    for wrong, message in [
        (None, "rule is None, must be a Rule, its name or a mapping that names it"),
        ({"buffer_ratio": 0.5}, "must be a Rule, its name or a mapping that names it"),
        ({"name": "fedbuf"}, "fedbuf"),
        ({"name": "fedbuff", "buffer_ratio": 0.5, "buffer_size": 2}, "buffer_ratio is the name of buffer_size in flgo"),
        ({"name": "fedbuff", "buffer_ratio": 0.01}, "buffer_size"),
        ({"name": "fedbuff", "buffer_size": 7}, "buffer_size is 7 of 6 clients"),
    ]:
        with pytest.raises(AffluxError, match=re.escape(message)):
            started(algorithm(wrong))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"server_options": {"faults": "raise"}}, {}, 'faults="raise" would end the run'),
        ({"server_options": {"inplace": True}}, {}, "inplace=True overwrites the version"),
        ({"server_options": {"flush_after": 1.0}}, {}, "flush_after is in seconds, and FLGo's time is virtual"),
        ({"max_failures": 0}, {}, "max_failures"),
        ({}, {"save_checkpoint": "c"}, "save_checkpoint keeps the model alone"),
        ({}, {"load_checkpoint": "c"}, "load_checkpoint keeps the model alone"),
        ({}, {"algo_para": [0.1, 1.0]}, "algo_para holds numbers by their place"),
        ({}, {"num_parallels": 2}, "give parallel_type='t'"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, options, message, started):
    with pytest.raises(AffluxError, match=re.escape(message)):
        started(algorithm(fedbuff(buffer_size=2), **settings), **options)


def test_clients_in_threads(started):
    first = started(algorithm(fedbuff(buffer_size=2)))
    first.run()
    second = started(algorithm(fedbuff(buffer_size=2)), num_parallels=3, parallel_type="t")
    second.run()
    assert second.server.params.tobytes() == first.server.params.tobytes()


def test_versions_and_tasks_are_bounded(started):
    """10,000 packages, of which 1 per cent never come."""
    runner = started(algorithm(fedbuff(buffer_size=10), timeout=30), clients=16)
    rng, held, opened, under_way = np.random.default_rng(0), [], [], []
    for _ in range(10_000):
        while len(under_way) < 12:
            client = int(rng.integers(16))
            under_way.append((client, runner.open_task(client)))
        client, key = under_way.pop(rng.integers(len(under_way)))
        if rng.random() >= 0.01:
            runner.package_handler({"model": [runner.model], "__cid": [client], adapter.TASK: [key]})
        runner.gv.clock.time += 1
        runner.training.expire()
        held.append(runner.server.versions_held)
        opened.append(len(runner.server.tasks))
    assert runner.server.version == runner.server.counts["joined"] // 10 > 900
    assert runner.lost["overdue"] > 50
    assert max(opened) <= 45
    assert max(held) <= 12


KILLED = """
import hashlib, os, signal, sys
sys.path[:0] = {paths!r}
import flgo_points as points
from pathlib import Path
from afflux.integrations.flgo import BasicClient, algorithm
from afflux.rules import ca2fl

class Client(BasicClient):
    trained = 0
    def train(self, model):
        super().train(model)
        Client.trained += 1
        if Client.trained == {trained}:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path({folder!r})
chosen = algorithm(ca2fl(buffer_size=3), client=Client, store=folder / "store")
runner = points.flgo.init(points.make_task(folder, 6), chosen, points.OPTIONS, Simulator=points.Latencies)
take = chosen.Server._take
def noted(self, package):
    stepped = take(self, package)
    if stepped:
        print(self.server.version, hashlib.sha256(self.server.params).hexdigest(), flush=True)
    return stepped
chosen.Server._take = noted
runner.run()
"""


def test_a_run_is_killed_and_goes_on(tmp_path, monkeypatch):
    paths = [str(ROOT / "python"), str(Path(__file__).parent)]
    script = KILLED.format(paths=paths, folder=str(tmp_path), trained=16)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    version, digest = done.stdout.split()[-2:]
    with Server.open(tmp_path / "store") as server:
        assert server.version == int(version) >= 2
        assert hashlib.sha256(server.params).hexdigest() == digest
        assert server.tasks
        noted = server.notes["own"]
        assert noted["round"] == server.version
        joined = server.counts["joined"]
        rows = {client: np.array(server.rows.row(client)) for client in server.rows.client_ids}
        assert len(rows) > 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def go_on(rounds, rule=None):
        chosen = algorithm(rule or ca2fl(buffer_size=3), store=tmp_path / "store")
        options = {**OPTIONS, "num_rounds": rounds}
        return flgo.init(points.make_task(tmp_path, 6), chosen, options, Simulator=Latencies)

    runner = go_on(8)
    assert runner.server.version == int(version)
    assert np.array_equal(flat(runner.model), runner.server.params)
    assert not runner.server.tasks
    assert all(np.array_equal(runner.server.rows.row(client), row) for client, row in rows.items())
    runner.run()
    output = runner.gv.logger.output
    assert output["step_version"] == [*range(1, 9)]
    assert len(output["test_distance"]) == len(output["time"]) == 9
    assert output["time"] == sorted(output["time"])
    assert output["time"][int(version)] == noted["output"]["time"][-1]
    assert runner.server.counts["joined"] == 24 > joined
    with pytest.raises(AffluxError, match="ca2fl"):
        go_on(9, fedbuff(buffer_size=3))

    again = go_on(8)  # nothing is left to do
    before = again.server.params.tobytes()
    again.run()
    assert again.server.params.tobytes() == before
    assert again.gv.logger.output["step_version"] == [*range(1, 9)]


@pytest.mark.parametrize("interval", [1, 2])
def test_a_step_that_was_stored_but_not_logged_is_evaluated(interval, started, tmp_path):
    """The learning rate, too, is that of a run without an interruption."""

    class Killed(Exception):
        pass

    decay = {"lr_scheduler": "0", "learning_rate_decay": 0.5, "check_interval": interval}
    whole = started(algorithm(fedbuff(buffer_size=2)), num_rounds=5, **decay)
    whole.run()
    runner = started(algorithm(fedbuff(buffer_size=2), store=tmp_path / "store"), num_rounds=9, **decay)
    log_once, runs = runner.gv.logger.log_once, []

    def stopping():
        runs.append(1)
        if len(runs) == 5:
            raise Killed
        log_once()

    runner.gv.logger.log_once = stopping
    runner.training.close = lambda notes: runner.server.close(checkpoint=False)  # as if the process had ended
    with pytest.raises(Killed):
        runner.run()
    runner = started(algorithm(fedbuff(buffer_size=2), store=tmp_path / "store"), num_rounds=5, **decay)
    assert runner.server.version == 4
    runner.run()
    assert runner.server.version == 5
    output = runner.gv.logger.output
    assert len(output["test_distance"]) == 7 - interval  # with two rounds a checkpoint, that of round 3 is missing
    assert runner.learning_rate == whole.learning_rate < 0.01
    assert {client.learning_rate for client in runner.clients} == {whole.learning_rate}


def test_clients_that_wait_in_the_buffer_are_not_drawn_after_a_resume(started, tmp_path):
    def make():
        return started(algorithm(fedbuff(buffer_size=4), store=tmp_path / "store"))

    runner = make()
    for client in (1, 4, 5):
        key = runner.open_task(client)
        runner.package_handler({"model": [runner.model], "__cid": [client], adapter.TASK: [key]})
    assert runner.server.arrivals_waiting == 3
    runner.training.close(runner.notes(0))
    runner = make()
    assert runner.server.arrivals_waiting == 3
    drawn, pack = [], runner.pack

    def noted(client, *args, **kwargs):
        if runner.server.version == 0:
            drawn.append(client)
        return pack(client, *args, **kwargs)

    runner.pack = noted
    runner.run()
    assert sorted(set(drawn)) == [0, 2, 3]
    assert runner.server.version == 6


def test_early_stopping(started):
    """In a round of several at one time, and in the last of them; the packages that are left have no effect."""
    for apart, patience in [(False, 1), (False, 2), (True, 3)]:
        together = simulator(apart=apart, latencies=(3,))
        chosen = algorithm(fedbuff(buffer_size=2))
        runner = started(chosen, simulator=together, num_rounds=50, early_stop=patience)
        runner.gv.logger.set_es_key("step_version")  # it grows, which counts as worse
        runner.run()
        assert runner.server.version == patience + 1
        assert not runner.server.tasks
        assert runner.gv.logger.output["step_version"] == [*range(1, patience + 2)]


def test_clients_that_are_all_too_late_end_the_run(started):
    runner = started(algorithm(fedbuff(buffer_size=2), timeout=2, max_failures=3), clients=2)
    with pytest.raises(RuntimeError, match=r"none of 2 clients is of use: .* no reply within 2 s"):
        runner.run()


def test_the_store_of_another_program_is_refused(started, tmp_path):
    rule = fedbuff(buffer_size=2)
    model = started(algorithm(rule)).model
    with Server(rule, model, store=tmp_path / "store", faults="record") as own:
        own.checkpoint({"epoch": 3})
    with pytest.raises(AffluxError, match=r"notes are not those of this adapter: .*epoch"):
        started(algorithm(rule, store=tmp_path / "store"))
    with Server.open(tmp_path / "store") as own:  # which it has not kept open
        assert own.version == 0


def test_another_version_of_flgo_is_warned_of(monkeypatch):
    monkeypatch.setattr("afflux.integrations._core.version", lambda name: "0.5.0")
    with pytest.warns(RuntimeWarning, match=r"tested with flgo 0.4.4; 0.5.0 is installed"):
        algorithm(fedbuff())


def test_without_flgo_the_error_says_what_to_install():
    code = "import sys; sys.modules['flgo'] = None; import afflux.integrations.flgo"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "needs flgo: pip install 'afflux[flgo]'" in done.stderr


def test_clients_whose_models_wait_for_the_next_pass_are_not_drawn(started):
    """Under gsgm each client takes part once in a pass, and what it sends meanwhile waits."""
    runner = started(algorithm(gsgm(buffer_size=2)), num_rounds=20)
    pack, waited = runner.pack, []

    def noted(client, *args, **kwargs):
        waiting = runner.training.waiting().values()
        waited.append(len(runner.server._aggregator.admission.state.deferred()))
        assert client not in waiting
        return pack(client, *args, **kwargs)

    runner.pack = noted
    runner.run()
    assert runner.server.version == 20
    assert max(waited) > 0
    assert runner.server.counts["replaced"] == 0
