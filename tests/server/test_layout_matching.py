"""The arrays of a tree are found anew at each call: the same bits from every container, and never an old array."""

import gc
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afflux import AffluxError, Join, Layout, Server, UnavailableError, aggregate, ops
from afflux.arrays import modules
from afflux.arrays.trees import Walk
from afflux.rules import fedasync, fedbuff, sasgd
from conftest import FakeCuda, bits, check_error

LIBRARIES = {
    "numpy": lambda array: array,
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
    "integers": lambda array: array.astype(np.int32),
    "torch": torch.tensor,
    "parameter": lambda array: torch.nn.Parameter(torch.tensor(array)),
    "transposed": lambda array: torch.tensor(array.T.copy()).permute(tuple(range(array.ndim))[::-1]),
    "bfloat16": lambda array: torch.tensor(array).bfloat16(),
    "negative": lambda array: torch.complex(torch.zeros(array.shape), torch.tensor(-array)).conj().imag,
}


class Mine(dict):
    """A mapping that is no plain dict."""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_container_gives_the_bits_of_the_flat_vector(data):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=6))
    values = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 10 * i for i, shape in enumerate(shapes)]
    flat = np.concatenate([array.ravel() for array in values])
    arrays = [LIBRARIES[data.draw(st.sampled_from(sorted(LIBRARIES)))](array) for array in values]
    names = [f"{i // 2}.{i}" for i in range(len(arrays))]
    layout = Layout.of(dict(zip(names, values, strict=True)))
    order = data.draw(st.permutations(range(len(arrays))))
    shuffled = {names[i]: arrays[i] for i in order}
    nested = {}
    for name, array in shuffled.items():
        nested.setdefault(name.split(".")[0], {})[name.split(".")[1]] = array
    for tree in (shuffled, OrderedDict(shuffled), Mine(shuffled), nested):
        assert bits(layout.flatten(tree)) == bits(flat)
    partial = Layout.of(dict(zip(names, values, strict=True)), select=lambda name, array: name in names)
    assert bits(partial.flatten(shuffled | {"more": np.ones(3)})) == bits(flat)
    listed = Layout.of(values)
    for tree in (arrays, tuple(arrays)):
        assert bits(listed.flatten(tree)) == bits(flat)


def test_another_dict_gives_its_own_arrays():
    layout = Layout.of({"a": np.zeros(2), "b": np.zeros(2)})
    first = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    assert layout.flatten(first).tolist() == [1, 1, 2, 2]
    assert layout.flatten({"b": torch.full((2,), 3.0), "a": torch.full((2,), 4.0)}).tolist() == [4, 4, 3, 3]
    first["a"] = torch.full((2,), 5.0)
    assert layout.flatten(first).tolist() == [5, 5, 2, 2]
    for other in ({"a": np.ones(2), "c": np.ones(2)}, {"a": np.ones(2), 1: np.ones(2)}):
        check_error(r"lacks b; .*holds [c1]", layout.flatten, other)
    check_error("holds c", layout.flatten, first | {"c": np.ones(2)})


def test_mappings_that_make_what_they_lack_are_not_asked():
    tree = defaultdict(lambda: np.ones(2), {"a": np.ones(2)})
    check_error(r"lacks b", Layout.of({"a": np.zeros(2), "b": np.zeros(2)}).flatten, tree)
    assert list(tree) == ["a"]


def test_a_list_of_the_parameters_is_matched_by_position_and_shape():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    layout, parameters = Layout.of(net), [*net.parameters()]
    for arrays in (parameters, tuple(parameters), [parameter.detach().numpy() for parameter in parameters]):
        assert layout.flatten(arrays).tobytes() == layout.flatten(net).tobytes()
    buffers = [*net.buffers()]
    for arrays, message in (
        (parameters[::-1], r"array 0 of the list has shape \(2,\), 0.weight has shape \(2, 3\)"),
        ([None, *parameters[1:]], "array 0 of the list is None, 0.weight has"),
        (parameters[1:], "a list of 3 arrays without names, the layout has 4 parameters"),
        ([*parameters, *buffers], "a list of 7 arrays without names"),
        ([{"a": array} for array in parameters], r"lacks 0\.weight"),
    ):
        check_error(message, layout.flatten, arrays)
    selected = Layout.of(net, select=["0.weight", "0.bias"])
    assert selected.flatten(parameters[:2]).tobytes() == selected.flatten(net).tobytes()
    server = Server(fedbuff(), net)
    check_error("client 1's push lacks the model's buffers", server.push, client=1, version=0, model=parameters)
    assert server.push(client=1, version=0, model=parameters, buffers=net).status == "joined"
    check_error(r"lacks 1\.running_mean", layout.flatten_buffers, buffers)
    assert Layout.of({"b": np.ones(2), "a": np.ones(3)}).flatten([np.zeros(2), np.ones(3)]).tolist() == [0, 0, 1, 1, 1]


