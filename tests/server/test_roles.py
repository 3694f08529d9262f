"""The role of each array of a model: what a server does with its values, and what goes out."""

import json
import logging

import numpy as np
import pytest
import torch

from afflux import AffluxError, Layout, Server
from afflux.rules import ca2fl, fadas, fedasync, fedavg, fedbuff
from afflux.store import check, export_params
from conftest import bits, check_error
from pairwise import pairwise, soak_all
from role_trees import CONTAINERS, check_round, roles_by_name


class Model(torch.nn.Module):
    """Every kind of array that torch's modules have."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(3, 2, bias=False)
        self.head.weight = self.body.weight
        self.codes = torch.nn.Parameter(torch.tensor([2**24 + 1, 2**31 - 1, -3], dtype=torch.int32), False)
        self.register_buffer("mask", torch.tensor([0.0, -np.inf]))
        self.register_buffer("seed", torch.tensor(2**53 + 1))
        self.register_buffer("table", torch.tensor([1e16, 3.0]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("codebook", torch.tensor([0.1, 0.2]))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


ROLES = roles_by_name(
    trained="body.weight body.bias norm.weight norm.bias",
    statistic="norm.running_mean norm.running_var norm.num_batches_tracked flags codebook",
    constant="codes mask seed table",
    alias="head.weight",
    local="_extra_state",
)


def changed(model, by=1.0):
    """The model after a training: parameters and statistics have moved."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += by
        model.norm.running_var.fill_(by)
        model.codebook += by
    return model


def pushed(server, model, client=0, **options):
    return server.push(client=client, version=server.version, model=model, **options)


def test_default_roles_of_a_module(caplog):
    layout = Layout.of(Model())
    assert layout.roles == ROLES
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert Layout.from_json(layout.to_json()).roles == ROLES
    assert "role='constant'" in repr(layout)
    with caplog.at_level(logging.INFO, "afflux"):
        Server(fedbuff(), Model())
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "averaged as statistics: flags, codebook"
    ]


def test_what_has_no_mean_is_not_averaged_by_default(caplog):
    """Permutations, rotations, queues, states and keys of random generators; what is averaged is a line to paste."""
    module = torch.nn.BatchNorm1d(2)
    arrays = {
        "perm": (torch.tensor([2, 0, 1]), "constant"),
        "order": (torch.tensor([2, 0, 1]), "constant"),
        "rotation_matrix": (torch.eye(2), "constant"),
        "queue": (torch.eye(2), "local"),
        "queue_ptr": (torch.zeros(1, dtype=torch.int64), "local"),
        "rng_state": (torch.get_rng_state(), "local"),
        "generator": (torch.get_rng_state(), "constant"),
        "calls": (torch.tensor([3]), "statistic"),
        "seen": (torch.tensor(1, dtype=torch.uint8), "constant"),
        "queue_labels": (torch.zeros(3), "local"),
        "rngState": (torch.zeros(3), "local"),
    }
    for name, (array, _) in arrays.items():
        module.register_buffer(name, array)
    expected = {name: role for name, (_, role) in arrays.items()}
    assert {name: Layout.of(module).roles[name] for name in arrays} == expected
    state = module.state_dict()
    for tree in (state, {name: array.numpy() for name, array in state.items()}):
        assert Layout.of(tree).roles == Layout.of(module).roles
    nested = {"q": {"queue": {"feats": torch.eye(2)}, "rotation": {"weight": torch.eye(2)}}}
    assert Layout.of(nested).roles == {"q.queue.feats": "local", "q.rotation.weight": "trained"}
    keys = {"w": np.ones(2), "key": np.array([0, 1], np.uint32), "seeds": np.array([0, 2], np.uint32)}
    keys["attention"] = {"key": np.ones(2)}
    assert [*Layout.of(keys).roles.values()] == ["trained", "trained", "constant", "local"]
    Server(fedbuff(), module)
    (record,) = caplog.records
    pasted = {"calls": "statistic"}
    assert record.levelname == "WARNING"
    assert f"Layout.of(model, roles={json.dumps(pasted)})" in record.getMessage()
    Server(fedbuff(), module, layout=Layout.of(module, roles=pasted))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "rule", [fedavg(buffer_size=2), fedasync(alpha=0.5), fadas(buffer_size=2)], ids=lambda r: r.name
)
@pytest.mark.parametrize("form", ["module", "state_dict", "no copy", "other copy"])
def test_what_goes_in_comes_out(rule, form):
    """Names, dtypes, shapes and the bits of constants, through a push of every form; then into torch, strictly."""
    forms = {
        "module": lambda model: model,
        "state_dict": lambda model: model.state_dict(),
        "no copy": lambda model: {n: a for n, a in model.state_dict().items() if n != "head.weight"},
        "other copy": lambda model: {n: a for n, a in model.state_dict().items() if n != "body.weight"},
    }
    start = Model()
    start.calls = 5
    server = Server(rule, start)
    for client in range(rule.buffer_size):
        assert pushed(server, forms[form](changed(Model(), 1.0 + client)), client).status == "joined"
    tree, expected = server.checkout("ann").tree(), start.state_dict()
    assert tree.keys() == expected.keys()
    for name, array in expected.items():
        if name != "_extra_state":
            assert (tree[name].dtype, tree[name].shape) == (array.dtype, array.shape)
        if ROLES[name] == "constant":
            assert bits(tree[name].numpy()) == bits(array.numpy())
    mine = Model()
    mine.load_state_dict(tree)
    assert mine.calls == 5
    assert bits(tree["head.weight"].numpy()) == bits(tree["body.weight"].numpy())
    assert bits(server.layout.flatten(mine)) == bits(server.params)


