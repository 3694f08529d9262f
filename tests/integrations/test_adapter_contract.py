"""What the four adapters hold in common, in one form: replies of every kind, and those of no use; clients that fail,
that start again, that have no id, or that the rule has no room for; a log that replays to the same bits; a store that
goes on; and what a run says.
"""

import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from afflux import AffluxError, Join, Server, replay
from afflux.rules import ca2fl, dp_fedbuff, fadas, fedasync, fedavg, fedbuff, mf_ca2fl
from afflux.rules.staleness import Constant
from afflux.rules.weights import Given
from conftest import check_error
from pairwise import soak

CLIENTS = 4
NAN = float("nan")
ROOT = Path(__file__).parents[2]
EQUAL = fedbuff(buffer_size=2, staleness=Constant())  #: each step adds the mean of what its clients add
#: What a client does to its arrays, so that they are of no use.
SPOILED = {
    "not finite": lambda arrays, first: {**arrays, first: arrays[first] * NAN},
    "shape": lambda arrays, first: {**arrays, first: arrays[first].reshape(-1)[:7]},
    "name": lambda arrays, first: {f"{name}_": array for name, array in arrays.items()},
    "missing": lambda arrays, first: {name: array for name, array in arrays.items() if name != first},
    "more": lambda arrays, first: {**arrays, "more": arrays[first] + 1},
    "complex": lambda arrays, first: {**arrays, first: arrays[first] * 1j},
    "empty": lambda arrays, first: {},
}


@dataclass
class Behaviour:
    """What a client does with the model that it gets."""

    value: float = 1.0  #: added to each element; NaN is of no use
    examples: float | None = 10  #: its number of examples; None: it does not say
    fails: int = 0  #: every so many replies it fails, and starts again; 0: never
    spoils: str | None = None  #: a key of SPOILED
    loss: float | None = None
    local_steps: int | None = None
    facts: dict = field(default_factory=dict)  #: numbers in its replies
    replies: int = 0
    updates: list = field(default_factory=list)  #: of each reply, by name

    def arrays(self, model):
        """The arrays of its next reply to these; None if it fails."""
        self.replies += 1
        if self.fails and self.replies % self.fails == 0:
            return None
        moved = {name: array + self.value for name, array in model.items()}
        self.updates.append({name: np.asarray(array - model[name]) for name, array in moved.items()})
        return moved if self.spoils is None else SPOILED[self.spoils](moved, next(iter(moved)))

    def says(self, examples, loss, local_steps):
        """The numbers of a reply, under an adapter's names of these."""
        numbers = {examples: self.examples, loss: self.loss, local_steps: self.local_steps}
        return {**self.facts, **{name: number for name, number in numbers.items() if number is not None}}


class Adapter:
    """A run of an adapter in this process: its server, its counts, and the lines of its framework's log."""

    gives_ids = True  #: whether the framework names the clients, so that none is without an id
    ends = True  #: whether a run has an end, with no open task
    server = None

    def __init__(self, patch, nameless):
        self.patch, self.nameless, self.lines = patch, nameless, []  #: nameless: client 0 has no id

    def start(self, rule, clients, steps, **settings):
        """Run until the server has made these steps; sets server, lost, and model, the first params by name."""
        raise NotImplementedError

    @staticmethod
    def number(client_id):
        """The place of a client among the behaviours."""
        return client_id

    @property
    def counts(self):
        return {name: count for name, count in {**self.server.counts, **self.lost}.items() if count}

    @property
    def first(self):
        """The params of version 0."""
        return np.concatenate([np.ravel(array) for array in self.model.values()])

    def said(self, text):
        return [line for line in self.lines if text in line]


