"""`aggregate`: the mean without a server, by the roles of arrays."""

import importlib
from collections import OrderedDict

import numpy as np
import pytest

from afflux import Server, aggregate
from afflux.rules import fedavg
from conftest import bits, check_error
from surroundings import traced_memory_below

NAN = np.array([1.0, np.nan, 1.0], np.float32)


def model(rng, dtype="float32"):
    return {
        "body": {"w": rng.standard_normal((40, 7)).astype(dtype), "empty": np.zeros((0, 3), dtype)},
        "head": rng.standard_normal(3).astype(dtype),
        "running_mean": rng.standard_normal(2),
        "num_batches_tracked": np.array(rng.integers(0, 99)),
        "table": np.array([[1, 2], [3, 4]]),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("into", [None, "new", "the first"])
def test_the_bits_of_a_server_of_fedavg(dtype, into, rng):
    """Of a rule of updates from zeros, with weights by examples: sums, statistics and counters are the same."""
    models, examples = [model(rng, dtype) for _ in range(4)], [3, 1, 9, 7]
    start = {name: np.zeros_like(array) for name, array in models[0].items() if name not in ("body", "table")}
    start |= {"body": {name: np.zeros_like(array) for name, array in models[0]["body"].items()}}
    wide = {"dtype": "float64"} if dtype == "float64" else {}
    server = Server(fedavg(), start | {"table": models[0]["table"]}, **wide)
    entries = [
        {"client": i, "version": 0, "update": {"body": each["body"], "head": each["head"]}, "buffers": each}
        | {"num_examples": count}
        for i, (each, count) in enumerate(zip(models, examples, strict=True))
    ]
    server.step(entries)
    out = {None: None, "new": model(rng, dtype), "the first": models[0]}[into]
    mean = aggregate(models, examples, out)
    assert into is None or mean is out
    expected = model(rng, dtype)
    server.pull(out=expected)
    for name in ("head", "running_mean", "num_batches_tracked", "table"):
        assert bits(mean[name]) == bits(expected[name]), name
        assert mean[name].dtype == models[1][name].dtype
    assert bits(mean["body"]["w"]) == bits(expected["body"]["w"])
    assert mean["body"]["empty"].shape == (0, 3)


def test_flat_vectors_and_weights():
    vectors = [np.arange(5, dtype=np.float32) * k for k in range(1, 4)]
    assert aggregate(vectors, [1, 1, 2]).tolist() == (np.arange(5) * 2.25).tolist()
    assert aggregate(vectors, [0.25, 0.5, 0.25]).tolist() == (np.arange(5) * 2.0).tolist()
    assert aggregate(vectors[:2], [1.5, -0.5]).tolist() == (np.arange(5) * 0.5).tolist()
    out = np.empty(5, np.float32)
    assert aggregate([each[::-1] for each in vectors], [1, 1, 2], out) is out
    assert out.tolist() == (np.arange(5)[::-1] * 2.25).tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_give_the_same_bits(threads, rng):
    vectors = list(rng.standard_normal((5, 200_003)).astype(np.float32))
    weights = rng.uniform(0, 1, 5)
    expected = np.zeros(200_003)
    for vector, weight in zip(vectors, weights / sum(weights.tolist()), strict=True):
        expected += weight * vector.astype(np.float64)
    assert bits(aggregate(vectors, weights, num_threads=threads)) == bits(expected.astype(np.float32))


@pytest.mark.parametrize("out", [False, True])
def test_modules(out):
    import torch

    nets = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(3)]
    for net in nets:
        net(torch.randn(9, 3))
    target = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) if out else None
    mean = aggregate(nets, [1, 1, 2], target)
    state = mean.state_dict() if out else mean
    for name, own in nets[0].state_dict().items():
        others = [net.state_dict()[name].double() for net in nets]
        exact = (others[0] + others[1] + 2 * others[2]) / 4
        assert state[name].dtype == own.dtype
        assert torch.allclose(state[name].double(), exact, rtol=1e-6), name
    assert state["1.num_batches_tracked"].item() == 1


def test_a_mean_that_overflows_is_blamed_on_no_tree():
    trees = [np.full(2, 3e38, np.float32), np.full(2, -3e38, np.float32)]
    check_error(r"^\[aggregate\] the mean has a non-finite", aggregate, trees, [3, -1])
    check_error(r"^\[aggregate\] trees\[0\], which out has .*, or the mean", aggregate, trees, [3, -1], trees[0])