def test_a_client_whose_constant_differs_is_refused():
    server = Server(fedbuff(buffer_size=1), Model(), faults="record")
    for name in ("codes", "mask", "seed", "table"):
        other = Model()
        with torch.no_grad():
            getattr(other, name).view(-1)[-1] += 1 if name != "mask" else np.inf
        receipt = pushed(server, other)
        assert receipt.status == "faulty"
        assert f"client 0's model: [layout] {name} differs from the server's, and is a constant" in receipt.reason
        assert f'roles={{"{name}": "local"}}' in receipt.reason
    assert (server.version, server.arrivals_waiting) == (0, 0)
    half = Model().half()  # the client's own precision: the same constants, rounded
    half.table = Model().table  # beyond the range of float16
    assert pushed(server, half).status == "joined"


def test_loading_changes_no_constant_and_mends_that_of_a_fresh_client():
    server = Server(fedbuff(buffer_size=1), Model())
    other = Model()
    with torch.no_grad():
        other.codes.zero_()
        other.calls = 9
    server.pull(out=other)
    assert other.codes.tolist() == [2**24 + 1, 2**31 - 1, -3]
    assert other.mask.tolist() == [0.0, -np.inf]
    assert (other.seed.item(), other.calls) == (2**53 + 1, 9)
    with pytest.raises(AffluxError, match=r"codes .*\(2,\).*\(3,\)"):
        server.pull(out=dict(Model().state_dict()) | {"codes": torch.zeros(2, dtype=torch.int32)})


def test_the_servers_own_constants_are_not_read(monkeypatch):
    """A client in the same process may push the memory that it got."""
    start = {"w": np.zeros(2), "mask": np.array([0.0, -np.inf])}
    server = Server(fedbuff(buffer_size=1), start, layout=Layout.of(start, roles={"mask": "constant"}))
    own = server.layout.views(np.ones(2), constants=server._adapter.constants)
    monkeypatch.setattr("afflux.arrays.constants.np.array_equal", None)
    assert pushed(server, own).status == "joined"


def test_a_state_with_damaged_constants_does_not_overwrite_params():
    start = {"w": np.zeros(2), "mask": np.array([0.0, -np.inf])}
    layout = Layout.of(start, roles={"mask": "constant"})
    server = Server(fedbuff(buffer_size=1), start, layout=layout, inplace=True)
    state = server.state_dict()
    state["arrays"] |= {"params": np.ones_like(state["arrays"]["params"]), "constants": np.zeros(3, np.uint8)}
    check_error(r"\[load_state_dict\] constants is uint8 of shape \(3,\), expected", server.load_state_dict, state)
    assert server.params.tolist() == [0.0, 0.0]


