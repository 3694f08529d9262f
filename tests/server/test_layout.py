"""Layout: any tree of arrays as one flat vector, buffers apart, and back."""

import json
import os
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest

from afflux import Layout, Server
from afflux.rules import fedbuff
from conftest import bits, check_error, raising, read_only

SHAPES = {"scale": (), "none": (0, 4), "head": (2, 3, 2), "encoder.0.weight": (3, 4), "encoder.0.bias": (3,)}


def values(shape, start=0):
    """Eighths with eight significant bits, which every one of the float types holds."""
    count = int(np.prod(shape))
    return ((np.arange(start, start + count) * 37 % 255 - 127) / 8).reshape(shape)


VALUES = {name: values(shape, 50 * i) for i, (name, shape) in enumerate(SHAPES.items())}
FLAT = np.concatenate([array.reshape(-1) for array in VALUES.values()])


def numpy_array(array, dtype, strided):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    array = array.astype(dtype)
    return np.repeat(array, 2, axis=-1)[..., ::2] if strided and array.ndim else array


def torch_array(array, dtype, strided):
    import torch

    tensor = torch.tensor(array).to(getattr(torch, dtype))
    tensor = tensor.repeat_interleave(2, -1)[..., ::2] if strided and array.ndim else tensor
    return tensor.requires_grad_()


def jax_array(array, dtype, strided):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    with jax.enable_x64(True):
        return jax.numpy.asarray(array, dtype)


LIBRARIES = {"numpy": numpy_array, "torch": torch_array, "jax": jax_array}


def module(leaves):
    import torch

    tree = torch.nn.Module()
    for path, tensor in leaves.items():
        *owners, name = path.split(".")
        owner = tree
        for part in owners:
            if part not in dict(owner.named_children()):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name, torch.nn.Parameter(tensor.detach()))
    return tree


def nested(leaves):
    tree = {}
    for path, array in leaves.items():
        *owners, name = path.split(".")
        owner = tree
        for part in owners:
            owner = owner.setdefault(part, {})
        owner[name] = array
    return tree


def mixed(leaves):
    first, second, *rest = leaves.values()
    return MappingProxyType({"blocks": [(first,), {7: second}], "rest": tuple(rest), "nothing": None})


TREES = {
    "module": module,
    "state_dict": OrderedDict,
    "nested": nested,
    "mixed": mixed,
    "list": lambda leaves: list(leaves.values()),
    "tuple": lambda leaves: tuple(leaves.values()),
}
#: What `views` gives back where it is not of the type that went in.
PLAIN = {"module": dict, "state_dict": dict, "mixed": lambda leaves: dict(mixed(leaves))}

CASES = [
    pytest.param(library, tree, dtype, strided, id=f"{library}-{tree}-{dtype}{'-strided' * strided}")
    for library in LIBRARIES
    for tree in TREES
    for dtype in ("float16", "bfloat16", "float32", "float64")
    for strided in (False, True)
    if (library == "torch" or tree != "module") and (library != "jax" or not strided)
]