@pytest.mark.parametrize(
    ("trees", "weights", "options", "message"),
    [
        ([], [], {}, "trees is empty"),
        (7, [1], {}, r"\[aggregate\] trees"),
        ([NAN], [1, 2], {}, r"weights has shape \(2,\), trees holds 1"),
        ([NAN, NAN], [1, -1], {}, "a sum that is finite and not 0"),
        ([NAN, NAN], [1, np.nan], {}, "weights must be finite"),
        ([NAN], ["a"], {}, "weights are no numbers"),
        ([np.ones(3), NAN], [1, 1], {}, r"trees\[1\] has a non-finite value \(in it\)"),
        ([{"w": np.ones(3)}, {"v": np.ones(3)}], [1, 1], {}, r"trees\[1\]: .*lacks w"),
        ([{"w": np.ones(3)}, {"w": np.ones(2)}], [1, 1], {}, r"trees\[1\]: \[layout\] w has shape"),
        ([{"w": np.ones(3)}, {"w": np.ones(3, int)}], [1, 1], {}, r"trees\[1\]: \[layout\] w is int64"),
        ([{"w": np.ones(3), "running_var": NAN}] * 2, [1, 1], {}, r"trees\[0\] has a non-finite value \(in running_v"),
        ([{"w": np.ones(3)}] * 2, [1, 1], {"out": {"w": np.ones(2)}}, r"\[layout\] w has shape"),
        ([{"w": np.ones(3)}] * 2, [1, 1], {"out": [np.ones(2)]}, r"array 0 of the list has shape \(2,\), w has shape"),
        ([{"w": np.ones(3)}] * 2, [1, 1], {"num_threads": 0}, "num_threads is 0"),
        ([{"w": np.ones(3, "f4")}, {"w": np.full(3, 1e300)}], [1, 1], {}, r"^\[aggregate\] the mean: .* w is float32"),
        ([{"w": np.ones(3, complex)}], [1], {}, r"^\[aggregate\] trees\[0\]: \[layout\] w is complex128"),
        ([np.ones(3, "i4")], [1], {}, r"^\[aggregate\] trees\[0\]: \[layout\] it is int32"),
        ([np.full(3, 1e9)], [1], {"out": np.ones(3, "f2")}, r"^\[aggregate\] out: \[layout\] it is float16"),
    ],
)
def test_errors_name_what_is_wrong(trees, weights, options, message):
    check_error(message, aggregate, trees, weights, **options)


def test_a_counter_in_a_mean_of_means_drifts_by_the_numbers_of_the_docstring():
    model = {"w": np.zeros(2), "steps": np.array(0), "exact": np.array(0.0)}
    for _ in range(100):
        aggregate([model, {name: array + 1 for name, array in model.items()}], [0.4, 0.6], model)
    assert (int(model["steps"]), round(float(model["exact"]), 9)) == (100, 60.0)
    assert "is 100 after 100 calls" in aggregate.__doc__


def test_constants_must_be_equal_and_roles_can_be_given():
    trees = [{"w": np.ones(2) * k, "mask": np.array([[k]]), "own": np.ones(2) * k} for k in (1, 3)]
    check_error(r"trees\[1\]: .*mask differs", aggregate, trees, [1, 1])
    mean = aggregate(trees, [1, 3], roles={"mask": "copied", "own": "local"})
    assert (mean["w"].tolist(), mean["mask"].tolist(), mean["own"].tolist()) == ([2.5, 2.5], [[3]], [1.0, 1.0])


def test_an_overlap_with_another_tree_is_refused():
    memory = np.zeros(6, np.float32)
    check_error("overlap", aggregate, [np.ones(4, np.float32), memory[:4]], [1, 1], memory[2:])
    assert not memory.any()


