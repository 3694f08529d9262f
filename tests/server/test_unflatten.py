"""`Layout.load`, `pull(out=)`, `Task.load` and `Task.tree`: one call of the engine, with the bits of plain copies."""

import itertools
from copy import deepcopy

import numpy as np
import pytest
import torch

from afflux import Layout, Server, aggregate, ops
from afflux._engine import unflatten
from afflux.arrays import fields, likeness
from afflux.rules import fedbuff
from conftest import ISAS, bits, check_error, read_only

reads_torch_at_once = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch is older than 2.10"
)

FLOATS = ("float32", "float64", "float16", "bfloat16")
#: Ties of every type, subnormals of float16 and float32, and values beyond the range of float16 or float32.
EDGES = [0.0, -0.0, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-30, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-24, 2.0**-25, 3 * 2.0**-25]
EDGES += [65504.0, 65519.9, 65520.0, -1e9, 2.0**-149, -(2.0**-150), 1e-45, 3e38]


def vector_of(rng, size, dtype):
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-9, 6, size)
    values[: len(EDGES)] = EDGES[:size]
    return values.astype(dtype)


def plain_copy(values, kind):
    """The values in a dtype, by way of float32 if it has 16 bits; the bits of bfloat16 as uint16."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if kind != "bfloat16":
            return values.astype(kind) if kind != "float16" else single.astype(kind)
    word = single.view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)


def read(array):
    """A copy on the host; of bfloat16, the bits."""
    if isinstance(array, np.ndarray):
        return (array.view(np.uint16) if array.dtype.name == "bfloat16" else array).copy()
    array = array.detach()
    array = array.view(torch.uint16) if array.dtype == torch.bfloat16 else array
    return array.numpy().copy()


def target_of(library, kind, shape, way):
    """An array of NumPy or torch, which lies in one piece or not."""
    if library == "torch":
        dtype = getattr(torch, kind)
        if way == "strided" and shape:
            return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
        if way == "transposed" and len(shape) > 1:
            return torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        return torch.zeros(shape, dtype=dtype, requires_grad=way == "grad" and dtype.is_floating_point)
    dtype = np.dtype(kind if kind != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16)
    if way == "strided" and shape:
        return np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    if way == "transposed":
        return np.zeros(shape[::-1], dtype).T
    if way == "unaligned":
        return np.zeros(int(np.prod(shape)) * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(shape)
    return np.zeros(shape, dtype.newbyteorder(">") if way == "swapped" and kind != "bfloat16" else dtype)


SHAPES = [(), (5,), (0, 4), (3, 4, 2), (1,), (700,), (33, 17)]


@pytest.mark.parametrize("way", ["whole", "grad", "strided", "transposed", "unaligned", "swapped"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_array_has_the_bits_of_a_plain_copy(library, kind, way, rng):
    layout = Layout.of([np.zeros(shape) for shape in SHAPES])
    for dtype in ("float32", "float64"):
        flat = vector_of(rng, layout.size, dtype)
        target = [target_of(library, kind, shape, way) for shape in SHAPES]
        layout.load(target, flat)
        for array, field in zip(target, layout.fields, strict=True):
            got = read(array)
            expected = plain_copy(flat[field.start : field.stop], kind).reshape(field.shape)
            assert bits(got.astype(got.dtype.newbyteorder("="))) == bits(expected)


def batch_norm(kind="float32"):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False))
    net[1].running_mean += 0.3
    net[1].num_batches_tracked += 2**40
    net.register_buffer("seen", torch.tensor([1], dtype=torch.int8))
    return net.to(getattr(torch, kind))


@reads_torch_at_once
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("form", ["module", "state_dict", "dict"])
def test_buffers_are_written_by_the_same_call(form, kind, dtype, monkeypatch):
    server = Server(fedbuff(buffer_size=1), batch_norm(), dtype=dtype)
    task, results = server.checkout(1), []
    for fast in (True, False):
        with monkeypatch.context() as patch:
            if fast:
                patch.setattr(fields, "prepare", None)
                patch.setattr(fields, "put", None)
            else:
                patch.setattr(fields, "_written_by_engine", lambda *_, **__: False)
            for load in (task.load, lambda out: server.pull(out=out)):
                net = batch_norm(kind)
                arrays = net.state_dict()
                for array in arrays.values():
                    array.zero_()
                load({"module": net, "state_dict": arrays, "dict": dict(arrays)}[form])
                results.append({name: (array.dtype, bits(read(array))) for name, array in arrays.items()})
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 9


@reads_torch_at_once
@pytest.mark.parametrize("made", [np.asarray, torch.tensor])
def test_lists_are_written_by_one_call(made, monkeypatch, rng):
    first = [made(rng.standard_normal((3, 4)).astype(np.float32)), made(np.float32(7)), made(np.arange(3))]
    server = Server(fedbuff(), first)
    monkeypatch.setattr(fields, "prepare", None)  # which the other way calls
    out = [made(np.zeros((3, 4), np.float32)), made(np.zeros(())), made(np.zeros(3, np.int32))]
    assert server.pull(out=out) == 0
    assert [read(array).tolist() for array in out] == [read(array).tolist() for array in first]


@reads_torch_at_once
@pytest.mark.parametrize("kind", FLOATS)
def test_a_new_tree_is_written_by_one_call(kind, monkeypatch):
    module = batch_norm(kind)
    server = Server(fedbuff(), module)
    monkeypatch.setattr(likeness, "put", None)
    monkeypatch.setattr(fields, "put", None)
    tree = server.checkout(1).tree()
    for name, array in module.state_dict().items():
        assert tree[name].dtype == array.dtype
        assert bits(read(tree[name])) == bits(read(array))
    one, other = server.checkout(1).tree(), server.checkout(1).tree()
    for name in one:
        one[name].zero_()
        assert bits(read(other[name])) == bits(read(tree[name]))


def test_autograd_sees_what_the_engine_writes():
    net, server = batch_norm(), Server(fedbuff(), batch_norm())
    versions = {name: array._version for name, array in net.state_dict(keep_vars=True).items()}
    server.pull(out=net)
    assert all(array._version > versions[name] for name, array in net.state_dict(keep_vars=True).items())
    versions = {name: array._version for name, array in net.state_dict(keep_vars=True).items()}
    net[2].weight = torch.nn.Parameter(torch.zeros(3, 5))
    check_error(r"2\.weight has shape \(3, 5\)", server.pull, out=net)
    norm = net[1].state_dict(prefix="1.", keep_vars=True)
    assert all(array._version == versions[name] for name, array in norm.items())


BEYOND = [("float16", 65520.0), ("float16", 65520 - 2.0**-9), ("bfloat16", 2.0**128 - 2.0**119), ("float32", 2.0**128)]


@pytest.mark.parametrize("form", ["whole", "strided", "flat", "flat, strided"])
@pytest.mark.parametrize(("kind", "value"), BEYOND)
def test_no_finite_value_of_a_version_is_written_as_infinite(kind, value, form):
    """`Layout.load` converts as torch does; a server's version is finite in every array of the caller, or an error."""
    server = Server(fedbuff(), {"w": np.array([0.0, -value, 1.0]), "running_var": np.ones(2)}, dtype="float64")
    task = server.checkout(1)
    tensor = torch.zeros(6, dtype=getattr(torch, kind))
    array = tensor[::2] if "strided" in form else tensor[:3]
    out = array if "flat" in form else {"w": array, "running_var": np.zeros(2)}
    name = "it" if "flat" in form else "w"
    for call in (lambda out: server.pull(out=out), task.load, lambda out: server.step([], out=out)):
        check_error(rf"out: \[layout\] {name} is {kind}, which cannot hold -", call, out)
        assert not tensor.any()
    server.set_params({"w": np.array([0.0, 2.0, 1.0]), "running_var": np.full(2, value)})
    if "flat" in form:
        assert server.pull(out=out) == 1
        assert array.tolist() == [0, 2, 1]
    else:
        statistics = {"w": np.zeros(3), "running_var": tensor[:2]}
        check_error(f"running_var is {kind}, which cannot hold", server.pull, out=statistics)
        assert not statistics["w"].any()


