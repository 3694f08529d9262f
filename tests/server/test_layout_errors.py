"""Awkward trees and vectors for Layout: a clear message that names the array, and nothing written."""

import numpy as np
import pytest

from afflux import Layout, Server
from afflux.rules import fedbuff
from conftest import check_error, read_only


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": np.ones(2)}, "the tree lacks b$"),
        ({}, "the tree lacks w, b$"),
        ({"w": np.ones(2), "b": None}, "the tree lacks b$"),
        ({"w": np.ones(2), "b": np.ones(1), "z": np.ones(1), "y": np.ones(1)}, "the tree holds y, z, which"),
        ({"module.w": np.ones(2), "w": np.ones(2), "b": np.ones(1)}, "(module.w and w|w and module.w) are both called"),
        ({"other.w": np.ones(2), "b": np.ones(1)}, "the tree lacks w; the tree holds other.w"),
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
    check_error(rf"^\[layout\] {message}", layout.flatten, tree, out)
    assert not out.any()
    check_error(rf"^\[layout\] {message}", layout.parts, tree)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.eye(2).to_sparse(), "w is torch.sparse_coo on cpu"),
        (lambda torch: torch.empty(2, 2, device="meta"), "on meta, expected a dense"),
        (lambda torch: torch.ones(2, 2, dtype=torch.complex64), "w is complex64"),
    ],
)
def test_refused_tensors(make, message):
    tree, layout = {"w": make(pytest.importorskip("torch"))}, Layout.of({"w": np.ones((2, 2))})
    check_error(message, layout.parts, tree)
    check_error(message, Layout.of, tree)
    check_error(message, layout.load, tree, np.ones(4, np.float32))


class Elsewhere:
    """An array on another device, as CuPy's."""

    shape = (2,)
    dtype = np.dtype(np.float32)

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion is not allowed")


def test_arrays_that_numpy_cannot_read():
    layout, out = Layout.of([np.ones(2), np.ones(2)]), np.zeros(4, np.float32)
    check_error("1 does not give its memory to NumPy: implicit", layout.flatten, [np.ones(2), Elsewhere()], out)
    assert not out.any()

    class Exporting(Elsewhere):
        def __dlpack__(self):
            raise AssertionError("left to the engine")

    array = Exporting()
    assert layout.parts([np.ones(2), array])[1] is array
    check_error(r"\[ingest\] 1 does not give its memory through DLPack", layout.flatten, [np.ones(2), array], out)
    assert not out.any()


VECTOR_TEXTS = [
    (np.zeros(4, np.float32), r"is float32 of shape \(4,\), expected float32 or float64 of shape \(3,\), contiguous"),
    (np.zeros((1, 3), np.float32), r"is float32 of shape \(1, 3\)"),
    (np.zeros(3, np.float16), "is float16 of shape"),
    (np.zeros(3, ">f4"), "is >f4 of shape"),
    (np.zeros(6, np.float32)[::2], "is strided float32 of shape"),
    ([0.0] * 3, "is a list, expected a NumPy array of float32 or float64"),
]


def test_refused_vectors():
    tree = {"w": np.ones(2), "b": np.ones(1), "n": np.array(1)}
    layout, vector = Layout.of(tree), np.zeros(3, np.float32)
    for bad, text in VECTOR_TEXTS:
        check_error(rf"^\[layout\] out {text}", layout.flatten, tree, bad)
        check_error(rf"^\[layout\] flat {text}", layout.views, bad)
        check_error(rf"^\[layout\] flat {text}", layout.load, tree, bad)
    text = r"^\[layout\] buffers is .* float64 of shape \(1,\), contiguous$"
    for buffers in (np.zeros(1, np.float32), np.zeros(2), [0.0]):
        check_error(text, layout.views, vector, buffers)
        check_error(text, layout.load, tree, vector, buffers)
    assert layout.flatten(tree).tolist() == [1, 1, 1]
    check_error(r"^\[layout\] out is read-only", layout.flatten, tree, read_only(vector))
    text = r"^\[layout\] bad is a float64, expected a NumPy array or torch tensor"
    check_error(text, Layout.of({"bad": np.zeros(())}).load, {"bad": np.float64(0)}, np.ones(1))
    check_error(r"the tree lacks 0, 1, 2, 3, 4 and 4 more$", Layout.of([np.ones(1)] * 9).parts, [])


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
    check_error(rf"^\[layout\] bad is {dtype}, which {message}", layout.load, tree, np.ones(2), np.array([1, value]))
    assert not tree["good"].any()
    assert not tree["bad"].any()


def test_flat_vectors_without_memory():
    import torch

    check_error("flat is a Tensor, expected a", Layout.of({"a": np.zeros(3)}).views, torch.empty(3, device="meta"))
    check_error(r"^\[pull\] out: ", Server(fedbuff(), np.zeros(3, np.float32)).pull, out=torch.empty(3, device="meta"))


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
    check_error(r"^\[layout\] the data describes no layout", Layout.from_json, GOOD | change)
    if "tied" not in change:  # which may be missing
        check_error("no layout", Layout.from_json, {name: GOOD[name] for name in GOOD.keys() - change.keys()})