def test_trees_of_one_memory_are_refused():
    """Replies that are views of one model have the values that were written last."""
    import torch

    net, body, rows = torch.nn.BatchNorm1d(2), np.ones((2, 3)), np.arange(12.0).reshape(2, 6)

    def trained(value):
        with torch.no_grad():
            for array in net.parameters():
                array.fill_(value)
        return net.state_dict()

    def copied(value):
        return {**{name: torch.full((2,), value) for name in ("weight", "bias")}, **dict(net.named_buffers())}

    model = {"w": np.ones(3)}
    for trees, name in (
        ([trained(1), trained(4)], "weight|bias|running_mean|running_var|num_batches_tracked"),
        ([copied(1.0), copied(4.0)], "running_mean|running_var|num_batches_tracked"),
        ((net for _ in range(2)), "weight|bias|running_mean|running_var|num_batches_tracked"),
        ([model, model], "w"),
        ([body, body], "it"),
        ([[body, np.ones(2)], [body, np.ones(2)]], "0"),
        ([{"a": {"b": rows[:, ::2]}}, {"a": {"b": rows[:, 0::2]}}], "a.b"),
        ([rows[0, :4], rows[0, 2:]], "it"),
    ):
        check_error(rf"trees\[0\] and trees\[1\] share the memory of ({name}),.*copy", aggregate, trees, [1, 1])
    apart = [rows[0], rows[1]], [rows[:, 0], rows[:, 1]], [{"w": each, "tied": each} for each in (rows[0], rows[1])]
    for trees in apart:
        aggregate(trees, [1, 1])


def test_nothing_is_copied():
    """Neither inputs nor the result, of which half a megabyte would be visible."""
    trees = [{f"a{i}": np.full(100_000, float(k), np.float32) for i in range(3)} for k in range(4)]
    out = {f"a{i}": np.empty(100_000, np.float32) for i in range(3)}
    aggregate(trees, [1] * 4, out)
    with traced_memory_below(1.3e6):  # one vector of addresses that are never touched
        aggregate(trees, [1] * 4, out)
    assert out["a2"].tolist() == [1.5] * 100_000


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_layout_is_kept_only_for_trees_that_are_alike(library, rng):
    """Whatever was aggregated before, the mean, its types and its errors are those of a first call."""
    import torch

    def array(values, dtype="float32"):
        values = np.asarray(values, dtype)
        return values if library == "numpy" else torch.from_numpy(values)

    shared = array([1.0, 2.0])
    kinds = [
        lambda k: {"a": array([k, 1]), "b": array([k])},
        lambda k: {"b": array([k]), "a": array([k, 1])},  # in another order
        lambda k: {"a": array([k, 1], "float64"), "b": array([k])},
        lambda k: {"a": array([k, 1], "float16"), "b": array([k])},
        lambda k: {"a": array([[k, 1]]), "b": array([k])},
        lambda k: {"a": array([k, 1]), "running_mean": array([k]), "num_batches_tracked": array(k, "int64")},
        lambda k: {"a": array([k, 1]), "b": array([3, 4], "int64")},  # b is a constant
        lambda k: {"a": shared * k, "b": shared * k},
        lambda k: OrderedDict(a=array([k, 1]), b=array([k])),
    ]
    makes = {i: [aggregate([kind(1), kind(4)], [1, 1]) for _ in range(2)] for i, kind in enumerate(kinds)}
    for i in [*makes, *rng.permutation(len(kinds)).tolist()]:
        for mean in (*makes[i], aggregate([kinds[i](1), kinds[i](4)], [1, 1])):
            assert [*mean] == [*kinds[i](1)]
            for name, value in mean.items():
                first, second = (np.asarray(kinds[i](k)[name], np.float64) for k in (1, 4))
                whole = "int" in str(value.dtype)
                assert (type(value), value.dtype) == (type(kinds[i](1)[name]), kinds[i](1)[name].dtype)
                mean_of_two = (first + second) / 2
                assert np.asarray(value).tolist() == (np.rint(mean_of_two) if whole else mean_of_two).tolist()
    changed = {"a": array([4, 1]), "b": array([3, 5], "int64")}
    check_error("trees.1.: .*b", aggregate, [kinds[6](1), changed], [1, 1])
    both = aggregate([changed, {"a": array([5, 1]), "b": array([3, 5], "int64")}], [1, 1])  # the first tree's constants
    assert np.asarray(both["b"]).tolist() == [3, 5]
    tied = array([1.0, 2.0])
    if library == "torch":  # one memory under two names: tied, though of the structure of the eighth kind
        check_error("trees.1.*b differs from a", aggregate, [{"a": tied, "b": tied}, kinds[7](2) | {"b": tied}], [1, 1])
    mine = {"a": array([1, 1]), "b": array([1])}
    mean = aggregate([mine, kinds[0](4)], [1, 1], roles={"b": "local"})
    assert np.asarray(mean["b"]).tolist() == [1.0]


def test_few_layouts_are_kept():
    kept = importlib.import_module("afflux.server.aggregate")._adapters
    sizes = set()
    for size in range(1, 200):
        aggregate([np.zeros(size), np.ones(size)], [1, 1])
        sizes.add(len(kept))
    assert sizes == set(range(min(sizes), 65))
