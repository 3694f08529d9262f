"""Every array library with every dtype in every form, into ops and into a server: the right bits or the right words."""

import os
from itertools import product

import numpy as np
import pytest

from afflux import AffluxError, Server, UnavailableError, ops
from afflux.rules import fedavg
from conftest import FakeCuda, bits, check_error

D = 6
VALUES = np.array([1.5, -2.0, 0.25, 3.0, -0.5, 7.0])  # exact in every floating type
FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int8", "bool", "complex64")


class Numpy:
    def array(self, dtype):
        return VALUES.astype(dtype)

    views = True


class Torch:
    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def array(self, dtype):
        return self.torch.tensor(VALUES).to(getattr(self.torch, dtype))

    views = True


class Jax:
    def __init__(self):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self.jnp = pytest.importorskip("jax.numpy")

    def array(self, dtype):
        return self.jnp.asarray(VALUES).astype(dtype)

    views = False  # its slices and transposes are copies


LIBRARIES = {"numpy": Numpy, "torch": Torch, "jax": Jax}


#: name -> (how it is made of a contiguous vector, whether it is a list of parts, what is wrong where slices are views)
FORMS = {
    "vector": (lambda a: a, False, None),
    "slice": (lambda a: a[1:5], False, None),
    "every second": (lambda a: a[::2], False, "is strided"),
    "matrix": (lambda a: a.reshape(2, 3), False, "has (2 dimensions|shape)"),
    "scalar": (lambda a: a[0], False, "has (0 dimensions|shape)|is a "),
    "empty": (lambda a: a[:0], False, None),
    "list of a vector": (lambda a: [a], True, None),
    "list of a matrix": (lambda a: [a.reshape(2, 3)], True, None),
    "list of slices": (lambda a: [a[:1], a[1:5].reshape(2, 1, 2), a[5:]], True, None),
    "list with a scalar": (lambda a: [a[0].reshape(()), a[1:]], True, None),
    "list of a transpose": (lambda a: [a.reshape(2, 3).T], True, r"(\[0\] is not C-contiguous)"),
    "list of every second": (lambda a: [a[:2], a[::2]], True, r"(\[1\] is (strided|not C-contiguous))"),
    "list with an empty one": (lambda a: [a[:0], a], True, None),
}
#: NumPy has no bfloat16, and JAX has float64 only if it is enabled.
ABSENT = {("numpy", "bfloat16"), ("jax", "float64")}
CASES = [case for case in product(LIBRARIES, DTYPES, FORMS) if case[:2] not in ABSENT]
SLOTS = [case for case in CASES if case[0] != "jax" and case[2] in ("vector", "slice", "every second", "matrix")]


def expected(form):
    """The values in the form's order, as one vector."""
    made = FORMS[form][0](VALUES)
    return np.concatenate([np.ravel(part) for part in made]) if FORMS[form][1] else np.ravel(made)


def given(library, dtype, form):
    """The argument, and what is wrong with it (a pattern), or None."""
    source = LIBRARIES[library]()
    array = source.array(dtype)
    make, _, wrong = FORMS[form]
    if dtype not in FLOATS and form != "empty":
        # A wrong form may be found before a wrong dtype, or after.
        return make(array), f"(is {dtype}|{wrong})" if wrong else f"is {dtype}"
    if dtype not in FLOATS:
        return make(array), f"is {dtype}"
    if not source.views and wrong in ("is strided", FORMS["list of a transpose"][2], FORMS["list of every second"][2]):
        wrong = None
    return make(array), wrong


@pytest.mark.parametrize(("library", "dtype", "form"), CASES, ids=map("-".join, CASES))
@pytest.mark.parametrize("slot_dtype", [np.float32, np.float64])
def test_ingest(library, dtype, form, slot_dtype):
    argument, wrong = given(library, dtype, form)
    slot = np.full(expected(form).size, 99, slot_dtype)
    if wrong is not None:
        check_error(rf"^\[ingest\] update(\[\d\])? ?{wrong}", ops.ingest, argument, slot)
        assert (slot == 99).all()
        return
    facts = ops.ingest(argument, slot)
    assert bits(slot) == bits(expected(form).astype(slot_dtype))
    assert facts.first_nonfinite is None
    assert facts.sum_of_squares == (slot.astype(np.float64) ** 2).sum()  # small numbers: exact in any order


@pytest.mark.parametrize(("library", "dtype", "form"), CASES, ids=map("-".join, CASES))
def test_push(library, dtype, form):
    """Forms that are lists go to a server that was made with such a list; what is strided is copied."""
    argument, wrong = given(library, dtype, form)
    start = FORMS[form][0](np.zeros(D, np.float32))
    tree = FORMS[form][1]
    size = expected(form).size
    server = Server(fedavg(buffer_size=1), list(start) if tree else np.zeros(size, np.float32))
    if (tree or form == "every second") and dtype in FLOATS:
        wrong = None
    if wrong is None:
        server.push(client=5, update=argument, version=0)
        values = expected(form).astype(dtype) if dtype not in ("bfloat16",) else expected(form)
        assert bits(server.params) == bits(values.astype(np.float32))
        return
    check_error(rf"client 5's update:? .*({wrong}|is {dtype})", server.push, client=5, update=argument, version=0)
    assert server.counts["refused"] == 1
    assert not server.params.any()


@pytest.mark.parametrize(("library", "dtype", "form"), SLOTS, ids=map("-".join, SLOTS))
def test_slots(library, dtype, form):
    argument, wrong = given(library, dtype, form)
    if dtype == "float16":
        wrong = "is float16"
    source = expected(form)
    before = np.array(argument.tolist())
    if wrong is not None:
        check_error(rf"^\[ingest\] slot {wrong}|slot (has|is) ", ops.ingest, source + 1, argument)
        assert np.array_equal(np.array(argument.tolist()), before)
        return
    ops.ingest(source + 1, argument)
    assert argument.tolist() == (source + 1).tolist()