def test_lists_of_other_lengths():
    layout = Layout.of([np.zeros(2), np.array(1), np.zeros(1)])  # the second one is a buffer
    assert layout.flatten([np.ones(2), None, np.ones(1)]).tolist() == [1, 1, 1]
    assert layout.flatten([np.ones(2), np.array(5), np.ones(1)]).tolist() == [1, 1, 1]
    check_error(r"lacks 2", layout.flatten, [np.ones(2), np.array(5)])
    check_error("holds 3", layout.flatten, [np.ones(2), np.array(5), np.ones(1), np.ones(1)])
    check_error(r"holds 1\.0", layout.flatten, [np.ones(2), [np.array(5)], np.ones(1)])


# Modules


def test_replaced_parameters_are_seen():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False))
    layout = Layout.of(net)

    def filled(value):
        return torch.nn.Parameter(torch.full((1, 2), float(value)))

    net[0].weight, net[1].weight = filled(1), filled(2)
    assert layout.flatten(net).tolist() == [1, 1, 2, 2]
    net[0].weight = filled(3)
    assert layout.flatten(net).tolist() == [3, 3, 2, 2]
    net[1] = torch.nn.Linear(2, 1, bias=False)
    net[1].weight.data = torch.full((1, 2), 4.0)
    assert layout.flatten(net).tolist() == [3, 3, 4, 4]
    net[1].register_parameter("bias", torch.nn.Parameter(torch.ones(1)))
    check_error(r"holds 1\.bias", layout.flatten, net)
    net[1] = torch.nn.Identity()
    check_error(r"lacks 1\.weight", layout.flatten, net)


class Renamed(torch.nn.Linear):
    def named_parameters(self, *arguments, **options):
        return ((f"my_{name}", array) for name, array in super().named_parameters(*arguments, **options))


class Hidden(torch.nn.BatchNorm1d):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "running_var"]


def tied():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    net[2].weight = net[0].weight
    net.append(net[0])  # a module twice
    net.register_buffer("shared", net[1].running_mean)
    return net


def with_buffers():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False)))
    net[1].register_buffer("cache", torch.ones(3), persistent=False)
    net.register_buffer("absent", None)
    net.register_buffer("again", net[1].cache)  # tied to one that is not persistent
    net.register_buffer("learned", torch.nn.Parameter(torch.ones(2)))
    net.register_parameter("nothing", None)
    net.add_module("gone", None)
    return net


def hooked():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2))

    def hide(module, state, prefix, metadata):
        del state[prefix + "running_mean"]

    net[0].register_state_dict_post_hook(hide)
    return net


def patched():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    whole = net.state_dict
    net.state_dict = lambda *arguments, **options: {
        name: array for name, array in whole(*arguments, **options).items() if "running" not in name
    }
    return net


