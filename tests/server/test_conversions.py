"""push(update=, gradient= or model=): the bits of converting first, in NumPy, and pushing what the rule takes."""

from concurrent.futures import wait
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afflux import AffluxError, Server, replay
from afflux.aggregation import local_plane
from afflux.aggregation.round import Round
from afflux.rules import RULES, afa_cs, ca2fl, fedasync, fedavg, fedbuff, mf_ca2fl, wkafl
from conftest import bits, check_error, ready
from held_up import HeldUp, start
from inside import without_fast_path

D, CLIENTS = 70, 4
KINDS = ("update", "gradient", "model")
LR, STEPS = 0.05, 3
SCALE = LR * STEPS
DTYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def fresh(rule, dtype="float32", start=None, **options):
    rng = np.random.default_rng(1)
    params = rng.standard_normal(D).astype(dtype) if start is None else start
    server = Server(rule, params, num_clients=CLIENTS, dtype=dtype, log=True, **options)
    return ready(server, np.full(D, 0.25, dtype))


def converted(given, wanted, sent, base):
    """The vector that the server makes of it, in float64; pushed alone, it is rounded once."""
    if given == wanted:
        return sent
    update = sent.astype(np.float64)
    if given == "model":
        # The numeric contract rounds float64 to float16 by way of float32; NumPy rounds once.
        received = base.astype(np.float32).astype(sent.dtype) if sent.dtype.itemsize < base.dtype.itemsize else base
        update = update - received
    elif given == "gradient":
        update = -update * SCALE
    return {"update": update, "gradient": -update / SCALE, "model": base + update}[wanted]


def sent_by(rng, given, base, dtype):
    if given == "model":
        return (base + 0.1 * rng.standard_normal(D)).astype(dtype)
    return (0.1 * rng.standard_normal(D)).astype(dtype)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("given", KINDS)
def test_every_rule_takes_every_kind(name, given):
    """Nine pushes from old and new versions, through tasks; and the replay, which gets the converted vectors."""
    rng = np.random.default_rng(7)
    rule = RULES[name](buffer_size=2) if "buffer_size" in RULES[name].__annotations__ else RULES[name]()
    server, plain = fresh(rule), fresh(rule)
    made, tasks = {}, [server.checkout(i) for i in range(3)]
    for turn in range(9):
        task = tasks.pop(0)
        base = task.params.copy()
        sent = sent_by(rng, given, base, np.float32)
        receipt = server.push(task=task, **{given: sent}, loss=0.5, client_lr=LR, local_steps=STEPS)
        vector = converted(given, rule.kind, sent, base)
        made[receipt.join] = vector
        twin = plain.push(client=turn % 3, version=task.version, loss=0.5, **{rule.kind: vector})
        assert (receipt.status, receipt.join) == (twin.status, twin.join)
        assert bits(server.params) == bits(plain.params), turn
        for each in (server, plain) if rule.needs.passes else ():
            each.end_pass()
        tasks.append(server.checkout(turn % 3))
    again = replay(server.log, fresh(rule), lambda join: made[join.number], rule_vector=lambda _: np.full(D, 0.25))
    assert bits(again.params) == bits(server.params)
    assert server.joins == 9


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.sampled_from(list(product(KINDS, KINDS))),
    dtype=st.sampled_from(sorted(DTYPES)),
    params=st.sampled_from(["float32", "float64"]),
    slots=st.sampled_from([None, "bfloat16"]),
    threads=st.integers(1, 3),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(("model", "gradient"), "float16", "float64", "bfloat16", 1, False, 21188)  # a base between two float16
def test_the_bits_of_converting_first(kinds, dtype, params, slots, threads, accumulate, seed):
    given, wanted = kinds
    rule = {"update": fedbuff(buffer_size=2), "gradient": afa_cs(buffer_size=2), "model": fedasync()}[wanted]
    accumulate = accumulate and wanted == "update"
    rng = np.random.default_rng(seed)
    options = dict(dtype=params, slot_dtype=slots, accumulate=accumulate)
    server, plain = (fresh(rule, push_threads=threads if i else 1, num_threads=threads, **options) for i in (1, 0))
    for client in range(4):
        pulled = server.pull()
        sent = sent_by(rng, given, pulled.params, DTYPES[dtype])
        server.push(client=client, version=pulled, **{given: sent}, client_lr=LR, local_steps=STEPS)
        with np.errstate(over="ignore"):
            vector = converted(given, wanted, sent, pulled.params)
        plain.push(client=client, version=pulled.version, **{wanted: vector})
        assert bits(server.params) == bits(plain.params)


