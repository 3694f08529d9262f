"""What the four adapters hold in common, in one form: weights with a fraction; clients that are of no use, that start
again, that have no id, or that the rule has no room for; and what a run says.
"""

import logging
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest

from afflux.rules import ca2fl, fedasync, fedavg, fedbuff
from pairwise import soak

CLIENTS = 4
NAN = float("nan")


@dataclass
class Behaviour:
    """What a client does with the model that it gets."""

    value: float = 1.0  #: added to each element; NaN is of no use
    examples: float | None = 10  #: its number of examples; None: it does not say
    fails: int = 0  #: every so many replies it fails, and starts again; 0: never
    replies: int = 0

    def next(self):
        """The value of its next reply; None if it fails."""
        self.replies += 1
        return None if self.fails and self.replies % self.fails == 0 else self.value


class Adapter:
    """A run of an adapter in this process: its server, its counts, and the lines of its framework's log."""

    gives_ids = True  #: whether the framework names the clients, so that none is without an id

    def __init__(self, patch, nameless):
        self.patch, self.nameless, self.lines = patch, nameless, []  #: nameless: client 0 has no id

    def start(self, rule, clients, steps, **settings):
        raise NotImplementedError

    @property
    def counts(self):
        return {name: count for name, count in {**self.server.counts, **self.lost}.items() if count}

    def said(self, text):
        return [line for line in self.lines if text in line]


class Flower(Adapter):
    gives_ids = False

    def start(self, rule, clients, steps, **settings):
        flower = pytest.importorskip("flower_grid")

        def node(behaviour):
            def reply(message):
                value = behaviour.next()
                if value is None:
                    return flower.Error(0, "it starts again")
                metrics = {} if behaviour.examples is None else {"num-examples": behaviour.examples}
                content = flower.adds(value)(message)
                return flower.RecordDict({**content, "metrics": flower.MetricRecord(metrics)})

            return reply

        self.patch.setattr(flower.FLOWER_LOGGER, "handle", lambda record: self.lines.append(record.getMessage()))
        key = {1: "ann", 2: "ben", 3: "cleo"}.get if self.nameless else None
        own = flower.strategy(rule, client_key=key, **{"retry_after": 0.0, **settings})
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
                value = behaviour.next()
                if value is None:
                    raise RuntimeError("it starts again")
                return sites.adds(value)(model, version)[0], {"num_steps": behaviour.examples}

            return reply

        own = nvflare.small(rule, rounds=steps, settings={"concurrency": CLIENTS, **settings})
        own.logger = logging.Logger("contract")
        own.logger.handle = lambda record: self.lines.append(record.getMessage())
        functions = {f"site-{number}": site(behaviour) for number, behaviour in enumerate(clients)}
        try:
            nvflare.run(own, sites.Sites(functions), self.patch)
        finally:
            self.server, self.lost = own.server, own.lost


class APPFL(Adapter):
    """In the order of the virtual-time simulator, with clients of equal speed."""

    gives_ids = False

    def start(self, rule, clients, steps, **settings):
        appfl = pytest.importorskip("appfl_here")
        lines, configs = appfl.Lines(), {"rule": rule.to_config(), "num_clients": CLIENTS, **settings}
        own = appfl.AffluxAggregator(appfl.Net(), appfl.OmegaConf.create(configs), lines)
        self.server, self.lost, self.lines = own.server, own.run.lost, lines
        names = {0.5 if self.nameless and number == 0 else number: each for number, each in enumerate(clients)}
        for name, behaviour in names.items():
            own.set_client_sample_size(name, behaviour.examples)
        held = {name: own.get_parameters(client_id=name) for name in names}
        for turn in range(60):  # as many as num_global_epochs says
            for name, behaviour in names.items() if own.server.version < steps else ():
                value = behaviour.next()
                if value is None:  # it starts again, and counts its trainings from 0
                    held[name] = own.get_parameters(client_id=name)
                else:
                    held[name] = own.aggregate(name, appfl.moved(held[name], value), round=turn)


class FLGo(Adapter):
    def start(self, rule, clients, steps, **settings):
        flgo = pytest.importorskip("flgo_runs")
        from afflux.integrations.flgo import BasicClient, algorithm

        class Client(BasicClient):
            def reply(self, package):
                behaviour = clients[self.id]
                value = behaviour.next()
                if value is None:
                    return {}
                for part in package["model"].parameters():
                    part.data += value
                return {"model": package["model"], "num_examples": behaviour.examples}

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = flgo.started(algorithm(rule, client=Client, **settings), clients=CLIENTS, num_rounds=steps)
            self.server, self.lost = own.server, own.lost
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
        clients = [replace(behaviour) for behaviour in behaviours]
        clients += [replace(behaviours[-1]) for _ in range(CLIENTS - len(clients))]
        if error is None:
            own.start(rule, clients, steps, **settings)
        else:
            with pytest.raises(RuntimeError, match=error):
                own.start(rule, clients, steps, **settings)
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
    run = started(
        fedbuff(buffer_size=2), Behaviour(NAN), max_failures=2, steps=60, error="of 4 clients is of use.*non-fin"
    )
    assert {*run.counts} == {"faulty"}
    assert 4 <= run.counts["faulty"] <= 20


def test_one_client_of_no_use_never_ends_a_run(started):
    run = started(fedbuff(buffer_size=2), Behaviour(NAN), Behaviour(), max_failures=1, steps=30)
    assert run.server.version == 30
    assert run.counts["faulty"] > 0
    assert run.said("non-finite")


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
    assert run.said("no id") or run.said("no int")


def test_roles(started):
    """The settings of each adapter reach its server; what a client has for itself is not read."""
    roles = started(fedbuff(buffer_size=2), Behaviour(), roles={"*b": "local"}).server.layout.roles
    assert {name.rpartition(".")[2]: role for name, role in roles.items()} == {"w": "trained", "b": "local"}