@pytest.mark.parametrize(
    "make",
    [
        tied,
        with_buffers,
        hooked,
        patched,
        lambda: Renamed(2, 2),
        lambda: torch.nn.Sequential(Hidden(2), Renamed(2, 2)),
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        lambda: torch.nn.MultiheadAttention(4, 2),
        lambda: torch.nn.LSTM(2, 2, num_layers=2),
        lambda: torch.nn.ParameterList([torch.ones(2), torch.ones(1)]),
        lambda: torch.jit.script(torch.nn.BatchNorm1d(2)),
    ],
    ids=lambda make: make.__name__,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_members_are_those_of_torchs_methods(make):
    module = make()
    parameters, buffers = modules.members(module)
    state = module.state_dict(keep_vars=True)
    wanted = [(name, array) for name, array in module.named_buffers() if name in state]
    for found, expected in ((parameters, list(module.named_parameters())), (buffers, wanted)):
        assert list(found) == [name for name, _ in expected]
        assert all(found[name] is array for name, array in expected)


# Tensors


def test_tensors_that_require_grad_are_read_and_not_written():
    tensor = torch.full((3,), 2.0, requires_grad=True)
    slot = np.zeros(6, np.float32)
    assert ops.ingest([tensor, torch.nn.Parameter(torch.ones(3))], slot).max == 2
    assert slot.tolist() == [2, 2, 2, 1, 1, 1]
    check_error(r"slot requires grad, but is written: detach\(\) it", ops.ingest, np.ones(3), tensor)
    server = Server(fedbuff(buffer_size=1), np.zeros(3, np.float32))
    server.push(client=0, update=tensor, version=0)
    assert server.params.tolist() == [2, 2, 2]


class Subclass(torch.Tensor):
    """torch calls the methods of subclasses; the memory of this one is another tensor's."""

    def __dlpack__(self, **options):
        return torch.full((3,), 7.0).__dlpack__(**options)


def test_subclasses_are_asked_themselves():
    tensor = torch.ones(3).as_subclass(Subclass)
    slot = np.zeros(3, np.float32)
    for update in (tensor, [tensor]):
        ops.ingest(update, slot)
        assert slot.tolist() == [7, 7, 7]


def test_without_the_c_functions_the_bits_are_the_same():
    """As with torch before 2.10, in a process of its own: the engine looks at a type once."""
    script = """
import numpy as np, torch
del torch.Tensor.__dlpack_c_exchange_api__
from afflux import AffluxError, Layout, ops
slot = np.zeros(5, np.float32)
tensors = [torch.arange(3.0), torch.nn.Parameter(torch.ones(2))]
ops.ingest(tensors, slot)
assert slot.tolist() == [0, 1, 2, 1, 1]
tree = {"a": tensors[0], "b": tensors[1]}
assert Layout.of(tree).flatten(tree).tolist() == [0, 1, 2, 1, 1]
Layout.of(tree).load(tree, slot + 1)
assert [tensor.tolist() for tensor in tensors] == [[1, 2, 3], [2, 2]]
for wrong in (torch._neg_view(torch.ones(5)), torch.ones(5, device="meta"), torch.ones(10)[::2]):
    try:
        ops.ingest(wrong, slot)
    except AffluxError:
        continue
    raise AssertionError(wrong)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_signs_that_only_a_private_function_sets_are_refused():
    tree = {"a": torch._neg_view(torch.ones(4))}
    check_error(r"a has torch's negative bit set: resolve_neg\(\) it", Layout.of(tree).flatten, tree)


def test_tensors_without_memory_of_their_own():
    slot = np.zeros(3, np.float32)
    for tensor, message in (
        (torch._efficientzerotensor(3), "DLPack|storage|data"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.ones(3).to_sparse(), "DLPack"),
        (torch.ones(3, dtype=torch.float8_e5m2), "float|type code|DLPack"),
    ):
        check_error(message, ops.ingest, tensor, slot, error=(AffluxError, RuntimeError))
    assert not slot.any()


class Marked(torch.nn.Parameter):
    """A parameter of a class of its own, whose memory the engine asks for by DLPack."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Marked])
def test_a_checked_round_keeps_the_memory_of_its_tensors(kind):
    """Another thread may give a tensor other memory while it is read."""
    array, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    tensor, memory = kind(torch.from_numpy(array), requires_grad=False), weakref.ref(array)
    adapter = Server(fedbuff(), np.zeros(3, np.float32))._adapter
    parts = adapter.in_place("it", [tensor], None, "float32")
    made = ops.Pass(np.zeros(3, np.float32), out, ops.Combine([parts], np.ones(1)))
    checked = ops.check(made)
    tensor.data = torch.zeros(3)
    del array
    gc.collect()
    assert memory() is not None
    ops.apply(made, checked=checked)
    assert out.tolist() == [1, 1, 1]
    del checked, made, parts
    gc.collect()
    assert memory() is None


def test_flat_trees_and_modules_are_not_walked(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    whole, head, listed = Layout.of(net), Layout.of(net, select=["1.bias"]), Layout.of([np.ones(2), np.ones(1)])
    monkeypatch.setattr("afflux.arrays.trees.Walk", None)
    for tree in (net, net.state_dict(), dict(net.named_parameters())):
        assert whole.flatten(tree).size == 10
        assert head.flatten(tree).tolist() == [0, 0]
    assert listed.flatten((torch.ones(2), np.ones(1))).tolist() == [1, 1, 1]


def test_trees_that_have_tied_arrays_under_other_names_are_not_walked(monkeypatch):
    def net(*names):
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})
        layers[names[1]].weight = layers[names[0]].weight
        return layers

    layout, ours = Layout.of(net("one", "other")), net("other", "one")
    monkeypatch.setattr("afflux.arrays.trees.Walk", None)
    for tree in (ours, {"other.weight": ours["one"].weight}):
        assert layout.flatten(tree).tolist() == ours["one"].weight.flatten().tolist()