def leaves_of(tree):
    """The arrays of a plain tree, in order."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [] if tree is None else [tree]
    return [leaf for child in tree for leaf in leaves_of(child)]


def as_float64(array):
    if hasattr(array, "detach"):
        array = array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def address(array):
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    return array.unsafe_buffer_pointer() if hasattr(array, "unsafe_buffer_pointer") else array.ctypes.data


@pytest.mark.parametrize(("library", "shape", "dtype", "strided"), CASES)
def test_matrix(library, shape, dtype, strided):
    leaves = {name: LIBRARIES[library](array, dtype, strided) for name, array in VALUES.items()}
    tree = TREES[shape](leaves)
    layout = Layout.of(tree)
    assert layout.size == FLAT.size
    assert [field.shape for field in layout.fields] == list(SHAPES.values())
    assert not layout.buffers
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

    parts = layout.parts(tree)
    for part, leaf in zip(parts, leaves.values(), strict=True):
        assert np.array_equal(as_float64(part), as_float64(leaf))
        assert part.shape == leaf.shape
        unread = strided and leaf.ndim and leaf.nbytes
        assert (address(part) == address(leaf)) == (not unread) or leaf.nbytes == 0
        if library == "torch":
            assert part.is_contiguous()
            assert part.dtype == leaf.dtype
            assert not (unread and part.requires_grad)
        elif library == "numpy":
            assert part.flags.c_contiguous

    for flat in (layout.flatten(tree), layout.flatten(tree, dtype="float64")):
        assert bits(flat) == bits(FLAT.astype(flat.dtype))
        views = layout.views(flat)
        assert type(views) is type(PLAIN.get(shape, TREES[shape])(leaves))
        assert bits(layout.flatten(views, dtype="float64")) == bits(FLAT)
        for view, leaf in zip(leaves_of(views), leaves.values(), strict=True):
            assert view.shape == leaf.shape
            assert view.size == 0 or np.shares_memory(view, flat)

    target = TREES[shape](
        {name: LIBRARIES[library](np.zeros_like(array), dtype, strided) for name, array in VALUES.items()}
    )
    flat.flags.writeable = False
    if library == "jax":
        check_error(r"^\[layout\] .* is a ArrayImpl, expected a NumPy array or torch tensor", layout.load, target, flat)
    else:
        layout.load(target, flat)
        assert bits(layout.flatten(target, dtype="float64")) == bits(FLAT)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_a_single_array(library, shape):
    array = LIBRARIES[library](values(shape), "float32", False)
    layout = Layout.of(array)
    flat = layout.flatten(array)
    assert bits(flat) == bits(values(shape).astype(np.float32))
    assert layout.views(flat).shape == shape
    assert Layout.from_json(layout.to_json()) == layout
    check_error(r"^\[layout\] the tree has shape \(9,\), the layout has", layout.parts, np.ones(9))
    if library != "jax":
        target = LIBRARIES[library](np.zeros(shape), "float32", False)
        layout.load(target, flat)
        assert bits(layout.flatten(target)) == bits(flat)


def test_nesting_comes_back():
    pair = namedtuple("pair", "left right")
    tree = {"a": {}, 3: None, "b": [np.ones(1), (np.ones(2), None)], "c": pair(np.ones(1), np.ones(1)), "d": []}
    layout = Layout.of(tree)
    assert [field.name for field in layout.fields] == ["b.0", "b.1.0", "c.0", "c.1"]
    views = layout.views(flat := np.arange(5, dtype=np.float32))
    assert list(views) == ["a", 3, "b", "c", "d"]
    assert np.shares_memory(views["b"][1][0], flat)
    assert views["a"] == {}
    assert views[3] is None
    assert views["b"][1][0].tolist() == [1, 2]
    assert views["b"][1][1] is None
    assert type(views["c"]) is tuple
    assert views["d"] == []
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_names_match_whatever_the_order_and_the_nesting():
    layout = Layout.of(nested(VALUES))
    for tree in (dict(reversed(VALUES.items())), nested(dict(reversed(VALUES.items()))), module_of(VALUES)):
        assert bits(layout.flatten(tree, dtype="float64")) == bits(FLAT)
    assert Layout.of(dict(reversed(VALUES.items()))) != Layout.of(VALUES)
    assert Layout.of(dict(VALUES)) == Layout.of(OrderedDict(VALUES))
    assert len({Layout.of(dict(VALUES)), Layout.of(OrderedDict(VALUES)), layout}) == 2


def module_of(leaves):
    import torch

    return module({name: torch.tensor(array) for name, array in leaves.items()})


def batch_norm():
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    net.register_buffer("mask", torch.tensor([True, False]))
    net.register_buffer("cached", torch.ones(7), persistent=False)
    with torch.no_grad():
        net[1].running_mean.copy_(torch.tensor([1.5, -2.0, 1 / 3, 0.0]))
        net[1].num_batches_tracked.fill_(2**53 - 1)
    return net


BUFFERS = {"mask": "bool", "1.running_mean": "float32", "1.running_var": "float32", "1.num_batches_tracked": "int64"}


@pytest.mark.parametrize("form", ["module", "state_dict"])
def test_batch_norm(form):
    net = batch_norm()
    tree = net if form == "module" else net.state_dict()
    layout = Layout.of(tree)
    assert [field.name for field in layout.fields] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {field.name: field.dtype for field in layout.buffers} == BUFFERS
    assert (layout.size, layout.buffers_size) == (24, 11)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    flat, buffers = layout.flatten(tree), layout.flatten_buffers(tree)
    assert buffers.dtype == np.float64
    held = {field.name: buffers[field.start : field.stop] for field in layout.buffers}
    assert held["mask"].tolist() == [1, 0]
    assert held["1.running_mean"].tolist() == net[1].running_mean.tolist()
    assert held["1.num_batches_tracked"].tolist() == [2**53 - 1]
    assert layout.views(flat).keys() == dict(net.named_parameters()).keys()
    assert layout.views(flat, buffers)["1.num_batches_tracked"].shape == ()

    for target in (batch_norm(), batch_norm().state_dict()):
        before = layout.flatten_buffers(target)
        layout.load(target, np.ones(24, np.float32))
        assert layout.flatten(target).tolist() == [1.0] * 24
        assert bits(layout.flatten_buffers(target)) == bits(before), "buffers=None leaves them alone"
        layout.load(target, flat, np.full(11, 0.5))
        assert bits(layout.flatten(target)) == bits(flat)
        half = {"mask": [0, 0], "1.num_batches_tracked": [0]}  # half to even
        got = layout.flatten_buffers(target)
        for field in layout.buffers:
            assert got[field.start : field.stop].tolist() == half.get(field.name, [0.5] * 4)


def test_half_of_a_tree_will_do():
    net = batch_norm()
    layout = Layout.of(net)
    gradients = {name: 2 * parameter for name, parameter in net.named_parameters()}
    assert bits(layout.flatten(gradients)) == bits(2 * layout.flatten(net))
    check_error(r"lacks mask, 1\.running_mean, 1\.running_var, 1\.num_batches", layout.flatten_buffers, gradients)
    check_error("lacks mask", layout.load, gradients, np.ones(24, np.float32), np.zeros(11))
    assert bits(layout.flatten(gradients)) == bits(2 * layout.flatten(net))
    buffers = {name: buffer for name, buffer in net.named_buffers() if name != "cached"}
    assert bits(layout.flatten_buffers(buffers)) == bits(layout.flatten_buffers(net))
    check_error(r"lacks 0\.weight, 0\.bias, 1\.weight, 1\.bias", layout.parts, buffers)
    check_error("holds cached", layout.flatten_buffers, buffers | {"cached": net.cached})


def test_flax():
    layer = {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}
    statistics = {"norm": {"mean": np.full(3, 0.25, np.float32), "var": np.full(3, 4.0, np.float32)}}
    tree = {"params": {"dense": layer}, "batch_stats": statistics}
    layout = Layout.of(tree)
    assert [field.name for field in layout.fields] == ["params.dense.kernel", "params.dense.bias"]
    assert [field.name for field in layout.buffers] == ["batch_stats.norm.mean", "batch_stats.norm.var"]
    flat, buffers = layout.flatten(tree), layout.flatten_buffers(tree)
    assert layout.views(flat).keys() == {"params"}
    whole = layout.views(flat, buffers)
    assert list(whole) == ["params", "batch_stats"]
    assert np.shares_memory(whole["batch_stats"]["norm"]["var"], buffers)
    assert whole["batch_stats"]["norm"]["var"].tolist() == [4.0] * 3
    assert bits(layout.flatten({"params": {"dense": layer}})) == bits(flat)


def test_sequences_keep_their_places():
    weights = [np.ones(2), np.array([3, 4]), np.ones(1)]
    layout = Layout.of(weights, roles={"1": "statistic"})
    assert [field.name for field in layout.buffers] == ["1"]
    views = layout.views(np.arange(3, dtype=np.float32))
    assert views[1] is None
    assert layout.flatten(views).tolist() == [0, 1, 2]
    assert layout.flatten_buffers(weights).tolist() == [3, 4]
    assert Layout.of((np.array(1),)).views(np.empty(0, np.float32)) == {}
    everything = Layout.of(weights, roles={"*": "trained"})
    assert everything.flatten(weights).tolist() == [1, 1, 3, 4, 1]
    check_error("1 is int64", everything.load, weights, np.array([1, 1, 2.5, -3.5, 1], np.float32))


def test_state_dicts_hold_tied_arrays_under_all_their_names():
    import torch

    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    net["norm"] = net["again"] = torch.nn.BatchNorm1d(2)
    layout = Layout.of({"body": net})
    assert layout.tied == ("body.head.weight", *(f"body.again.{name}" for name in net["again"].state_dict()))
    for known in (layout, Layout.from_json(json.loads(json.dumps(layout.to_json())))):
        assert known == layout
        assert bits(known.flatten({"body": net.state_dict()})) == bits(known.flatten({"body": net}))
        first = {name: array for name, array in net.state_dict().items() if f"body.{name}" not in known.tied}
        assert bits(known.flatten({"body": first})) == bits(known.flatten({"body": net}))
    assert layout == Layout.of({"body": first})
    server, other = (Server(fedbuff(buffer_size=2), tree) for tree in ({"body": net}, {"body": first}))
    server.push(client=0, version=0, model={"body": net.state_dict()})
    other.load_state_dict(server.state_dict())
    server.load_state_dict(other.state_dict())
    assert bits(other.params) == bits(server.params)
    check_error(r"holds body\.other", layout.flatten, {"body": net.state_dict() | {"other": torch.ones(1)}})


@pytest.mark.parametrize("wrong", [RuntimeError("no state dict"), None])
def test_a_state_dict_of_its_own_is_not_called_for_a_layout(wrong):
    import torch

    class Own(torch.nn.Linear):
        def state_dict(self):
            raise wrong or AssertionError

    assert Layout.of(Own(2, 1)).size == 3
    hooked = torch.nn.Linear(2, 1)
    hooked.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({5: 1}))
    assert Layout.of(hooked).size == 3


def test_modules_inside_a_tree():
    import torch

    tree = {"actor": torch.nn.BatchNorm1d(2), "steps": [torch.nn.Linear(1, 1)]}
    tree["actor"].register_buffer("offset", torch.ones(2))  # only the module knows that it is a buffer
    layout = Layout.of(tree)
    assert [field.name for field in layout.fields] == ["actor.weight", "actor.bias", "steps.0.weight", "steps.0.bias"]
    assert [field.name for field in layout.buffers] == [
        f"actor.{name}" for name in ("running_mean", "running_var", "num_batches_tracked", "offset")
    ]
    assert layout.views(np.arange(6, dtype=np.float32))["steps"][0]["bias"] == 5


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3.0).astype(">f4"),
        np.frombuffer(b"\0" + np.arange(3, dtype=np.float32).tobytes(), np.uint8)[1:].view(np.float32),
        np.arange(3, dtype=np.uint8),
        np.arange(6, dtype=np.float16)[::2] / 2,
        memoryview(np.arange(3.0)),
    ],
    ids=["byte-swapped", "unaligned", "integers", "strided", "memoryview"],
)
def test_what_the_engine_cannot_read_is_converted(array):
    layout = Layout.of([np.ones(3)])
    (part,) = layout.parts([array])
    assert part.dtype.isnative
    assert part.dtype.kind == "f"
    assert part.flags.carray
    assert layout.flatten([array]).tolist() == [0, 1, 2]


def test_channels_last_is_copied_alone():
    import torch

    net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight, bias = Layout.of(net).parts(net)
    assert weight.is_contiguous()
    assert torch.equal(weight, net.weight)
    assert bias.data_ptr() == net.bias.data_ptr()


def test_rounding_and_range():
    import torch

    tree = [np.array([1 + 2.0**-24 + 2.0**-40, 1e300, np.nan, -0.0, 1e-45])]
    layout = Layout.of(tree)
    with np.errstate(over="ignore"):
        expected = tree[0].astype(np.float32)
    assert bits(layout.flatten(tree)) == bits(expected)
    assert np.isinf(expected[1])
    assert bits(layout.flatten([torch.tensor(tree[0])])) == bits(expected)
    assert bits(layout.flatten(tree, dtype="float64")) == bits(tree[0])


def test_flatten_into_a_slot():
    tree = [np.ones(2), np.arange(4.0)[::2]]
    layout = Layout.of(tree)
    for dtype in (np.float32, np.float64):
        slot = np.empty(4, dtype)
        assert layout.flatten(tree, slot) is slot
        assert slot.tolist() == [1, 1, 0, 2]


def test_load_at_the_ends_of_the_range():
    tree = [np.zeros(2, np.uint8), np.zeros(1, np.int64), np.zeros(2, bool), np.zeros(2, np.float16)]
    layout = Layout.of(tree, roles={"0": "statistic"})
    layout.load(tree, np.array([1e9, -0.0]), np.array([255.5 - 2**-30, -0.5, -(2.0**63), 1.5 - 2**-30, -0.5]))
    assert tree[0].tolist() == [255, 0]
    assert tree[1].tolist() == [-(2**63)]
    assert tree[2].tolist() == [True, False]
    assert bits(tree[3]) == bits(np.array([np.inf, -0.0], np.float16))


@pytest.mark.parametrize("old", [False, True], ids=["dlpack", "no read-only dlpack"])
def test_load_from_read_only_memory_is_seen_by_autograd(old, monkeypatch):
    import torch

    if old:
        monkeypatch.setattr("torch.utils.dlpack.from_dlpack", raising(BufferError, "Cannot export readonly array"))
    net = torch.nn.Linear(3, 1)
    loss = (net.weight**2).sum()
    Layout.of(net).load(net, read_only(np.arange(4, dtype=np.float32)))
    assert net.weight.tolist() == [[0, 1, 2]]
    assert net.bias.tolist() == [3]
    check_error("modified by an inplace operation", loss.backward, error=RuntimeError)


def test_frozen():
    layout = Layout.of([np.ones(1)])
    with pytest.raises(AttributeError):
        layout.fields = ()
    assert hash(layout) == hash(Layout.of([np.zeros(1)]))
    assert layout != Layout.of((np.ones(1),))
    assert layout != Layout.of([np.ones((1, 1))])