class Flower(Adapter):
    gives_ids = False

    def start(self, rule, clients, steps, **settings):
        flower = pytest.importorskip("flower_grid")

        def node(behaviour):
            def reply(message):
                arrays = behaviour.arrays({name: each.numpy() for name, each in message.content["arrays"].items()})
                if arrays is None:
                    return flower.Error(0, "it starts again")
                metrics = behaviour.says("num-examples", "train_loss", "local-steps")
                record = flower.ArrayRecord({name: flower.Array(np.asarray(array)) for name, array in arrays.items()})
                return flower.RecordDict({"arrays": record, "metrics": flower.MetricRecord(metrics)})

            return reply

        self.patch.setattr(flower.FLOWER_LOGGER, "handle", lambda record: self.lines.append(record.getMessage()))
        key = {1: "ann", 2: "ben", 3: "cleo"}.get if self.nameless else None
        own = flower.strategy(rule, client_key=key, **{"retry_after": 0.0, **settings})
        self.model = flower.model_of(flower.initial())
        grid = flower.FakeGrid({number: node(behaviour) for number, behaviour in enumerate(clients)})
        try:
            own.start(grid, flower.initial(), num_rounds=steps)
        finally:
            self.server, self.lost = own.server, own.lost


class NVFlare(Adapter):
    def start(self, rule, clients, steps, **settings):
        nvflare, sites = pytest.importorskip("nvflare_servers"), pytest.importorskip("nvflare_sites")

        def site(behaviour):
            def reply(model, version):
                arrays = behaviour.arrays(model)
                if arrays is None:
                    raise RuntimeError("it starts again")
                return arrays, behaviour.says("num_steps", "train_loss", "local_steps")

            return reply

        settings = {name: str(value) if name == "store" else value for name, value in settings.items()}
        own = nvflare.small(rule, rounds=steps, settings={"concurrency": CLIENTS, **settings})
        own.logger = logging.Logger("contract")
        own.logger.handle = lambda record: self.lines.append(record.getMessage())
        functions = {f"site-{number}": site(behaviour) for number, behaviour in enumerate(clients)}
        self.model = nvflare.initial()
        try:
            nvflare.run(own, sites.Sites(functions), self.patch)
        finally:
            self.server, self.lost = own.server, own.lost

    @staticmethod
    def number(client_id):
        return int(client_id.removeprefix("site-"))


class APPFL(Adapter):
    """In the order of the virtual-time simulator, with clients of equal speed."""

    gives_ids = False
    ends = False

    def start(self, rule, clients, steps, **settings):
        appfl = pytest.importorskip("appfl_here")
        settings = {name: str(value) if name == "store" else value for name, value in settings.items()}
        lines, configs = appfl.Lines(), {"rule": rule.to_config(), "num_clients": CLIENTS, **settings}
        own = appfl.AffluxAggregator(appfl.Net(), appfl.OmegaConf.create(configs), lines)
        self.model = {name: array.numpy() for name, array in appfl.Net().state_dict().items()}
        self.server, self.lost, self.lines = own.server, own.run.lost, lines
        names = {0.5 if self.nameless and number == 0 else number: each for number, each in enumerate(clients)}
        try:
            self.simulate(own, names, steps)
        finally:
            own.close()

    def simulate(self, own, names, steps):
        for name, behaviour in names.items():
            own.set_client_sample_size(name, behaviour.examples)
        held = {name: own.get_parameters(client_id=name) for name in names}
        for turn in range(60):  # as many as num_global_epochs says
            for name, behaviour in names.items() if own.server.version < steps else ():
                arrays, report = behaviour.arrays(held[name]), behaviour.says("size", "val_loss", "current_local_steps")
                if arrays is None:  # it starts again, and counts its trainings from 0
                    held[name] = own.get_parameters(client_id=name)
                elif own.server.version < steps:
                    held[name] = own.aggregate(name, arrays, round=turn, **report)


class FLGo(Adapter):
    def start(self, rule, clients, steps, **settings):
        flgo = pytest.importorskip("flgo_runs")
        from afflux.integrations.flgo import BasicClient, algorithm

        class Client(BasicClient):
            def reply(self, package):
                behaviour = clients[self.id]
                arrays = behaviour.arrays(package["model"].state_dict())
                if arrays is None:
                    return {}
                says = behaviour.says("num_examples", "loss", "local_steps")
                return {"num_examples": None, **says, "model": SimpleNamespace(state_dict=lambda **options: arrays)}

        interval = settings.pop("checkpoint_every", 1)  # FLGo has an option for it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            algorithm_class = algorithm(rule, client=Client, **settings)
            own = flgo.started(algorithm_class, clients=CLIENTS, num_rounds=steps, check_interval=interval)
            self.server, self.lost = own.server, own.lost
            self.model = {name: np.array(array) for name, array in own.model.state_dict().items()}
            own.gv.logger.handle = lambda record: self.lines.append(record.getMessage())
            own.run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """FLGo's working directory, with its task."""
    return tmp_path_factory.mktemp("flgo")


