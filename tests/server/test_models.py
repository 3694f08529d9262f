"""Servers of models: trees in and out, buffers apart, other types of params and slots, params in place."""

import numpy as np
import pytest
import torch

from afflux import Server, replay
from afflux.arrays import interop
from afflux.rules import RULES, ca2fl, fedasync, fedavg, fedbuff
from afflux.server.pushing import CallError
from conftest import awkward, bits, check_error, preset, push_all, ready, same_state


def module(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def with_statistics(seed, count):
    """A module whose running mean is all `seed`, and whose counter is `count`."""
    model = module(seed)
    model[1].running_mean.fill_(float(seed))
    model[1].num_batches_tracked.fill_(count)
    return model


def parameters(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


FORMS = {
    "torch dict": lambda model: dict(model.state_dict()),
    "numpy dict": lambda model: {name: value.numpy() for name, value in model.state_dict().items()},
    "flat torch": lambda model: torch.cat([p.detach().flatten() for p in model.parameters()]),
    "flat numpy": parameters,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_gives_the_same_bits(form):
    """A fedbuff round over three updates, pushed as trees or as vectors."""
    start, models = module(0), [module(seed) for seed in (1, 2, 3)]
    server, flat = Server(fedbuff(buffer_size=3), start), Server(fedbuff(buffer_size=3), parameters(start))
    for client, model in enumerate(models):
        server.push(client=client, update=FORMS[form](model), version=0, buffers=model)
        flat.push(client=client, update=parameters(model), version=0)
    assert bits(server.params) == bits(flat.params)
    assert server.version == 1
    assert flat.pull().buffers is None


def test_a_gradient_tree_needs_no_buffers_in_it():
    server = Server(fedavg(buffer_size=1), module())
    before = server.params.copy()
    gradients = {name: torch.ones_like(p) for name, p in module().named_parameters()}
    server.push(client=0, update=gradients, version=0, buffers=module())
    assert np.array_equal(server.params, (before + np.float32(1)).astype(np.float32))


def test_buffers_are_averaged_over_the_accepted():
    """With the rule's weights, here the numbers of examples: running means 1, 2 and 6, counters 10, 10 and 25."""
    server = Server(fedavg(buffer_size=3), module())
    pushed = [with_statistics(seed, count) for seed, count in ((1, 10), (2, 10), (6, 26))]
    for client, model in enumerate(pushed):
        server.push(client=client, update=parameters(model), version=0, num_examples=(1, 2, 5)[client], buffers=model)
    pulled = server.pull()
    # running_mean, running_var, num_batches_tracked
    assert pulled.buffers.tolist() == [4.375] * 4 + [1.0] * 4 + [20.0]
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        pulled.buffers.flags.writeable = True
    mine = module(9)
    assert server.pull(out=mine) == 1
    assert mine[1].running_mean.tolist() == [4.375] * 4
    assert mine[1].num_batches_tracked.item() == 20
    assert bits(parameters(mine)) == bits(server.params)


def test_a_replay_takes_the_buffers():
    server, again = (Server(fedavg(buffer_size=2), module(), log=True) for _ in range(2))
    pushed = [with_statistics(seed, 10 * seed) for seed in (1, 2, 5)]
    push_all(server, range(len(pushed)), lambda i: parameters(pushed[i]), version=0, buffers=pushed.__getitem__)
    vectors = [parameters(model) for model in pushed]
    replay(server.log, again, lambda join: vectors[join.number], buffers=lambda join: pushed[join.number])
    same_state(server.state_dict(), again.state_dict())
    assert again.pull().buffers.tolist() == [1.5] * 4 + [1.0] * 4 + [15.0]


def test_a_rejected_clients_buffers_do_not_count():
    from afflux import Calibrate, Rule
    from afflux.ops import Step

    weights = iter([np.array([0.0, 1.0]), np.array([0.0, 0.0])])
    rule = Rule("mine", "update", 2, lambda arrivals: next(weights), Calibrate(False), lambda arrivals: Step("sgd"))
    server = Server(rule, module())
    for version in range(2):
        for client, model in enumerate((with_statistics(7, 70), with_statistics(2, 20))):
            server.push(client=client, update=parameters(model), version=version, buffers=model)
        # no arrival is accepted in the second round: they do not change
        assert server.pull().buffers.tolist() == [2.0] * 4 + [1.0] * 4 + [20.0]


def test_fedasync_mixes_buffers_like_params():
    """Its authors: x = (1 - alpha) x + alpha y for everything in the model."""
    server = Server(fedasync(alpha=0.25), with_statistics(0, 100))
    model = with_statistics(4, 200)
    server.push(client=0, model=model, version=0)  # kind model: the tree holds the buffers
    assert server.pull().buffers.tolist() == [1.0] * 4 + [1.0] * 4 + [125.0]


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (None, r"client 3's push lacks the model's buffers \(1.running_mean, 1.running_var, 1.num_batches_tracked\)"),
        (np.zeros(8), r"client 3's buffers has shape \(8,\), expected \(9,\)"),
        ({"1.running_mean": np.zeros(4)}, "client 3's buffers: .* lacks 1.running_var"),
        (np.array([0.0] * 4 + [np.nan] + [0.0] * 4), r"client 3's buffers has .* at index 4 \(in 1.running_var\)"),
        ("none", "client 3's buffers: "),
    ],
)
def test_wrong_buffers(buffers, message):
    server = Server(fedavg(buffer_size=2), module())
    before = server.state_dict()
    check_error(r"\[push\] " + message, server.push, client=3, update=parameters(module()), version=0, buffers=buffers)
    assert server.arrivals_waiting == 0
    assert server.counts["refused"] == 1
    assert bits(before["arrays"]["params"]) == bits(server.params)


# pull(out=...)


@pytest.mark.parametrize("inplace", [False, True])
def test_pull_into_everything(inplace):
    model = module(1)
    server = Server(fedavg(buffer_size=1), model, inplace=inplace)
    server.push(client=0, update=parameters(module(2)), version=0, buffers=with_statistics(5, 50))
    expected = server.params
    flat = np.zeros(expected.size, np.float32)
    wide, tensor = np.zeros(expected.size), torch.zeros(expected.size)
    for out in (flat, wide, tensor):
        assert server.pull(out=out) == 1
        assert np.array_equal(out, expected)
    for form in (lambda model: model, FORMS["torch dict"], FORMS["numpy dict"]):
        mine = module(3)
        assert server.pull(out=form(mine)) == 1
        assert bits(parameters(mine)) == bits(expected)
        assert mine[1].num_batches_tracked.item() == 50


def test_what_does_not_fit_the_params():
    model = {name: value.detach() for name, value in module().named_parameters()}
    server, flat = Server(fedavg(), model), Server(fedavg(), np.zeros(2, np.float32))
    check_error("it has 4 elements, the server's params have 34", server.pull, out=np.zeros(4, np.float32))
    check_error(r"\[pull\] out: .* is int64", server.pull, out=np.zeros(34, np.int64))
    check_error(r"\[pull\] out: .*(read-only|strided)", server.pull, out=np.broadcast_to(np.float32(0), 34))
    check_error(r"\[pull\] out: .* lacks", server.pull, out={"w": np.zeros(34)})
    check_error(r"\[pull\] out: this server was made with a flat vector", flat.pull, out=[np.zeros(1), np.zeros(1)])
    check_error("client 0's update is a list", flat.push, client=0, update=[np.zeros(1), np.zeros(1)], version=0)
    check_error("layout is .* state, None here", Server(fedavg(), np.zeros(34)).load_state_dict, server.state_dict())


# Types of params and slots


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "fedasync", "ca2fl"])
def test_float64_params_keep_what_float32_loses(name, rng):
    """Values that float32 holds, pushed to both; then one round in float64 NumPy."""
    size = 1500
    start = rng.standard_normal(size)
    rule = RULES[name]()
    server = Server(rule, start, num_clients=20, dtype="float64")
    assert bits(server.params) == bits(start)
    vectors = rng.standard_normal((rule.buffer_size, size))
    push_all(server, range(rule.buffer_size), vectors.__getitem__, version=0)
    m = rule.buffer_size
    expected = {
        "fedavg": start + vectors.mean(0),
        "fedbuff": start + vectors.mean(0),
        "fedasync": start + 0.6 * (vectors[0] - start),
        "ca2fl": start + vectors.mean(0),
    }[name]
    assert server.params.dtype == np.float64
    size_of_terms = np.abs(start) + np.abs(vectors).sum(0)
    assert np.all(np.abs(server.params - expected) <= (m + 4) * 2.0**-53 * size_of_terms)
    if server.rows is not None:
        assert bits(server.rows.row(3)) == bits(vectors[3])


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_slots_are_pushes_of_rounded_values(name, rng):
    size = 70_001
    rule, start = preset(name), awkward(rng, size)
    narrow = ready(Server(rule, start, num_clients=20, slot_dtype="bfloat16", num_threads=2))
    wide = ready(Server(rule, start, num_clients=20, num_threads=1))
    for client in range(rule.buffer_size):
        vector = awkward(rng, size)
        rounded = torch.from_numpy(vector).bfloat16()
        narrow.push(client=client, **{narrow.rule.kind: vector}, version=0)
        wide.push(client=client, **{wide.rule.kind: rounded}, version=0)
    assert narrow.version == wide.version == 1
    assert bits(narrow.params) == bits(wide.params)
    assert narrow.state_bytes < wide.state_bytes


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("slot_dtype", [None, "bfloat16"])
def test_every_rule_in_every_type(name, dtype, slot_dtype, rng):
    """Values that bfloat16 holds: the same bits through any slots; and rows that later rounds read."""
    start = rng.integers(-9, 9, 100).astype(float)
    servers = [
        ready(Server(preset(name), start, num_clients=20, dtype=dtype, slot_dtype=slots))
        for slots in (None, slot_dtype)
    ]
    for i in range(60):
        vector = rng.integers(-9, 9, 100).astype(np.float32)
        for server in servers:
            server.push(client=i % 20, **{server.rule.kind: vector}, version=max(0, server.version - i % 3))
    assert servers[0].version >= (3 if name == "fltrust" else 6)  # which makes no step without a positive cosine
    assert bits(servers[0].params) == bits(servers[1].params)
    for server in servers:
        fresh = Server(preset(name), start, num_clients=20, dtype=dtype, slot_dtype=server.options.slots_as)
        fresh.load_state_dict(server.state_dict())
        assert bits(fresh.params) == bits(server.params)


