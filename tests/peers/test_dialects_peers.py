"""The dialects against the frameworks' own code, where it is installed: make test-peers."""

import importlib
import warnings
from inspect import signature

import numpy as np
import pytest

import oracle
from afflux import Server, rules
from afflux.rules import fedbuff
from afflux.rules.presets.dialects import appfl, nvflare
from afflux.rules.staleness import Constant, Hinge, Polynomial

#: The names of options that Flower's strategies have.
FLOWER = {"num_malicious_nodes": 1, "num_nodes_to_select": 2, "beta": 0.45}
SIZE, BUFFER, ROUNDS, CLIENTS = 300, 4, 8, 9


def peer(module):
    """A framework's module; skips the test where it is not installed. Their imports warn about many things."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as missing:
            pytest.skip(f"{module}: {missing} (make frameworks installs it)")


def trace(rng):
    """Rounds of (client, version pulled, update); a client pulls again after each of its pushes, but later than it."""
    pulled = dict.fromkeys(range(CLIENTS), 0)
    for t in range(ROUNDS):
        round_ = []
        for client in rng.choice(CLIENTS, BUFFER, replace=False):
            round_.append((int(client), pulled[int(client)], rng.standard_normal(SIZE).astype(np.float32)))
        yield t, round_
        for client, *_ in round_:
            pulled[client] = t + 1


def compare(rule, start, rng, theirs):
    """Runs the trace through afflux and through `theirs(t, [(client, version, update, model), ...]) -> params`.

    They compute in float32, M additions a round of numbers below `largest`, and feed their own params back.
    """
    server, history, allowed = Server(rule, start), [], 0.0
    for t, round_ in trace(rng):
        history.append(server.params.copy())
        full = [(client, version, u, history[version] + u) for client, version, u in round_]
        for client, version, update, model in full:
            sent = model if rule.kind == "model" else update
            server.push(client=client, version=version, **{rule.kind: sent})
        largest = max(np.abs(array).max() for _, _, u, y in full for array in (history[-1], u, y))
        allowed += 8 * BUFFER * oracle.U32 * BUFFER * 2 * float(largest)
        difference = np.abs(server.params - theirs(t, full)).max()
        assert difference <= allowed
    assert np.abs(server.params - start).max() > 100 * allowed  # the bound says something


@pytest.fixture
def start(rng):
    return rng.standard_normal(SIZE).astype(np.float32)


@pytest.mark.parametrize("weighted", [True, False])
def test_nvflare(weighted, start, rng):
    manager = peer("nvflare.edge.assessors.buff_model_manager")
    dxo, mud = peer("nvflare.apis.dxo"), peer("nvflare.edge.mud")
    context = peer("nvflare.apis.fl_context").FLContext()
    version = tuple(map(int, peer("nvflare").__version__.split(".")[:2]))
    theirs = manager.BuffModelManager(num_updates_for_model=BUFFER, global_lr=0.7, staleness_weight=weighted)
    theirs.initialize_model(dxo.DXO(dxo.DataKind.WEIGHTS, data={"x": start}), context)
    theirs.generate_new_model(context)  # their version 1 is the initial model

    def step(t, round_):
        for client, pulled, update, _ in round_:
            diff = dxo.DXO(dxo.DataKind.WEIGHT_DIFF, data={"dict": {"x": update.copy()}, "count": 1})
            one = mud.ModelUpdate(pulled + 1, diff.to_shareable(), {str(client): 0.0})
            theirs.process_updates({pulled + 1: one}, context)
        assert theirs.current_model_version == t + 2
        return np.array(theirs.current_model.data["x"])

    dialect = nvflare(per_version=version < (2, 9))
    law = None if weighted else Constant()
    compare(fedbuff(buffer_size=BUFFER, server_lr=0.7, staleness=law, dialect=dialect), start, rng, step)


@pytest.mark.parametrize(
    ("clients", "optimize_memory", "law", "name", "options"),
    [
        (1, False, Constant(), "constant", {}),
        (4, False, Hinge(10.0, 1.0), "hinge", {"a": 10.0, "b": 1.0}),
        (4, False, Polynomial(0.5), "polynomial", {"a": 0.5}),
        (4, True, Polynomial(0.5), "polynomial", {"a": 0.5}),  # slow: it collects garbage at every call
    ],
)
def test_appfl(clients, optimize_memory, law, name, options, start, rng):
    torch, aggregators = peer("torch"), peer("appfl.algorithm.aggregator")
    configs = {"K": BUFFER, "num_clients": clients, "alpha": 0.4, "staleness_fn": name, "staleness_fn_kwargs": options}
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.tensor(start))
    config = peer("omegaconf").OmegaConf.create({**configs, "optimize_memory": optimize_memory})
    theirs = aggregators.FedBuffAggregator(model, config)
    for client in range(CLIENTS):
        theirs.get_parameters(client_id=client)

    def step(t, round_):
        for client, _, _, local in round_:
            theirs.aggregate(client, {"x": torch.tensor(local)})
        for client, *_ in round_:
            theirs.get_parameters(client_id=client)
        return theirs.get_parameters()["x"].detach().numpy()

    rule = fedbuff(buffer_size=BUFFER, server_lr=0.4, staleness=law, dialect=appfl(num_clients=clients))
    compare(rule, start, rng, step)


def test_flgo(start, rng):
    torch, fmodule, algorithm = peer("torch"), peer("flgo.utils.fmodule"), peer("flgo.algorithm.fedbuff")

    class Vector(fmodule.FModule):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(SIZE))

    def vector(values, version):
        model = Vector()
        model.x.data = torch.tensor(values)
        model._round = version + 1  # theirs starts at 1
        return model

    theirs = algorithm.Server.__new__(algorithm.Server)  # its constructor wants a whole task
    theirs.__dict__.update(buffer=[], buffer_ratio=1.0, num_clients=BUFFER, eta=0.7, model=vector(start, 0))

    def step(t, round_):
        theirs.current_round = t + 1
        for client, pulled, update, _ in round_:
            updated = theirs.package_handler({"model": [vector(update, pulled)], "__cid": [client]})
        assert updated
        return theirs.model.x.detach().numpy()

    compare(fedbuff(buffer_size=BUFFER, server_lr=0.7, dialect="flgo"), start, rng, step)


@pytest.mark.parametrize("name", ["krum", "multi_krum", "fedtrimmedavg"])
def test_flower(name, start, rng):
    """One synchronous round for each: Flower takes models, of clients with equal numbers of examples."""
    records, strategies = peer("flwr.app"), peer("flwr.serverapp.strategy")
    krum, trimmed = (peer(f"flwr.serverapp.strategy.{module}") for module in ("multikrum", "fedtrimmedavg"))
    own = {"krum": strategies.Krum, "multi_krum": strategies.MultiKrum, "fedtrimmedavg": strategies.FedTrimmedAvg}
    options = {key: value for key, value in FLOWER.items() if key in signature(own[name].__init__).parameters}
    rule = rules.make(name, dialect="flower", buffer_size=CLIENTS, **options)
    updates = rng.standard_normal((CLIENTS, SIZE)).astype(np.float32)
    models = start + updates
    if name == "fedtrimmedavg":
        wanted = trimmed.trim_mean(models, options["beta"])
    else:
        contents = [records.RecordDict({"arrays": records.ArrayRecord([model])}) for model in models]
        count = options.get("num_nodes_to_select", 1)
        nearest = krum.select_multikrum(contents, options["num_malicious_nodes"], count)
        wanted = np.mean([content["arrays"].to_numpy_ndarrays()[0] for content in nearest], axis=0)
    server = Server(rule, start)
    for client in range(CLIENTS):
        server.push(client=client, version=0, update=updates[client])
    assert np.abs(server.params - wanted).max() <= 2 * CLIENTS * oracle.U32 * np.abs(models).max()
