"""The checks of arguments: which spellings of ints, dtypes, losses and client ids are taken, and as what."""

from enum import IntEnum, StrEnum
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from afflux import Layout, Server, ServerOptions, plan
from afflux.ops.validation import as_int, integer, loss_of, one_dtype_of, plain_id
from afflux.rules import fedbuff
from conftest import check_error


class Index:
    """An int of some other library: nothing but `__index__`."""

    def __index__(self):
        return 3

    def __repr__(self):
        return "Index()"


class Three(IntEnum):
    THREE = 3


class Name(StrEnum):
    ANN = "ann"


THREES = [3, 3.0, np.int8(3), np.uint64(3), np.float16(3), np.float64(3), Index(), Three.THREE, np.array(3)]
THREES += [torch.tensor(3), torch.tensor(3, dtype=torch.uint8), torch.tensor(3.0), np.array(3.0)]
NO_INTS = [None, "3", b"3", 3.5, float("nan"), float("inf"), -np.inf, np.float32(0.1), True, np.True_, 3 + 0j]
NO_INTS += [np.array([3, 3]), np.array(True), torch.tensor(True), torch.tensor([3, 3]), torch.tensor(3.5), Fraction(3)]


@pytest.mark.parametrize("value", THREES, ids=repr)
def test_spellings_of_an_int(value):
    for found in (as_int(value), integer(3)("part", "size", value)):
        assert (found, type(found)) == (3, int)
    check_error(r"^\[part\] size is .*, must be an int of at least 4$", integer(4), "part", "size", value)


@pytest.mark.parametrize("value", NO_INTS, ids=repr)
def test_what_is_no_int(value):
    assert as_int(value) is None
    check_error(r"^\[part\] size is .*, must be an int of at least 0$", integer(0), "part", "size", value)


def test_ints_of_any_size():
    assert as_int(2.0**70) == 2**70
    assert integer(0)("part", "size", 10**5000) == 10**5000
    check_error(r"^\[part\] size is of type int, must be an int of at least 0", integer(0), "part", "size", -(10**5000))


@pytest.mark.parametrize("two", [2.0, np.int16(2), np.float32(2), torch.tensor(2)], ids=repr)
def test_arguments_of_a_server_are_such_ints(two, tmp_path):
    given = {"max_staleness": two, "max_slots": two, "max_versions": two, "seed": two, "memory_budget": 1e6}
    rule = fedbuff(buffer_size=two)
    server = Server(rule, np.zeros(3), num_threads=two, push_threads=two, log=True, **given)
    assert server.push(client="ann", update=np.ones(3), version=0.0, num_examples=two).join == 0
    assert [type(value) for value in server.log[0][3:6]] == [int, int, int]
    options = server.options
    for value in (rule.buffer_size, options.max_staleness, options.max_slots, options.max_versions, options.seed):
        assert (value, type(value)) == (2, int)
    assert plan(rule, two).memory_bytes == plan(fedbuff(buffer_size=2), 2).memory_bytes
    Server(rule, np.zeros(3), store=tmp_path / "store", commit_every=two).close()
    with Server.open(tmp_path / "store", num_threads=two, push_threads=two, commit_every=two) as again:
        assert (again.options.commit_every, type(again.options.commit_every)) == (2, int)


DTYPES = {
    "float32": ["float32", "torch.float32", np.float32, np.single, np.dtype("float32"), torch.float32],
    "float64": ["float64", np.float64, np.dtype("f8"), np.ones(1).dtype, torch.double],
    "bfloat16": ["bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in DTYPES for value in DTYPES[name]], ids=repr)
def test_spellings_of_a_dtype(name, value):
    assert one_dtype_of(*DTYPES)("part", "dtype", value) == name
    if name == "bfloat16":
        assert ServerOptions(slot_dtype=value).slots_as == name
        return
    assert (ServerOptions(dtype=value).dtype, ServerOptions(dtype=value, slot_dtype=value).slots_as) == (name, name)
    assert Layout.of([np.ones(2)]).flatten([np.ones(2)], dtype=value).dtype == name
    assert plan(fedbuff(), 5, dtype=value) == plan(fedbuff(), 5, dtype=name)


def test_dtypes_of_jax():
    import jax.numpy as jnp

    assert ServerOptions(dtype=jnp.float64, slot_dtype=jnp.bfloat16).slots_as == "bfloat16"
    assert ServerOptions(dtype=jnp.ones(1, jnp.float32).dtype).dtype == "float32"


@pytest.mark.parametrize(
    "value", [np.float16, float, np.dtype(">f4"), "f4", None, 3, [], np.ones(2), torch.int8], ids=repr
)
def test_what_is_no_such_dtype(value):
    for what, call in (("Server", ServerOptions), ("layout", Layout.of([np.ones(2)]).flatten)):
        arguments = () if what == "Server" else ([np.ones(2)],)
        check_error(rf"^\[{what}\] dtype is .*, must be 'float32' or 'float64'$", call, *arguments, dtype=value)
    if value is not None:
        check_error(r"slot_dtype is .* 'float64' or 'bfloat16'$", ServerOptions, dtype="float64", slot_dtype=value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5), -3, np.uint8(7), 0])
def test_spellings_of_a_loss(value):
    found = loss_of("push", 7, value)
    assert (found, type(found)) == (float(value), float)


def test_an_unknown_loss_is_nan():
    assert np.isnan(loss_of("push", 7, None))


@pytest.mark.parametrize(
    "value",
    ["0.5", True, np.True_, 10**400, 1j, [0.5], float("nan"), np.float32("nan"), float("inf"), np.float32("-inf")],
    ids=lambda value: str(value)[:9],
)
def test_what_is_no_loss(value):
    check_error(r"client 7's loss is .*, must be a finite number, or None if unknown$", loss_of, "push", 7, value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.uint64(2**64 - 1), 2**64 - 1),
        (-(2**63), -(2**63)),
        (Index(), 3),
        (Three.THREE, 3),
        (torch.tensor(7), 7),
        (np.str_("böb"), "böb"),
        (Name.ANN, "ann"),
        ("", ""),
    ],
    ids=repr,
)
def test_spellings_of_a_client_id(value, found):
    assert (plain_id(value), type(plain_id(value))) == (found, type(found))


@pytest.mark.parametrize(
    "value", [None, True, np.True_, 3.0, np.float64(3), b"ann", (1, 2), torch.tensor(True)], ids=repr
)
def test_what_is_no_client_id(value):
    check_error(r"^\[push\] client_id is .*, must be an int or a str$", plain_id, value)