def test_a_value_beyond_bfloat16_is_refused():
    """float32's largest value rounds to infinity."""
    server = Server(fedavg(), np.zeros(3), slot_dtype="bfloat16", max_abs=1e30)
    largest = np.array([0, np.finfo(np.float32).max, 0], np.float32)
    check_error("non-finite value at index 1", server.push, client=0, update=largest, version=0)


@pytest.mark.parametrize("options", [dict(dtype="float64"), dict(slot_dtype="bfloat16")])
def test_states_of_other_types_are_refused(options):
    state = Server(ca2fl(buffer_size=2), np.zeros(9), num_clients=3, **options).state_dict()
    other = Server(ca2fl(buffer_size=2), np.zeros(9), num_clients=3)
    check_error(f"{next(iter(options))} is '{next(iter(options.values()))}' in the state", other.load_state_dict, state)


# Params in place, and versions to which a client writes


@pytest.mark.parametrize("name", RULES)
def test_in_place_gives_the_same_bits(name, rng):
    size = 70_001
    start = rng.standard_normal(size).astype(np.float32)
    servers = [ready(Server(preset(name), start, num_clients=20, inplace=inplace)) for inplace in (False, True)]
    for i in range(40):
        vector = rng.standard_normal(size)
        for server in servers:
            server.push(client=i % 20, **{server.rule.kind: vector}, version=server.version)
    assert servers[0].version == servers[1].version >= 2
    assert bits(servers[0].params) == bits(servers[1].params)
    held = servers[1].pull().params
    before = bits(held)
    push_all(servers[1], range(20), np.ones(size), version=0)
    assert bits(held) == before  # a copy
    assert servers[1].versions_held == 1