@pytest.mark.parametrize("others", [[1.0], [np.inf, -np.inf, np.nan]])
@pytest.mark.parametrize(("kind", "value"), BEYOND)
def test_no_finite_constant_is_written_as_infinite(kind, value, others):
    model = {"w": np.zeros(2), "mask": np.array([-value, *others])}
    server = Server(fedbuff(), model, layout=Layout.of(model, roles={"mask": "constant"}), dtype="float64")
    out = {"w": np.ones(2), "mask": torch.zeros(len(others) + 1, dtype=getattr(torch, kind))}
    trees, roles = [model, deepcopy(model)], {"mask": "constant"}
    for call in (lambda: server.pull(out=out), lambda: server.checkout(1).load(out), lambda: server.step([], out=out)):
        check_error(rf"out: \[layout\] mask is {kind}, which cannot hold -", call)
    check_error(rf"^\[aggregate\] out: .* mask is {kind}, which", aggregate, trees, [1, 1], out, roles)
    assert out["w"].all()
    assert not out["mask"].any()


def test_a_mean_and_a_new_tree_are_finite_in_their_dtypes():
    narrow, wide = {"w": np.zeros(3, np.float16), "n": np.zeros(2)}, {"w": np.full(3, 2e5), "n": np.zeros(2)}
    for trees, out in (([wide], narrow), ([narrow, wide], None), ([wide], narrow | {"n": np.zeros(2, np.float32)})):
        check_error("w is float16, which cannot hold", aggregate, trees, [1] * len(trees), out)
    assert not narrow["w"].any()
    server = Server(fedbuff(buffer_size=1), narrow)
    check_error(r"\[step\] out: .* hold 200000; the round is made, as version", server.step, [(1, 0, wide)], out=narrow)
    check_error(r"^\[layout\] w is float16, which cannot hold 200000", server.checkout(2).tree)


