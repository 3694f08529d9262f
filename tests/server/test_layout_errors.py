"""Awkward trees and vectors for Layout: a clear message that names the array, and nothing written."""

import numpy as np
import pytest

from afflux import AffluxError, Layout, Server
from afflux.rules import fedbuff


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": np.ones(2)}, "the tree lacks b$"),
        ({}, "the tree lacks w, b$"),
        ({"w": np.ones(2), "b": None}, "the tree lacks b$"),
        ({"w": np.ones(2), "b": np.ones(1), "z": np.ones(1), "y": np.ones(1)}, "the tree holds y, z, which"),
        (
            {"module.w": np.ones(2), "w": np.ones(2), "b": np.ones(1)},
            "(module.w and w|w and module.w) are both called w without wrappers$",
        ),
        (
            {"other.w": np.ones(2), "b": np.ones(1)},
            "the tree lacks w; the tree holds other.w, which the layout does not$",
        ),
        ({"w": np.ones((2, 1)), "b": np.ones(1)}, r"w has shape \(2, 1\), the layout has \(2,\)"),
        ({"w": np.ones(2), "b": np.ones(())}, r"b has shape \(\), the layout has \(1,\)"),
        ({"w": np.ones(2), "b": 3.0}, "b is a float, expected an array"),
        ({"w": np.ones(2), "b": "3"}, "b is a str, expected an array"),
        ({"w": np.ones(2), "b": np.ones(1, complex)}, "b is complex128, expected floats"),
        ({"w": np.ones(2), "b": np.ones(1, object)}, "b is object, expected floats"),
        ({"w": np.ones(2), "b": np.ones(1, np.longdouble)}, "b is (float128|longdouble), expected floats"),
        (5, "the tree is a int, expected an array, a torch module"),
        (None, "the tree is a NoneType, expected an array"),
        ({("w",): np.ones(2)}, r"the tree has the key \('w',\), expected a str or an int"),
        ({"w": {True: np.ones(2)}}, "w has the key True, expected a str or an int"),
        ({"a": {"b": np.ones(2)}, "a.b": np.ones(2)}, r"two arrays are called a\.b"),
        ({1: np.ones(2), "1": np.ones(2)}, "two arrays are called 1"),
    ],
)
def test_refused_trees(tree, message):
    layout = Layout.of({"w": np.ones(2), "b": np.ones(1)})
    out = np.zeros(3, np.float32)
    with pytest.raises(AffluxError, match=rf"^\[layout\] {message}"):
        layout.flatten(tree, out)
    assert not out.any()
    with pytest.raises(AffluxError, match=rf"^\[layout\] {message}"):
        layout.parts(tree)


def test_many_missing_names_are_cut_short():
    layout = Layout.of([np.ones(1)] * 9)
    with pytest.raises(AffluxError, match=r"the tree lacks 0, 1, 2, 3, 4 and 4 more$"):
        layout.parts([])


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex"])
def test_refused_tensors(kind):
    torch = pytest.importorskip("torch")
    tensor = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "meta": lambda: torch.empty(2, 2, device="meta"),
        "complex": lambda: torch.ones(2, 2, dtype=torch.complex64),
    }[kind]()
    message = {
        "sparse": "w is torch.sparse_coo on cpu",
        "meta": "on meta, expected a dense",
        "complex": "w is complex64",
    }
    layout = Layout.of({"w": np.ones((2, 2))})
    for call in (layout.parts, Layout.of, lambda tree: layout.load(tree, np.ones(4, np.float32))):
        with pytest.raises(AffluxError, match=message[kind]):
            call({"w": tensor})


class Elsewhere:
    """An array on another device, as CuPy's."""

    shape = (2,)
    dtype = np.dtype(np.float32)

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion is not allowed")


def test_arrays_that_numpy_cannot_read():
    layout, out = Layout.of([np.ones(2), np.ones(2)]), np.zeros(4, np.float32)
    with pytest.raises(AffluxError, match=r"^\[layout\] 1 does not give its memory to NumPy: implicit conversion"):
        layout.flatten([np.ones(2), Elsewhere()], out)
    assert not out.any()

    class Exporting(Elsewhere):
        def __dlpack__(self):
            raise AssertionError("left to the engine")

    array = Exporting()
    assert layout.parts([np.ones(2), array])[1] is array
    with pytest.raises(AffluxError, match=r"^\[layout\] \[ingest\] 1 does not give its memory through DLPack"):
        layout.flatten([np.ones(2), array], out)
    assert not out.any()


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (
            np.zeros(4, np.float32),
            r"is float32 of shape \(4,\), expected float32 or float64 of shape \(3,\), contiguous",
        ),
        (np.zeros((1, 3), np.float32), r"is float32 of shape \(1, 3\)"),
        (np.zeros(3, np.float16), "is float16 of shape"),
        (np.zeros(3, ">f4"), "is >f4 of shape"),
        (np.zeros(6, np.float32)[::2], "is strided float32 of shape"),
        ([0.0] * 3, "is a list, expected a NumPy array of float32 or float64"),
    ],
)
def test_refused_vectors(vector, message):
    tree = {"w": np.ones(2), "b": np.ones(1), "n": np.array(1)}
    layout = Layout.of(tree)
    with pytest.raises(AffluxError, match=rf"^\[layout\] out {message}"):
        layout.flatten(tree, vector)
    with pytest.raises(AffluxError, match=rf"^\[layout\] flat {message}"):
        layout.views(vector)
    with pytest.raises(AffluxError, match=rf"^\[layout\] flat {message}"):
        layout.load(tree, vector)
    for buffers in (np.zeros(1, np.float32), np.zeros(2), [0.0]):
        for call in (layout.views, lambda *vectors: layout.load(tree, *vectors)):
            with pytest.raises(AffluxError, match=r"^\[layout\] buffers is .* float64 of shape \(1,\), contiguous$"):
                call(np.zeros(3, np.float32), buffers)
    assert layout.flatten(tree).tolist() == [1, 1, 1]
    with pytest.raises(AffluxError, match=r"^\[layout\] out is read-only"):
        layout.flatten(tree, read_only(np.zeros(3, np.float32)))
    with pytest.raises(AffluxError, match=r"^\[layout\] dtype is 'float16', must be 'float32' or 'float64'"):
        layout.flatten(tree, dtype="float16")