@pytest.mark.parametrize("names", [["one"], ["one", "other"]])
def test_a_push_walks_a_tree_with_tied_arrays_once(names, monkeypatch):
    """Of a server with one of their names, and of one with both, which also compares them."""
    walks = []

    class Counted(Walk):
        def __init__(self, *arguments, **options):
            walks.append(self)
            super().__init__(*arguments, **options)

    def nested(tied):
        return {"one": {"w": tied}, "other": {"w": tied}}

    whole = nested(torch.zeros(2))
    server = Server(fedbuff(buffer_size=9), {name: whole[name] for name in names})
    monkeypatch.setattr("afflux.arrays.trees.Walk", Counted)
    for tree in (nested(torch.ones(2)), dict.fromkeys(["one.w", "other.w"], torch.ones(2))):
        server.push(client=0, version=0, model=tree)
    assert len(walks) == (2 if names == ["one"] else 1)  # a flat dict with the layout's names is not walked


class Gpu(FakeCuda):
    shape, dtype = (4,), np.dtype(np.float32)


SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


def test_a_push_of_sound_arrays_needs_no_second_pass(monkeypatch):
    tree = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    server = Server(fedbuff(buffer_size=1), tree)
    monkeypatch.setattr(Layout, "parts", None)
    assert server.push(client=0, version=0, update=tree).status == "joined"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"b": torch.ones(8)[::2]}, None),  # strided: copied
        ({"b": torch.ones(4, dtype=torch.int32)}, "b is int32, expected float32"),
        ({"b": torch.ones(4, dtype=torch.bfloat16)}, None),
        ({"b": np.ones(4, np.float16), "c": np.ones(())}, None),
        ({"c": torch.ones((1, 2), dtype=torch.complex64).conj().imag[0, 0] + 1}, None),
        ({"a": torch.ones(3, 2)}, r"a .*\(3, 2\).*\(2, 3\)"),
        ({"b": torch.ones(2, 2)}, r"b .*\(2, 2\).*\(4,\)"),
        ({"c": torch.ones(1)}, r"c .*\(1,\).*\(\)"),
        ({"a": torch.ones(2, 3, dtype=torch.complex64)}, "a is complex64"),
        ({"a": torch.ones(2, 3, device="meta")}, "a"),
        ({"d": torch.ones(1)}, "holds d"),
        ({"a": None}, "lacks a"),
        ({"b": [1.0] * 4}, "client 0's update.* b"),
        ({"b": torch.tensor([0, 1, np.inf, 0])}, r"value at index 8 \(in b\)"),
        ({"b": Gpu()}, "b is on cuda:1"),
    ],
)
@pytest.mark.parametrize("form", [dict, lambda tree: list(tree.values())], ids=["dict", "list"])
def test_a_push_checks_arrays_as_it_reads_them(change, message, form):
    """Whatever the engine refuses is looked at once more, and converted or named."""
    tree = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    server = Server(fedbuff(buffer_size=1), form(tree))
    before = server.params.copy()
    given = form(tree | change)
    if message is None:
        server.push(client=0, version=0, update=given)
        flat = Layout.of(form(tree)).flatten(given)
        assert bits(server.params) == bits(before + flat)
    else:
        named = message if form is dict else r"^\[push\] client 0's update"
        error = UnavailableError if "cuda" in message else AffluxError
        check_error(named, server.push, client=0, version=0, update=given, error=error)
        assert (server.version, server.arrivals_waiting, server.counts["refused"]) == (0, 0, 1)