def test_tensors_with_the_negative_bit_get_the_values():
    memory = torch.zeros(3)
    Layout.of([np.zeros(3)]).load([torch._neg_view(memory)], np.array([1.0, 2, -3]))
    assert memory.tolist() == [-1, -2, 3]


@pytest.mark.parametrize("strided", [False, True])
def test_inference_tensors_are_written(strided):
    with torch.inference_mode():
        out = [torch.zeros(3, 2), torch.zeros(2, 3).T if strided else torch.zeros(3, 2)]
    server = Server(fedbuff(), [np.ones((3, 2), np.float32), np.full((3, 2), 2, np.float32)])
    server.pull(out=out)
    assert [array.sum().item() for array in out] == [6, 12]
    with torch.inference_mode():
        server.pull(out=out)


def bad_arrays():
    return {
        "bad is read-only": read_only(np.zeros(3, np.float32)),
        r"bad has shape \(4,\), the layout has \(3,\)": np.zeros(4, np.float32),
        r"bad has shape \(3, 1\)": torch.zeros(3, 1),
        "bad is int32, to which the model's floats would be rounded": np.zeros(3, np.int32),
        "bad is int64, to which the model's floats": torch.zeros(3, dtype=torch.int64),
        "bad is bool, to which the model's floats": np.zeros(3, bool),
        "bad is complex64, expected floats": np.zeros(3, np.complex64),
        "bad is expanded": torch.zeros(1).expand(3),
        "bad is expanded: several": np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (3,), (0,)),
        "bad is a masked array": np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0]),
        "bad is torch.strided on meta, expected a dense tensor": torch.zeros(3, device="meta"),
        "bad is torch.sparse_coo on cpu": torch.zeros(3).to_sparse(),
    }


@pytest.mark.parametrize("last", [False, True])
def test_nothing_is_written_if_one_array_is_refused(last):
    names = ["first", "n", "bad"] if last else ["bad", "first", "n"]
    model = {"first": np.ones(3, np.float32), "n": np.array([5]), "bad": np.ones(3, np.float32)}
    server = Server(fedbuff(), {name: model[name] for name in names})
    task = server.checkout(1)
    for message, bad in bad_arrays().items():
        out = {"first": np.zeros(3, np.float32), "n": np.array([0]), "bad": bad}
        for call in (lambda out: server.pull(out=out), task.load, lambda out: server.step([], out=out)):
            check_error(rf"^\[(pull|Task.load|step)\] out: .*{message}", call, {name: out[name] for name in names})
            assert not out["first"].any()
            assert not out["n"].any()


def overlapping():
    """Trees of a (2, 3) and b (3,), a scalar c and a counter n, in which two share memory."""
    memory, tensor = np.zeros(12, np.float32), torch.zeros(12)
    whole = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(3), "c": torch.zeros(()), "n": np.zeros(1, np.int64)}
    return {
        "a and b: views of NumPy": whole | {"a": memory[:6].reshape(2, 3), "b": memory[5:8]},
        "a and b: tensors": whole | {"a": tensor[:6].view(2, 3), "b": tensor[4:7]},
        "b and c: one element": whole | {"b": tensor[:3], "c": tensor[2]},
        "a and n: other dtypes": whole | {"a": memory[:6].reshape(2, 3), "n": memory[4:6].view(np.int64)},
        "a and b: strided": whole | {"a": memory.reshape(2, 6)[:, ::2], "b": memory[::4]},
        "a and b: reversed": whole | {"a": memory[5::-1].reshape(2, 3), "b": memory[5:8]},
        "a and b: of two libraries": whole | {"a": tensor.numpy()[:6].reshape(2, 3), "b": tensor[:3]},
    }