@pytest.fixture(params=[Flower, NVFlare, APPFL, FLGo])
def started(request, monkeypatch, folder):
    """A function that starts a run of an adapter, and returns the run, also one that ends with an error."""

    def start(rule, *behaviours, steps=3, error=None, nameless=False, **settings):
        own = request.param(monkeypatch, nameless)
        clients = [*behaviours, *[behaviours[-1]] * (CLIENTS - len(behaviours))]
        own.clients = [replace(each, updates=[]) for each in clients]
        if error is None:
            own.start(rule, own.clients, steps, **settings)
        else:
            check_error(error, own.start, rule, own.clients, steps, error=(RuntimeError, AffluxError), **settings)
        return own

    start.adapter = request.param
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return start


@pytest.mark.parametrize(("rule", "by_examples"), [(fedavg, True), (fedbuff, False)])
def test_weights_with_a_fraction(rule, by_examples, started):
    """Shares are the weights of a rule that weighs by examples; another rule takes such replies, and ignores them."""
    values = [Behaviour(1.0), Behaviour(2.0), Behaviour(4.0), Behaviour(8.0)]
    counts = {"shares": (0.25, 0.5, 0.75, 1.25), "whole": (1, 2, 3, 5), "equal": (1, 1, 1, 1)}
    params = {}
    for name, examples in counts.items():
        clients = [replace(each, examples=count) for each, count in zip(values, examples, strict=True)]
        run = started(rule(buffer_size=4), *clients)
        assert {*run.counts} == {"joined"}
        params[name] = run.server.params.tobytes()
    assert params["shares"] == params["whole"]
    assert (params["whole"] != params["equal"]) is by_examples


def test_a_client_without_examples_is_said_to_have_none(started):
    run = started(fedbuff(buffer_size=2), Behaviour(examples=0), Behaviour(), max_failures=100, steps=6)
    assert run.counts["empty"] > 0
    assert "num_examples is 0" in run.said("empty")[0]


@pytest.mark.parametrize(
    "rule", [fedbuff(buffer_size=2), fedasync(), *soak(ca2fl(buffer_size=2)), *soak(fedavg(buffer_size=3))]
)
def test_clients_that_do_not_train_are_said_once(rule, started):
    for value, lines in ((0.0, 1), (1.0, 0)):
        assert len(started(rule, Behaviour(value), steps=4).said("are exactly 0")) == lines


def test_a_run_in_which_nothing_joins_ends_with_an_error(started):
    run = started(fedbuff(buffer_size=2), Behaviour(NAN), max_failures=2, steps=60, error="of 4 clients is.*non-fin")
    assert {*run.counts} == {"faulty"}
    assert 4 <= run.counts["faulty"] <= 20


def test_one_client_of_no_use_never_ends_a_run(started):
    run = started(fedbuff(buffer_size=2), Behaviour(NAN), Behaviour(), max_failures=1, steps=30)
    assert run.server.version == 30
    assert run.counts["faulty"] > 0
    lines = run.said("non-finite")
    assert lines
    assert all("0: its reply is faulty. [push] client" in line for line in lines)  # the client and the reason


def test_a_client_for_which_the_rule_has_no_room_is_named_once(started):
    """The others go on, and so does the run."""
    run = started(ca2fl(buffer_size=2), Behaviour(), steps=12, server_options={"num_clients": 3}, max_failures=1000)
    assert run.server.version == 12
    assert len(run.server.rows.client_ids) == 3
    lines = run.said("No task goes to client")
    assert len(lines) == 1
    assert "num_clients=3" in lines[0]


def test_clients_that_start_again_keep_what_the_rule_has_of_them(started):
    run = started(ca2fl(buffer_size=2), Behaviour(fails=3), steps=12, max_failures=100)
    assert run.server.version == 12
    assert len(run.server.rows.client_ids) == CLIENTS
    assert not run.said("No task goes to client")