# Device, read-only, aliasing: each argument of each operation


def f32(value=1.0):
    return np.full(D, value, np.float32)


def f64(value=1.0):
    return np.full(D, value)


def apply_with(**changes):
    """A round of two updates with cached rows, but for `changes`; a name such as updates_1 is one item of a list."""
    arguments = {
        "params": f32(), "out": f32(), "updates": [f32(2), f32(3)], "weights": np.array([0.5, 0.5]), "sum": f64(),
        "rows": [f32(4), f32(5)], "new_rows": [f32(6), f32(7)],
    }  # fmt: skip
    for name, value in changes.items():
        key, _, index = name.rpartition("_")
        if index.isdigit():
            arguments[key][int(index)] = value
        else:
            arguments[name] = value
    a = arguments
    cache = ops.CachedDifference(a["sum"], 3, a["rows"], a["new_rows"])
    ops.apply(ops.Pass(a["params"], a["out"], ops.Combine(a["updates"], a["weights"]), cache))
    return arguments


#: argument -> a call that hands in `x` for it
CALLS = {
    "ingest update": lambda x: ops.ingest(x, f32()),
    "ingest update[1]": lambda x: ops.ingest([f32()[:0], x], f32()),
    "ingest slot": lambda x: ops.ingest(f32(), x),
    "gram vectors[1]": lambda x: ops.gram([f32(), x]),
    "encode vector": lambda x: ops.encode(x, f32()),
    "encode row": lambda x: ops.encode(f32(), x),
    "decode row": lambda x: ops.decode(x, f32()),
    "decode vector": lambda x: ops.decode(f32(), x),
    "apply params": lambda x: apply_with(params=x),
    "apply out": lambda x: apply_with(out=x),
    "apply updates[1]": lambda x: apply_with(updates_1=x),
    "apply weights": lambda x: apply_with(weights=x),
    "apply sum": lambda x: apply_with(sum=x),
    "apply rows[1]": lambda x: apply_with(rows_1=x),
    "apply new_rows[0]": lambda x: apply_with(new_rows_0=x),
}
WRITTEN = ("ingest slot", "encode row", "decode vector", "apply out", "apply sum", "apply new_rows[0]")


def names(call):
    op, argument = call.split()
    return rf"^\[{op}\] {argument}".replace("[1]", r"\[1\]").replace("[0]", r"\[0\]")


@pytest.mark.parametrize("call", CALLS)
def test_a_device_that_is_not_served(call):
    check_error(names(call) + " is on cuda:1", CALLS[call], FakeCuda(), error=UnavailableError)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", [np.zeros(D, np.int32), np.zeros((D, 2))[:, :1], "text", 3.0, np.zeros(2 * D)[::2]])
def test_something_else(call, wrong):
    check_error(names(call), CALLS[call], wrong)


@pytest.mark.parametrize("call", WRITTEN)
def test_read_only(call):
    array = f64() if call == "apply sum" else f32()
    array.flags.writeable = False
    check_error(names(call) + " is read-only, but is written", CALLS[call], array)
    assert (array == 1).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [("out", "updates_0"), ("out", "rows_1"), ("out", "new_rows_0"), ("sum", "out"), ("sum", "new_rows_1"),
     ("rows_1", "new_rows_0"),
     ("sum", "updates_1"), ("new_rows_0", "params"), ("new_rows_0", "new_rows_1"), ("new_rows_0", "updates_1"),
     ("new_rows_0", "updates_0"), ("sum", "weights")],
)  # fmt: skip
@pytest.mark.parametrize("shift", [0, 1])
def test_aliasing(first, second, shift):
    """Two arguments in the same memory, wholly or all but one element, where at least one is written."""
    memory = np.ones(2 * D + 2)
    if second == "weights":
        one, other = memory[:D], memory[shift : shift + 2]
    elif "sum" in (first, second):
        one, other = memory[:D], memory.view(np.float32)[shift : shift + D]
    else:
        floats = memory.view(np.float32)
        one, other = floats[:D], floats[shift : shift + D]
    before = bits(memory)
    with pytest.raises(AffluxError, match=r"^\[apply\] .* overlap in memory, and one of them is written") as caught:
        apply_with(**{first: one, second: other})
    for name in (first, second):
        key, _, index = name.rpartition("_")
        assert (f"{key}[{index}]" if index.isdigit() else name) in str(caught.value)
    assert bits(memory) == before


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_a_slot_over_its_update(shift):
    memory = np.arange(2.0 * D, dtype=np.float32)
    before = bits(memory)
    update, slot = memory[:D], memory[shift : shift + D]
    check_error(r"(update and slot|slot and update) overlap", ops.ingest, update, slot)
    check_error(r"update\[1\].*overlap", ops.ingest, [np.zeros(0, np.float32), update], slot)
    assert bits(memory) == before


def test_params_in_part_of_out():
    memory = np.ones(D + 1, np.float32)
    check_error("(params and out|out and params) overlap", apply_with, params=memory[:D], out=memory[1:])


def test_aliasing_that_is_allowed():
    """Params in place, a row replaced in place, and the same array read many times."""
    update, row, params = f32(2), f32(4), f32()
    after = apply_with(params=params, out=params, updates=[update, update], rows_0=row, new_rows_0=row)
    assert after["new_rows"][0].tolist() == [2.0] * D
    assert (params != 1).all()