@pytest.mark.parametrize("case", range(7))
def test_arrays_that_share_memory_are_refused(case):
    model = {"a": np.ones((2, 3), np.float32), "b": np.ones(3), "c": np.ones(()), "n": np.ones(1, np.int64)}
    server = Server(fedbuff(), model)
    (what, out), task = [*overlapping().items()][case], server.checkout(1)
    one, other = what.partition(":")[0].split(" and ")
    for call in (lambda out: server.pull(out=out), task.load, lambda out: server.step([], out=out)):
        check_error(rf"({one} and {other}|{other} and {one}) share memory", call, out)
        assert not any(read(array).any() for array in out.values())
    check_error("share memory", Layout.of([np.ones(2), np.ones(2)]).load, [array := np.zeros(2), array], np.ones(4))
    assert not array.any()


def test_arrays_side_by_side_do_not_share_memory():
    memory = np.zeros((4, 3), np.float32)
    empty = memory[:0]
    columns = [memory[:, 0], memory[:, 1], empty, memory[:, 2], empty]
    layout = Layout.of([np.ones(array.shape) for array in columns])
    layout.load(columns, np.arange(12, dtype=np.float32))
    assert memory.T.reshape(-1).tolist() == list(range(12))


def test_a_target_in_the_memory_of_the_source_gets_the_values_of_before():
    memory = np.arange(12, dtype=np.float32)
    target, expected = [memory[2:6], np.zeros(2)], memory[:6].copy()
    Layout.of([np.ones(4), np.ones(2)]).load(target, memory[:6])
    assert [*target[0], *target[1]] == expected.tolist()


def test_tied_arrays_are_written_once():
    class Tied(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    server = Server(fedbuff(), Tied(True))
    expected = server.params.reshape(4, 3).tolist()
    for target in (Tied(True), Tied(False), Tied(True).state_dict(), Tied(False).state_dict()):
        server.pull(out=target)
        arrays = target if isinstance(target, dict) else target.state_dict()
        assert arrays["embed.weight"].tolist() == arrays["head.weight"].tolist() == expected
    numpy_state = {name: array.numpy() for name, array in Tied(True).state_dict().items()}
    server.pull(out=numpy_state)
    assert numpy_state["head.weight"].tolist() == expected
    memory = torch.zeros(15)
    shifted = {"embed.weight": memory[:12].view(4, 3), "head.weight": memory[3:].view(4, 3)}
    check_error(r"embed\.weight and head\.weight share memory", server.pull, out=shifted)
    assert not memory.any()


@reads_torch_at_once
@pytest.mark.parametrize("kind", FLOATS)
def test_vectors_of_spectral_norm_are_written_by_the_same_call(kind, monkeypatch):
    net = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(5, 4))
    server = Server(fedbuff(), net)
    assert "copied" in server.layout.roles.values()
    target = {name: torch.zeros(array.shape, dtype=getattr(torch, kind)) for name, array in net.state_dict().items()}
    for name in ("prepare", "put"):
        monkeypatch.setattr(fields, name, None)
    server.pull(out=target)
    for name, array in net.state_dict().items():
        assert bits(read(target[name])) == bits(read(array.to(target[name].dtype)))


def test_copied_arrays_and_constants_are_refused_before_the_others_are_written():
    roles = {"u": "copied", "table": "constant"}
    model = {"w": np.ones(3, np.float32), "u": np.ones(2, np.float32), "table": np.array([1, 2])}
    layout = Layout.of(model, roles=roles)
    server = Server(fedbuff(), model, layout=layout)
    out = {name: np.zeros_like(array) for name, array in model.items()}
    server.pull(out=out)
    assert {name: array.tolist() for name, array in out.items()} == {name: a.tolist() for name, a in model.items()}
    memory = np.zeros(4, np.int64)
    for bad, message in (
        ({"u": np.zeros(2, np.int32)}, "u is int32, to which"),
        ({"u": np.zeros(3, np.float32)}, r"u has shape \(3,\)"),
        ({"w": memory[:2].view(np.float32)[:3], "table": memory[:2]}, "w and table share memory"),
        ({"w": memory.view(np.float32)[1:4], "u": memory.view(np.float32)[:2]}, "u and w share memory"),
    ):
        out = {name: np.zeros_like(array) for name, array in model.items()} | bad
        check_error(message, server.pull, out=out)
        assert not any(array.any() for array in out.values())