@pytest.mark.parametrize("method", ["push", "step"])
@pytest.mark.parametrize("kind", ["update", "gradient", "model", "model of a client"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", [dict, OrderedDict, lambda tree: [*tree.values()], lambda tree: (*tree.values(),)])
def test_plain_trees_give_what_other_pushes_give(form, library, kind, method, rng):
    """A push with local_steps is read in Python, one without by the ledger: the same bits, receipts and statistics."""
    array = np.asarray if library == "numpy" else torch.from_numpy
    updates = fedbuff(buffer_size=3)
    rule = {"update": updates, "gradient": sasgd(buffer_size=3), "model": fedasync()}.get(kind, updates)
    kind = kind.removesuffix(" of a client")

    def tree():
        return form({name: array(rng.standard_normal(shape).astype("float32")) for name, shape in SHAPES.items()})

    start, trees = tree(), [tree() for _ in range(7)]
    states = []
    for others in ({}, {"local_steps": 1}):
        server = Server(rule, start, log=True)
        receipts = []
        for i, each in enumerate(trees):
            pulled = server.pull() if i % 2 else server.version
            push = {"client": i % 4, "version": pulled, kind: each, "num_examples": i + 1, "loss": float(i)}
            if method == "push":
                receipts.append(server.push(**push, **others)[:5])
            else:
                receipts.append([receipt[:5] for receipt in server.step([push | others])[0]])
        server.flush()
        log = [entry._replace(local_steps=0) if isinstance(entry, Join) else entry for entry in server.log]
        states.append((bits(server.params), receipts, log, server.counts))
    assert str(states[0]) == str(states[1])  # NaN is no less than NaN


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_errors_about_trees_of_a_known_kind_say_what_to_write():
    """A delta with statistics, torch's AveragedModel, quantised models, and a TrainState as that of flax."""
    norm = torch.nn.BatchNorm1d(2)
    server = Server(fedbuff(buffer_size=1), norm)
    delta = {name: array - array for name, array in norm.state_dict().items()}
    averaged = torch.optim.swa_utils.AveragedModel(norm)
    packed = type("Linear", (torch.nn.Linear,), {"__module__": "torch.ao.nn.quantized.modules.linear"})(1, 1)
    packed.weight, packed.bias = norm.weight, norm.bias
    state = OrderedDict({"0._packed_params.dtype": torch.qint8})
    train_state = type("TrainState", (tuple,), {"params": (), "opt_state": ()})
    local = r'Layout.of\(model, roles=\{.*running_mean": "local"'
    for call, message in (
        (lambda: server.push(client=1, version=0, update=delta), f"differences in place of .*buffers=.*{local}"),
        (lambda: server.push(client=1, version=0, model={"weight": norm.weight, "bias": norm.bias}), f"lacks.*{local}"),
        (lambda: server.push(client=1, version=0, model=averaged), r"n_averaged, .*: give its \.module$"),
        (lambda: server.pull(out=averaged.state_dict()), r"n_averaged, .*: give its \.module$"),
        (lambda: Server(fedbuff(), averaged).push(client=1, version=0, model=norm), "n_averaged.*give its .module"),
        (lambda: server.push(client=1, version=0, model=packed), "lacks running_mean|weights of quantised modules"),
        (lambda: Server(fedbuff(), {"m": state}), "_packed_params.dtype is a dtype.* give the float model"),
        (lambda: Layout.of([torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)]), r"qint8.*dequantize\(\)"),
        (lambda: server.push(client=1, version=0, model=train_state([np.ones(2)])), "give the .params of the TrainSt"),
    ):
        check_error(message, call)
    assert server.version == 0


class Hostile:
    """A key that compares as an equal of a name, but raises."""

    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        raise RuntimeError("compared")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_keys_that_cannot_be_compared_are_a_fault_of_the_client(library):
    array = np.ones if library == "numpy" else torch.ones
    server = Server(fedbuff(buffer_size=1), {"a": array(2), "b": array(3)}, faults="record")
    tree = {Hostile("a"): array(2), "b": array(3)}
    assert server.push(client=1, version=0, update=tree).status == "faulty"
    receipts, report = server.step([(1, 0, tree)])
    assert ([receipt.status for receipt in receipts], report, server.version) == (["faulty"], None, 0)
    check_error(r"trees\[0\]", aggregate, [tree, tree], [1, 1])


def test_a_layout_is_pickled():
    """Workers get it: what it finds, and what it refuses, are the same."""
    tree = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    layout, copy = Layout.of(tree), pickle.loads(pickle.dumps(Layout.of(tree)))
    assert copy == layout
    assert bits(copy.flatten(tree)) == bits(layout.flatten([*tree.values()])) == bits(copy.flatten([*tree.values()]))
    check_error("lacks", copy.flatten, {})