@pytest.mark.parametrize(
    ("bad", "value", "message"),
    [
        (read_only(np.zeros(1)), 1.0, "bad is read-only"),
        (np.float64(0), 1.0, "bad is a float64, expected a NumPy array or torch tensor"),
        (np.zeros((1, 1)), 1.0, r"bad has shape \(1, 1\)"),
        (np.zeros(1, np.int64), 1.0, "bad is int64, to which the model's floats would be rounded"),
        (np.zeros(1, bool), 1.0, "bad is bool, to which the model's floats would be rounded"),
    ],
)
def test_load_writes_nothing_when_it_refuses(bad, value, message):
    shape = () if isinstance(bad, np.float64) else (1,)
    layout = Layout.of({"good": np.zeros(2), "bad": np.zeros(shape)})
    tree = {"good": np.zeros(2), "bad": bad}
    with pytest.raises(AffluxError, match=rf"^\[layout\] {message}"):
        layout.load(tree, np.array([1, 1, value]))
    assert not tree["good"].any()
    assert not np.any(tree["bad"])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("uint8", 255.5, "cannot hold 256.0"),
        ("uint8", -0.51, "cannot hold -1.0"),
        ("int64", 2.0**63, "cannot hold 9.22"),
        ("bool", 1.6, "cannot hold 2.0"),
        ("int32", np.nan, "cannot hold nan"),
    ],
)
def test_counters_beyond_their_range_are_refused(dtype, value, message, strided):
    layout = Layout.of({"good": np.zeros(2), "bad": np.zeros(2, dtype)}, roles={"bad": "statistic"})
    tree = {"good": np.zeros(2), "bad": np.zeros(4, dtype)[::2] if strided else np.zeros(2, dtype)}
    with pytest.raises(AffluxError, match=rf"^\[layout\] bad is {dtype}, which {message}"):
        layout.load(tree, np.ones(2), np.array([1, value]))
    assert not tree["good"].any()
    assert not tree["bad"].any()


def test_load_into_expanded_tensors_is_refused():
    torch = pytest.importorskip("torch")
    tree = {"good": torch.zeros(2), "bad": torch.zeros(1).expand(3)}
    with pytest.raises(AffluxError, match=r"^\[layout\] bad is expanded"):
        Layout.of(tree).load(tree, np.ones(5, np.float32))
    assert not tree["good"].any()


def test_flat_vectors_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(AffluxError, match=r"flat is a Tensor, expected a NumPy array"):
        Layout.of({"a": np.zeros(3)}).views(torch.empty(3, device="meta"))
    with pytest.raises(AffluxError, match=r"^\[pull\] out: "):
        Server(fedbuff(), np.zeros(3, np.float32)).pull(out=torch.empty(3, device="meta"))


@pytest.mark.parametrize("buffers", ["bias", ["weight", "bias"]])
def test_unknown_buffers(buffers):
    unknown = buffers if isinstance(buffers, str) else "bias"
    with pytest.raises(AffluxError, match=rf"^\[layout\] buffers must be names of the tree's arrays, not {unknown}$"):
        Layout.of({"weight": np.ones(1)}, buffers=buffers)


GOOD = Layout.of({"w": np.ones((2, 3)), "n": np.array(1)}).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"fields": [["w", [2, -3]]]},
        {"fields": [["w", [2.0, 3]]]},
        {"fields": [["w", [2**62, 3]]]},
        {"fields": [["w", "ab"]]},
        {"fields": [["w", [2, 3]], ["w", [2, 3]]]},
        {"fields": [["w", [2, 3]], ["w", [2, 3]]], "nesting": {"list": ["w", "w", "n"]}},
        {"fields": [["v", [2, 3]]]},
        {"fields": [[5, [2, 3]]]},
        {"fields": [["w", [2, 3], "float32"]]},
        {"fields": None},
        {"buffers": [["n", [], "object"]]},
        {"buffers": [["n", [], ["int64"]]]},
        {"buffers": [["n", []]]},
        {"partial": 1},
        {"tied": "ab"},
        {"tied": ["w"]},
        {"tied": [5]},
        {"nesting": "w"},
        {"nesting": 5},
        {"nesting": {"set": ["w", "n"]}},
        {"nesting": {"list": ["w", "n"], "tuple": []}},
        {"nesting": {"dict": [[["w"], "w"], ["n", "n"]]}},
        {"nesting": {"dict": [["w", "w"], ["n", "n"], ["m", "n"]]}},
    ],
)
def test_from_json_refuses(change):
    assert Layout.from_json(GOOD).to_json() == GOOD
    with pytest.raises(AffluxError, match=r"^\[layout\] the data describes no layout"):
        Layout.from_json(GOOD | change)
    if "tied" not in change:  # which may be missing
        with pytest.raises(AffluxError, match=r"^\[layout\] the data describes no layout"):
            Layout.from_json({name: GOOD[name] for name in GOOD.keys() - change.keys()})