def test_only_the_arrays_that_the_engine_does_not_take_are_written_in_another_way(monkeypatch, rng):
    shapes = [(3, 2), (5,), (2, 4), (), (4, 3), (6,)]
    model = {str(i): torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for i, shape in enumerate(shapes)}
    model["5"] = torch.arange(6)  # a buffer
    server = Server(fedbuff(), model, layout=Layout.of(model, roles={"5": "statistic"}))
    out = {name: torch.full_like(array, 7) for name, array in model.items()}
    for name in ("0", "4"):  # strided; integers are written in the other way, too
        out[name] = torch.full(tuple(out[name].shape[::-1]), 7.0).t()
    others = []
    put = fields.put
    monkeypatch.setattr(fields, "put", lambda array, values: others.append(array) or put(array, values))
    bad = out | {"2": torch.zeros(2, 4, dtype=torch.int32)}
    check_error("2 is int32, to which", server.pull, out=bad)
    assert not others
    assert all((array == 7).all() for name, array in bad.items() if name != "2")
    server.pull(out=out)
    assert all(torch.equal(out[name], array) for name, array in model.items())
    assert [array.data_ptr() for array in others] == [out[name].data_ptr() for name in ("0", "4", "5")]


def test_a_tensor_beyond_its_storage_is_refused():
    out = {"w": torch.zeros(64), "u": torch.zeros(2, 2).t()}
    out["w"].untyped_storage().resize_(4)
    check_error("w has a storage of 4", Server(fedbuff(), {"w": torch.ones(64), "u": torch.ones(2, 2)}).pull, out=out)
    assert not out["u"].any()


def test_the_strides_of_axes_of_one_element_do_not_count():
    tied, out = torch.ones(1, 3), torch.zeros(3, 1)
    Server(fedbuff(), {"a": tied, "b": tied}).pull(out={"a": out.t(), "b": out.view(1, 3)})
    assert out.tolist() == [[1], [1], [1]]


def test_a_tensor_without_memory_beside_a_copied_array():
    model = {"w": np.zeros(3, np.float32), "c": np.arange(3)}
    server = Server(fedbuff(), model, layout=Layout.of(model, roles={"c": "copied"}))
    check_error("w is torch.strided on meta", server.pull, out={"w": torch.zeros(3, device="meta"), "c": np.arange(3)})


def test_every_instruction_set_and_number_of_threads_writes_the_same_bits(isa_after, rng):
    shapes = tuple((n,) for n in (0, 1, 63, 65_537, 3, 300_001, 0, 511))
    sizes = [shape[0] for shape in shapes]
    for dtype, kind in itertools.product(("float32", "float64"), ("float32", "float64", "float16", "int32")):
        vector = vector_of(rng, sum(sizes), dtype)
        vector = np.rint(vector.clip(-1e5, 1e5)) + vector.dtype.type(0.5) if kind == "int32" else vector
        expected = bits((np.rint(vector).astype(kind)) if kind == "int32" else plain_copy(vector, kind))
        for isa, threads in itertools.product(ISAS, (1, 3)):
            ops.choose_isa(isa)
            arrays = [np.zeros(size, kind) for size in sizes]
            unflatten([(vector, arrays, shapes, bytes([kind == "int32"] * len(sizes)))], threads, False)
            assert bits(np.concatenate(arrays)) == expected


def test_the_engine_refuses_what_does_not_fit():
    vector, array = np.ones(3, np.float32), np.zeros(3, np.float32)

    def call(vector=vector, arrays=(array,), shapes=((3,),), integers=b"\0", threads=1, dry=False):
        unflatten([(vector, [*arrays], shapes, integers)], threads, dry)

    for changed, message in (
        ({"vector": np.ones(4, np.float32)}, r"vectors\[0\] has 4 elements, its arrays 3"),
        ({"vector": np.ones(2, np.float32)}, r"vectors\[0\] ends before arrays\[0\]\[0\]"),
        ({"vector": np.ones(3, np.float16)}, r"vectors\[0\] is float16, expected float32 or float64"),
        ({"shapes": ((4,),)}, r"arrays\[0\]\[0\] has another shape"),
        ({"shapes": ()}, "have different lengths"),
        ({"integers": b""}, "have different lengths"),
        ({"threads": 0}, "num_threads is 0"),
        ({"arrays": [vector]}, r"vectors\[0\] and arrays\[0\]\[0\] overlap"),
        ({"arrays": [np.zeros(3, np.int8)]}, "is int8, expected float32"),
        ({"arrays": [np.zeros(3, np.complex64)], "integers": b"\1"}, "is complex64, expected a float, an integer"),
        ({"arrays": [np.zeros(6, np.float32)[::2]]}, "is strided"),
        ({"arrays": ["text"]}, "is no array on the host"),
    ):
        check_error(rf"^\[unflatten\] .*{message}", call, **changed)
    call(dry=True)
    assert not array.any()
    unflatten([], 1, False)
    call(np.ones(0), [np.zeros(0)], ((0,),))
    call()
    assert array.all()