def test_a_client_without_an_id_is_left_out(started):
    if started.adapter.gives_ids:
        return
    run = started(ca2fl(buffer_size=2), Behaviour(), steps=6, nameless=True)
    assert run.server.version == 6
    assert len(run.server.rows.client_ids) == 3
    assert np.isfinite(run.server.params).all()
    assert run.said("no id") or run.said("neither an int")


def test_roles(started):
    """The settings of each adapter reach its server; what a client has for itself is not read."""
    roles = started(fedbuff(buffer_size=2), Behaviour(), roles={"*b": "local"}).server.layout.roles
    assert {name.rpartition(".")[2]: role for name, role in roles.items()} == {"w": "trained", "b": "local"}


@pytest.mark.parametrize("kind", [*SPOILED, 0, -3, NAN, 10**30])
def test_a_reply_of_no_use_changes_nothing_but_a_count(kind, started):
    """Arrays that are no model of this kind, and numbers of examples that are none."""
    bad = Behaviour(3.0, spoils=kind) if kind in SPOILED else Behaviour(3.0, examples=kind)
    run = started(EQUAL, bad, Behaviour(), steps=6, max_failures=10**6)
    counts = run.counts
    assert counts.pop("empty" if kind == 0 else "faulty") > 0
    assert counts == {"joined": 12}
    assert run.server.params == pytest.approx(run.first + 6.0, abs=1e-5)
    assert run.server.tasks == () or not run.ends
    faults = run.server.faults
    assert {run.number(fault.client_id) for fault in faults} == ({0} if kind != 0 else set())
    assert all(fault.reason for fault in faults)


@pytest.mark.parametrize("rule", [fedbuff(buffer_size=3), ca2fl(buffer_size=3), fadas(buffer_size=3)])
def test_a_run_replays_to_the_same_bits(rule, started):
    """From the updates of the clients, each in the order in which it has sent them."""
    values = [Behaviour(value) for value in (1.0, -2.0, 0.5, 3.0)]
    run = started(rule, *values, steps=6, server_options={"log": True})
    assert run.server.version == 6
    assert max(entry.staleness for entry in run.server.log if isinstance(entry, Join)) > 0
    options = {"num_clients": run.server.options.num_clients, "faults": "record"}
    fresh = Server(rule, run.model, log=True, **options)
    again = replay(run.server.log, fresh, lambda join: run.clients[run.number(join.client_id)].updates.pop(0))
    assert again.params.tobytes() == run.server.params.tobytes()


def test_facts_are_numbers_of_the_replies(started):
    """Those that the rule needs, or the server lists."""
    rule = replace(fedbuff(buffer_size=4), weigh=Given("quality"))
    clients = [Behaviour(local_steps=5, facts={"quality": 1.0 + n, "tokens": 7, "other": 1.0}) for n in range(CLIENTS)]
    run = started(rule, *clients, steps=6, server_options={"facts": ["tokens"], "log": True})
    joins = {(entry.facts, entry.local_steps) for entry in run.server.log if isinstance(entry, Join)}
    assert joins == {((("quality", 1.0 + n), ("tokens", 7.0)), 5) for n in range(CLIENTS)}


def test_a_loss_that_is_no_finite_number_is_not_known(started):
    clients = [Behaviour(loss=loss) for loss in (float("inf"), NAN, 10**400, 0.5)]
    run = started(fedbuff(buffer_size=4), *clients, steps=6, server_options={"log": True})
    losses = {run.number(entry.client_id): entry.loss for entry in run.server.log if isinstance(entry, Join)}
    assert losses == pytest.approx({0: NAN, 1: NAN, 2: NAN, 3: 0.5}, nan_ok=True)


