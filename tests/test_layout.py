"""Layout: a model's arrays as one flat vector, and back."""

import numpy as np
import pytest

from afflux import AffluxError, Layout
from conftest import bits

ARRAYS = {
    "w": np.arange(6.0).reshape(2, 3),
    "b": np.float32([7]),
    "scalar": np.array(8.0),
    "none": np.empty((0, 4)),
}


@pytest.mark.parametrize("tree", [ARRAYS, list(ARRAYS.values())], ids=["dict", "list"])
def test_round_trip(tree):
    layout = Layout.of(tree)
    flat = layout.flatten(tree)
    assert flat.dtype == np.float32
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    views = layout.views(flat)
    assert isinstance(views, dict) == isinstance(tree, dict)
    for view, array in zip(views.values() if isinstance(views, dict) else views, ARRAYS.values(), strict=True):
        assert view.shape == array.shape
        assert np.array_equal(view, array)
        assert view.base is not None
    flat[0] = 99
    assert (views["w"] if isinstance(views, dict) else views[0])[0, 0] == 99


def test_flatten_into_a_slot_and_from_strides():
    layout = Layout.of(ARRAYS)
    slot = np.empty(layout.size, np.float32)
    assert layout.flatten(ARRAYS | {"w": np.arange(12.0).reshape(4, 3)[::2]}, slot) is slot
    assert slot.tolist() == [0, 1, 2, 6, 7, 8, 7, 8]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": ARRAYS["w"]}, "names or order differ from the layout's: b, none, scalar"),
        (dict(reversed(ARRAYS.items())), "names or order differ"),
        (ARRAYS | {"w": np.ones((3, 2))}, r"w has shape \(3, 2\), the layout says \(2, 3\)"),
        (ARRAYS | {"b": 3.0}, "b is a float, expected an array"),
        (5, "a int is no torch module"),
    ],
)
def test_flatten_refuses(tree, message):
    slot = np.zeros(8, np.float32)
    with pytest.raises(AffluxError, match=message):
        Layout.of(ARRAYS).flatten(tree, slot)
    assert not slot.any()


@pytest.mark.parametrize("slot", [np.zeros(9, np.float32), np.zeros(8), np.zeros((2, 4), np.float32)])
def test_wrong_slots(slot):
    with pytest.raises(AffluxError, match=r"expected float32 of shape \(8,\)"):
        Layout.of(ARRAYS).flatten(ARRAYS, slot)
    with pytest.raises(AffluxError, match=r"expected float32 of shape \(8,\)"):
        Layout.of(ARRAYS).views(slot)


def test_torch_modules():
    torch = pytest.importorskip("torch")
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    layout = Layout.of(source)
    assert [field.name for field in layout.fields] == ["weight", "bias"]
    flat = layout.flatten(source)
    layout.load(target, flat)
    assert bits(layout.flatten(target)) == bits(flat)
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    flat[:] = 0
    assert source.weight.abs().sum() > 0
    for other in (torch.nn.PReLU(), torch.nn.Linear(3, 5), torch.nn.Linear(1, 1)):
        before = bits(Layout.of(other).flatten(other))
        with pytest.raises(AffluxError, match="parameters differ from the layout's in name or shape"):
            layout.load(other, flat)
        assert bits(Layout.of(other).flatten(other)) == before


def test_other_dtypes():
    torch = pytest.importorskip("torch")
    half = torch.nn.Linear(3, 2).bfloat16()
    layout = Layout.of(half)
    flat = layout.flatten(half)
    assert flat[:6].tolist() == half.weight.detach().float().flatten().tolist()
    layout.load(half, np.ones(8, np.float32))
    assert half.weight.float().sum().item() == 6.0
    slot = np.zeros(4, np.float32)
    with pytest.raises(AffluxError, match="1 is complex128, which is no real number"):
        Layout.of([np.ones(2), np.ones(2)]).flatten([np.ones(2), np.ones(2, complex)], slot)
    assert not slot.any()
    with pytest.raises(AffluxError, match="out is strided or read-only"):
        Layout.of([np.ones(2)]).flatten([np.ones(2)], np.zeros(4, np.float32)[::2])