def test_constants_survive_a_state_and_a_store(tmp_path):
    server = Server(fedbuff(buffer_size=1), Model())
    state = server.state_dict()
    other = Model()
    with torch.no_grad():
        other.codes.zero_()
        other.mask[0] = 7
    loaded = Server(fedbuff(buffer_size=1), other)
    loaded.load_state_dict(state)
    assert loaded.checkout("ann").tree()["codes"].tolist() == Model().codes.tolist()
    Server(fedbuff(buffer_size=1), Model(), store=tmp_path / "store").close()
    with Server.open(tmp_path / "store") as opened:
        assert opened.layout.roles == ROLES
        tree = opened.checkout("ann").tree()
        assert tree["codes"].tolist() == Model().codes.tolist()
        assert tree["mask"].tolist() == [0.0, -np.inf]
        assert "_extra_state" not in tree  # no array: not in a store
        assert pushed(opened, Model()).status == "joined"
    export_params(tmp_path / "store", tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as model:
        assert model["codes"].tolist() == Model().codes.tolist()
    file = tmp_path / "store" / "constants.bin"
    file.write_bytes(file.read_bytes()[:-5] + b"hallo")
    check_error(r"constants\.bin is damaged", Server.open, tmp_path / "store")
    assert "constants.bin is damaged" in check(tmp_path / "store").problems[0]


@pytest.mark.parametrize("kind", ["model", "update"])
def test_copies_of_tied_arrays_that_differ_are_refused(kind):
    server = Server(fedbuff(buffer_size=1), Model())
    tree = {name: array.clone() for name, array in Model().state_dict().items() if name != "_extra_state"}
    tree["head.weight"][0, 0] += 1
    check_error("head.weight differs from body", server.push, client=0, version=0, **{kind: tree}, buffers=Model())
    untied = Model()
    untied.head.weight = torch.nn.Parameter(untied.body.weight.detach() + 1)
    check_error(r"head\.weight differs from body\.weight", pushed, server, untied)
    server.pull(out=untied)  # both copies are written
    assert bits(untied.head.weight.detach().numpy()) == bits(untied.body.weight.detach().numpy())
    target = {name: array.clone() for name, array in Model().state_dict().items() if name != "_extra_state"}
    target["head.weight"].zero_()
    server.pull(out=target)
    assert bits(target["head.weight"].numpy()) == bits(target["body.weight"].numpy())


def test_a_state_dict_of_tied_arrays_counts_them_once():
    """Its tensors share their memory; a safetensors file holds only one of the names."""
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    state = tied.state_dict()
    assert Layout.of(state).roles == {"a.weight": "trained", "b.weight": "alias"}
    assert Layout.of(state, roles={"b.weight": "trained"}).size == 8
    server = Server(fedbuff(buffer_size=1), state)
    for name in state:
        assert server.push(client=name, version=server.version, model={name: torch.ones(2, 2)}).status == "joined"
    assert server.checkout("ann").tree().keys() == state.keys()


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_a_server_of_a_file_that_has_one_name_of_a_tied_array(name):
    """It takes a client's module or state_dict, which have both, and is pulled into them."""

    def tied():
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        return model

    server = Server(
        fedbuff(buffer_size=1), {n: a for n, a in tied().state_dict().items() if n in (name, "a.bias", "b.bias")}
    )
    for form in (lambda model: model, lambda model: model.state_dict(), torch.nn.DataParallel):
        client, target = tied(), tied()
        assert pushed(server, form(client)).status == "joined"
        server.pull(out=form(target))
        assert bits(server.layout.flatten(target)) == bits(server.params)
        assert np.allclose(server.params, server.layout.flatten(client))
        assert target["b"].weight is target["a"].weight


def spectral(old):
    layer = torch.nn.Linear(3, 3)
    return (torch.nn.utils.spectral_norm if old else torch.nn.utils.parametrizations.spectral_norm)(layer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("form", ["module", "state_dict"])
def test_the_vectors_of_spectral_norm_are_copied(old, form):
    """From the arrival of the largest weight, whole: they stay unit vectors."""
    torch.manual_seed(0)
    server = Server(fedavg(buffer_size=2), spectral(old) if form == "module" else spectral(old).state_dict())
    vectors = [name for name, role in server.layout.roles.items() if role == "copied"]
    assert len(vectors) == 2
    clients = [spectral(old), spectral(old)]
    for client, model in enumerate(clients):
        assert pushed(server, model.state_dict(), client, num_examples=1 + client).status == "joined"
    tree = server.checkout("ann").tree()
    for name in vectors:
        assert bits(tree[name].numpy()) == bits(clients[1].state_dict()[name].numpy())
    target = spectral(old)
    server.pull(out=target)
    assert bits(target.state_dict()[vectors[0]].numpy()) == bits(tree[vectors[0]].numpy())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64, torch.bfloat16, torch.bool])