@pytest.mark.parametrize("rule", [EQUAL, ca2fl(buffer_size=2), *soak(mf_ca2fl(buffer_size=2))])
def test_a_store_goes_on(rule, started, tmp_path):
    """With its rows, its counts, and no task of the run before; a store that is at its end stays as it is."""
    options = {"store": tmp_path / "store", "checkpoint_every": 2}
    first = started(rule, Behaviour(), steps=4, **options)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 4
        before, counts = server.params.tobytes(), server.counts
        rows = None if server.rows is None else {*server.rows.client_ids}
    assert (not rows) == (not rule.calibrate.cached)
    assert before == first.server.params.tobytes()
    again = started(rule, Behaviour(), steps=4, **options)
    assert again.server.params.tobytes() == before
    assert again.counts == {name: count for name, count in counts.items() if count}
    run = started(rule, Behaviour(), steps=9, **options)
    assert rule is not EQUAL or run.server.params == pytest.approx(first.first + 9.0, abs=1e-4)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 9
        assert server.tasks == () or not run.ends
        assert server.counts["joined"] > counts["joined"]
        assert rows is None or {*server.rows.client_ids} >= rows


def test_a_rule_that_adds_noise_reads_its_key_from_a_file(started, tmp_path):
    """Also when its store continues. Without noise the params would be those of the mean."""
    (key := tmp_path / "key").write_bytes(bytes(range(32)))
    rule = dp_fedbuff(buffer_size=2, noise_multiplier=1.0)
    for steps in (2, 4):
        run = started(rule, Behaviour(), steps=steps, store=tmp_path / "store", noise_key_file=str(key))
        assert run.server.version == steps
    assert len({*run.server.params.tolist()}) == run.server.params.size
    assert all(key.read_bytes() not in file.read_bytes() for file in tmp_path.rglob("store/**/*") if file.is_file())
    started(rule, Behaviour(), error="noise_key_file must be a file of 32 secret bytes")


def test_the_store_of_another_program_rule_or_model_is_refused_and_stays_as_it_is(started, tmp_path):
    """The error names what differs, and nothing keeps the store open."""
    run = started(fedbuff(buffer_size=2), Behaviour(), steps=1)
    others = [
        (fedbuff(buffer_size=2), run.model, {"epoch": 3}, "notes are not those of this adapter: .*epoch"),
        (fedbuff(buffer_size=2), run.model, {"adapter": "mine"}, "the store is of a run of 'mine', and this one is of"),
        (fadas(buffer_size=2), run.model, None, "fadas"),
        (fedbuff(buffer_size=2), {"v": np.zeros(3, np.float32)}, None, "another model"),
    ]
    for number, (rule, model, notes, message) in enumerate(others):
        with Server(rule, model, store=(store := tmp_path / f"store {number}"), faults="record") as server:
            server.checkpoint(notes)
        started(fedbuff(buffer_size=2), Behaviour(), error=message, store=store)
        with Server.open(store) as server:
            assert server.version == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_options": {"faults": "raise"}}, 'faults="raise" would end the run for one client'),
        ({"server_options": {"max_stalenes": 1}}, "did you mean 'max_staleness'"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"roles": {"x.*": "local"}}, "x.\\*"),
    ],
)
def test_wrong_settings_are_refused(settings, message, started):
    started(fedbuff(buffer_size=2), Behaviour(), error=message, **settings)


def test_arrays_with_other_roles(started):
    """Of a local array each client keeps its own; a statistic is averaged, and the rule is not applied to it."""
    half = fedbuff(buffer_size=4, server_lr=0.5, staleness=Constant())
    run = started(half, Behaviour(), steps=2, roles={"*w": "local"})
    assert run.server.params == pytest.approx(run.first[12:] + 1.0, abs=1e-5)
    run = started(half, Behaviour(), steps=2, roles={"*w": "statistic"})
    assert run.server.params == pytest.approx(run.first[12:] + 1.0, abs=1e-5)
    now = run.server.pull().buffers
    assert (now - run.first[:12] > 1.0).all()


@pytest.mark.parametrize(
    ("package", "module"), [("flwr", "flower"), ("nvflare", "nvflare"), ("appfl", "appfl"), ("flgo", "flgo")]
)
def test_without_the_framework_the_error_says_what_to_install(package, module):
    code = f"import sys; sys.modules['{package}'] = None; import afflux.integrations.{module}"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    words = f"ImportError: afflux.integrations.{module} needs {package}"
    assert words in done.stderr
    assert f"pip install 'afflux[{module}]'" in done.stderr