def test_the_update_of_a_float64_model_is_rounded_once():
    """1 + 1e-8 is 1 in float32: the base is subtracted in float64. A replay takes this difference."""
    start = np.ones(D, np.float32)
    server, twin = (fresh(ca2fl(buffer_size=1), start=start) for _ in range(2))
    model = start + 1e-8 * np.arange(1, D + 1)
    norms = server.push(client=1, version=server.pull(), model=model).report.norms
    assert bits(norms) == bits(twin.push(client=1, version=0, update=(model - start).astype("float32")).report.norms)
    assert norms[0] > 1e-6
    for vector in (model - start, (model - start).astype("float32")):
        again = replay(server.log, fresh(ca2fl(buffer_size=1), start=start), lambda _, vector=vector: vector)
        assert bits(again.state_dict()["arrays"]["rows"]) == bits(server.state_dict()["arrays"]["rows"])


def test_a_module_a_state_dict_a_list_and_a_flat_vector_are_one_model(rng):
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    layout_server = Server(fedavg(buffer_size=1), model)
    base, layout = layout_server.params.copy(), layout_server.layout
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    expected = base + (layout.flatten(model) - base)
    forms = [
        model,
        model.state_dict(),
        dict(reversed(model.state_dict().items())),
        {name: array.numpy() for name, array in model.state_dict().items()},
        layout.flatten(model),
    ]
    for form in forms:
        server = Server(fedavg(buffer_size=1), layout.views(base.copy()))
        server.push(client=1, version=0, model=form)
        assert bits(server.params) == bits(expected)


def test_a_bfloat16_client_never_saw_more_of_the_base():
    """What it has not changed is no update, whatever the base has beyond bfloat16."""
    import torch

    start = {"w": torch.randn(300), "b": torch.randn(5, dtype=torch.float64)}
    server = Server(fedbuff(buffer_size=1), start)
    mine = {"w": torch.empty(300, dtype=torch.bfloat16), "b": torch.empty(5, dtype=torch.float16)}
    before = server.params.copy()
    task = server.checkout("ann")
    task.load(mine)
    assert server.push(task=task, model=mine).report is not None
    assert bits(server.params) == bits(before)


def test_pulled_versions_and_their_numbers():
    server = fresh(fedasync())
    old = server.pull()
    server.push(client=1, version=old, update=np.ones(D, np.float32))
    assert server.push(client=2, version=old, update=np.ones(D, np.float32)).staleness == 1
    assert server.push(client=2, version=server.version, update=np.ones(D, np.float32)).staleness == 0
    check_error("client 3's update needs version 0", server.push, client=3, version=0, update=np.ones(D, np.float32))
    assert (server.counts["refused"], server.counts["expired"], server.versions_held) == (1, 0, 2)
    recording = fresh(fedasync(), faults="record")
    recording.push(client=1, version=0, model=np.ones(D, np.float32))
    assert recording.push(client=3, version=0, update=np.ones(D, np.float32)).status == "expired"
    task = server.checkout(4)
    server.push(client=5, version=server.pull(), update=np.ones(D, np.float32))
    number = server.push(client=6, version=task.version, update=np.ones(D, np.float32))  # held for the task of 4
    assert number.staleness == 1


@pytest.mark.parametrize(("given", "wanted"), [("gradient", "model"), ("update", "gradient"), ("model", "gradient")])
def test_a_rate_and_steps_are_needed(given, wanted):
    server = fresh({"model": fedasync(), "gradient": afa_cs(buffer_size=2)}[wanted])
    for facts in ({}, {"client_lr": 0.1}, {"local_steps": 2}):
        with pytest.raises(AffluxError, match=rf"{given} cannot become a {wanted} without client_lr= and local_steps="):
            server.push(client=1, version=server.pull(), **{given: np.ones(D)}, **facts)


def test_in_place_the_number_of_the_newest_version_is_enough():
    """An older version was overwritten: it is only in what was pulled."""
    server = fresh(fedbuff(buffer_size=1), inplace=True)
    assert server.push(client=1, version=0, model=np.ones(D, np.float32)).status == "joined"
    pulled = server.pull()
    assert server.push(task=server.checkout(1, hold=False).id, model=np.zeros(D, np.float32)).status == "joined"
    check_error("client 1's model needs version 1", server.push, client=1, version=1, model=np.ones(D, np.float32))
    assert server.push(client=1, version=pulled, model=np.ones(D, np.float32) * 2).status == "joined"
    assert np.allclose(server.params, 2**-0.5)  # (2 - 1) times the weight of staleness 1