def test_a_module_is_no_update():
    for faults in ("raise", "record"):
        server = Server(fedavg(buffer_size=1), module(), faults=faults)
        with pytest.raises(CallError, match=r"update= is a module, .* push it as model="):
            server.push(client=3, update=module(), version=0, buffers=module())
        assert server.counts["refused"] == 1


def test_a_state_dict_is_no_update():
    """It would double the model. Differences are pushed as any dict."""
    server = Server(fedavg(buffer_size=1), torch.nn.Linear(2, 1))
    mine = torch.nn.Linear(2, 1).state_dict()
    check_error(r"is a module's state_dict, .* push it as model=", server.push, client=3, update=mine, version=0)
    assert server.counts["refused"] == 1
    lenient = Server(fedavg(buffer_size=1), torch.nn.Linear(2, 1), faults="record")
    assert lenient.push(client=3, update=mine, version=0).status == "faulty"
    before = server.params
    server.push(client=3, update={name: torch.ones_like(array) for name, array in mine.items()}, version=0)
    assert server.params.tolist() == (before + 1).tolist()


def test_a_server_says_what_it_is():
    server = Server(fedavg(buffer_size=3), np.zeros(7))
    server.push(client=0, update=np.ones(7), version=0)
    assert repr(server) == "Server(fedavg, d=7, version=0, 1 of 3 arrivals)"


def test_params_that_must_be_converted_are_so_once(monkeypatch):
    converted, ready = [], interop.ready
    monkeypatch.setattr(interop, "ready", lambda name, array: converted.append(name) or ready(name, array))
    server = Server(fedbuff(), {"strided": np.ones((4, 3)).T, "plain": np.ones(2)})
    assert server.layout.size == 14
    assert converted == ["strided"]