def test_copied_arrays_of_any_dtype(dtype, tmp_path):
    values = torch.tensor([3, 0, 1, 1, 5]).to(dtype)
    if dtype == torch.int64:
        values[0] = 2**63 - 1
    start = {"w": torch.zeros(2), "key": torch.zeros(5, dtype=dtype), "mean": torch.zeros(2)}
    layout = Layout.of(start, roles={"key": "copied", "mean": "statistic"})
    with Server(fedavg(buffer_size=2), start, layout=layout, store=tmp_path / "store") as server:
        for client in range(2):
            tree = {"w": torch.ones(2), "key": values if client else start["key"], "mean": torch.full((2,), 2.0)}
            pushed(server, tree, client, num_examples=1 + client)
        assert server.checkout("ann").tree()["key"].equal(values)
        out = {name: array.clone() for name, array in start.items()}
        server.pull(out=out)
        assert out["key"].equal(values)
        assert out["mean"].tolist() == [2.0, 2.0]
    with Server.open(tmp_path / "store") as opened:
        assert opened.checkout("ann").tree()["key"].tolist() == values.tolist()


def test_hostile_words_of_copied_arrays():
    layout = Layout.of(start := {"w": np.zeros(2), "u": np.zeros(1, np.float32)}, roles={"u": "copied"})
    server = Server(fedbuff(buffer_size=1), start, layout=layout)
    for words in (0.5, -1.0, 2.0**32, np.nan, float(np.float32(np.nan).view(np.uint32))):
        with pytest.raises(AffluxError, match=r"buffers has (no 32-bit words|a NaN) in u"):
            server.push(client=0, version=0, update=np.ones(2), buffers=np.array([words]))
    check_error("u is int32, expected float32", pushed, server, {"w": np.zeros(2), "u": np.zeros(1, np.int32)})


def test_local_arrays_stay_with_the_client():
    """FedBN, FedPer: no push needs them, none reads them, no load changes them; trees have the server's first."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    layout = Layout.of(net, roles={"1.*": "local"})
    server = Server(fedbuff(buffer_size=1), net, layout=layout)
    assert (layout.size, layout.buffers_size) == (6, 0)
    mine = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        mine[1].weight.fill_(np.nan)
    assert pushed(server, mine).status == "joined"
    assert pushed(server, mine[:1]).status == "joined"
    server.pull(out=mine)
    assert mine[1].weight.isnan().all()
    assert server.checkout("ann").tree()["1.weight"].tolist() == [1.0, 1.0]


def test_wrong_roles():
    model = Model()
    check_error("is 'buffer', must be 'trained', ", Layout.of, model, roles={"norm.*": "buffer"})
    check_error(r"roles has 'nrom\.\*', which matches no array", Layout.of, model, roles={"nrom.*": "local"})
    check_error("roles has 5, which matches no array", Layout.of, model, roles={5: "local"})
    check_error("must be a dict of roles", Layout.of, model, roles=["body"])
    check_error(r"body\.bias shares its memory with no array", Layout.of, model, roles={"body.bias": "alias"})
    text = r"no parameter to train, d is 0; it holds running_mean \(statistic\)"
    check_error(text, Server, fedbuff(), {"running_mean": np.ones(2)})
    check_error("d is 0; it holds no array", Server, fedbuff(), {})


@pytest.mark.parametrize(("role", "lowest"), [(None, None), ("copied", 1.0), ("local", 5.0)])
def test_ranges_that_begin_at_infinity(role, lowest):
    """As those of torch's MinMaxObserver, which have no mean at the start: a role says what to do."""

    def observed(low):
        module = torch.nn.Linear(1, 1)
        module.register_buffer("min_val", torch.tensor(low))
        return module

    layout = Layout.of(observed(np.inf), roles=None if role is None else {"min_val": role})
    server = Server(fedbuff(buffer_size=1), observed(np.inf), layout=layout)
    if role is None:
        check_error(r'min_val differs.*roles=\{"min_val": "local"\}', pushed, server, observed(1.0))
    else:
        assert pushed(server, observed(1.0)).status == "joined"
        server.pull(out=(target := observed(5.0)))
        assert target.min_val == lowest