def test_in_place_a_conversion_waits_for_the_round_of_another_thread(monkeypatch):
    """Its base is the version that the client names, whole, or none."""
    server, held = fresh(fedbuff(buffer_size=2), inplace=True), HeldUp(monkeypatch, Round, "make")
    server.push(client=1, version=0, update=np.ones(D, np.float32))
    first = start(lambda: server.push(client=2, version=0, update=np.ones(D, np.float32)))
    assert held.reached.wait(600)
    second = start(lambda: server.push(client=3, version=0, model=np.ones(D, np.float32)))
    assert not wait([second], 0.05).done
    held.go.set()
    assert first.result(30).status == "joined"
    check_error("client 3's model needs version 0", second.result, 30)


def test_a_non_finite_conversion_names_what_it_would_be():
    server = fresh(fedasync(), start=np.full(D, 1e38, np.float32))
    with pytest.raises(AffluxError, match="client 1's update has a non-finite value as a model at index 0"):
        server.push(client=1, version=server.pull(), update=np.full(D, 3e38, np.float32))


@pytest.mark.parametrize("sent", KINDS)
@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), afa_cs(buffer_size=2), fedasync()], ids=lambda r: r.kind)
def test_the_sweep_that_copies_a_vector_converts_it(rule, sent, monkeypatch):
    """There is one sweep, over the caller's own array."""
    server, array, calls = fresh(rule), np.ones(D), []
    without_fast_path(server)  # which takes no conversions
    ingest = local_plane.ingest
    monkeypatch.setattr(local_plane, "ingest", lambda *arguments: calls.append(arguments[0]) or ingest(*arguments))
    assert server.push(client=1, version=0, **{sent: array}, client_lr=LR, local_steps=STEPS).status == "joined"
    assert [call is array for call in calls] == [True]


def test_switching_rules_changes_one_line():
    """The loop of the README with four rules: it learns with each, and no other line differs."""
    target = np.linspace(-1, 1, D)
    for rule in (
        fedbuff(buffer_size=2),
        fedasync(),
        ca2fl(buffer_size=2),
        mf_ca2fl(buffer_size=2),
        wkafl(buffer_size=2, server_lr=0.1),
    ):
        server = fresh(rule, start=np.zeros(D, np.float32))
        for turn in range(300):
            task = server.checkout(turn % CLIENTS)
            model = task.tree()
            for _ in range(2):
                model -= 0.1 * (model - target).astype(np.float32)
            server.push(task=task, model=model, client_lr=0.1, local_steps=2)
        assert np.abs(server.params - target).max() < 0.2, rule.name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_client_of_16_bits_that_changes_nothing_sends_nothing(kind, dtype, rng):
    """Of NumPy and of torch: what it loads is what the server subtracts, also where float64 would be rounded twice."""
    import torch

    start = rng.standard_normal(400)
    start[:3] = 1 + 2.0**-11 + 2.0**-30, 1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-11 + 2.0**-30)
    clients = [torch.empty(400, dtype=getattr(torch, kind))]
    clients.append(np.empty(400, kind if kind == "float16" else pytest.importorskip("ml_dtypes").bfloat16))
    for empty in clients:
        server = Server(fedavg(buffer_size=1), [start], dtype=dtype)
        before, task = server.params.copy(), server.checkout(1)
        task.load([empty])
        assert server.push(task=task, model=[empty]).status == "joined"
        assert bits(server.params) == bits(before)


def test_a_tree_has_the_dtypes_of_the_first_params():
    import jax.numpy as jnp
    import ml_dtypes

    first = {"a": np.ones(3, ml_dtypes.bfloat16), "b": jnp.ones(2, jnp.bfloat16), "n": jnp.array([3, 4])}
    tree = Server(fedavg(buffer_size=1), first).checkout(1).tree()
    assert {name: array.dtype for name, array in tree.items()} == {name: array.dtype for name, array in first.items()}
    assert (tree["a"].tolist(), tree["b"].tolist(), tree["n"].tolist()) == ([1.0] * 3, [1.0, 1.0], [3, 4])


def test_numbers_in_arrays_without_dimensions():
    """As a loop in torch has them before it calls item()."""
    import torch

    server = fresh(fedbuff(buffer_size=1))
    for made in (torch.tensor, np.array, np.float32):
        numbers = {"client_lr": made(0.5), "local_steps": made(2.0), "num_examples": made(5.0), "loss": made(0.25)}
        receipt = server.push(client=1, version=server.version, gradient=np.ones(D, np.float32), **numbers)
        assert receipt.status == "joined"
    assert {(entry.num_examples, entry.loss) for entry in server.log} == {(5, 0.25)}
    assert np.allclose(server.params, fresh(fedbuff()).params - 3)
    check_error("loss is", server.push, client=1, version=0, update=np.ones(D), loss=np.ones(1))