def test_extra_states_are_local_in_every_tree():
    state = torch.nn.Linear(1, 1).state_dict() | {"_extra_state": torch.tensor([1, 2], dtype=torch.uint8)}
    for start in (state, {"body": {**state}}, {name: array.numpy() for name, array in state.items()}):
        server = Server(fedbuff(buffer_size=1), start)
        assert "local" in server.layout.roles.values()
        assert server.layout.size == 2
    server = Server(fedbuff(buffer_size=1), torch.nn.Linear(1, 1))  # which has none
    assert pushed(server, {**state, "_extra_state": object()}).status == "joined"


@pytest.mark.parametrize("form", ["module", "state_dict"])
def test_integer_parameters_are_constants_everywhere(form):
    module = torch.nn.Linear(2, 2)
    module.packed = torch.nn.Parameter(torch.tensor([[0, 255]], dtype=torch.uint8), False)
    tree = module if form == "module" else module.state_dict()
    server = Server(fedbuff(buffer_size=2), tree)
    assert server.layout.roles["packed"] == "constant"
    other = torch.nn.Linear(2, 2)
    other.packed = torch.nn.Parameter(torch.tensor([[255, 0]], dtype=torch.uint8), False)
    check_error("packed differs", pushed, server, other)


def test_a_state_dict_does_not_tell_parameters_from_counters():
    """Only as long as its tensors are detached."""
    module = torch.nn.Linear(1, 1)
    module.order = torch.nn.Parameter(torch.tensor([2]), False)
    found = {
        "module": Layout.of(module),
        "named_parameters": Layout.of(dict(module.named_parameters())),
        "keep_vars": Layout.of(module.state_dict(keep_vars=True)),
        "state_dict": Layout.of(module.state_dict()),
        "declared": Layout.of(module.state_dict(), roles={"order": "constant"}),
    }
    roles = {name: layout.roles["order"] for name, layout in found.items()}
    assert roles == dict.fromkeys(found, "constant") | {"state_dict": "statistic"}
    server = Server(fedbuff(buffer_size=1), module.state_dict(), layout=found["declared"])
    other = dict(module.state_dict()) | {"order": torch.tensor([0])}
    check_error("order differs", pushed, server, other)


def test_buffers_of_modules_without_parameters_are_selected():
    net = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
    )
    net[2].requires_grad_(False)
    names = {field.name for field in Layout.of(net, select="trainable").buffers}
    assert names == {f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_clients_of_models_with_cached_rows():
    """CA2FL keeps a row of the trained arrays alone."""
    server = Server(ca2fl(buffer_size=2), Model(), num_clients=4)
    for client in range(2):
        assert pushed(server, changed(Model()), client).status == "joined"
    assert server.version == 1


@pairwise("container, kind, form", sorted(CONTAINERS), ["update", "gradient", "model"], ["update", "gradient", "model"])
@pytest.mark.parametrize("seed", [0, *soak_all([(seed,) for seed in range(1, 30)])])
def test_a_round_against_a_dictionary(container, kind, form, seed):
    """Every role, container and kind of rule; what goes out has the names, shapes and dtypes of what came in."""
    check_round(CONTAINERS[container], kind, form, seed)
