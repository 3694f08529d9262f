"""Masked arrays of NumPy are refused wherever a vector comes in: their memory holds the masked values too."""

import numpy as np
import pytest

from afflux import AffluxError, Layout, Server
from afflux.rules import fedasync, fedbuff, zenopp
from conftest import bits, check_error

D = 3
REFUSED = r"is a masked array: give its filled\(\) values$"


def masked(shape=D, dtype=np.float32):
    """One whose masked value is finite, and looks like the others."""
    return np.ma.masked_array(np.ones(shape, dtype), np.arange(np.prod(shape)).reshape(shape) == 1)


class Mapped(np.ndarray):
    """A subclass that hides nothing, like numpy.memmap."""


@pytest.mark.parametrize("vector", [masked(), masked(dtype=np.int64), np.ma.masked_array(np.ones(D))])
def test_a_push_refuses_it(vector):
    server = Server(fedbuff(buffer_size=2), np.zeros(D))
    before = server.state_dict()
    check_error(r"^\[push\] client 7's update.* " + REFUSED, server.push, client=7, update=vector, version=0)
    assert server.state_dict()["meta"]["joins"] == before["meta"]["joins"]
    server.push(client=7, update=vector.filled(0).astype(np.float32), version=0)
    server.push(client=7, update=np.ones(D, np.float32).view(Mapped), version=0)
    assert server.version == 1


@pytest.mark.parametrize("name", ["w", "n"])
def test_a_layout_names_it(name):
    tree = {"w": np.ones(2), "n": np.array([True, False])}
    layout, out = Layout.of(tree), np.zeros(2, np.float32)
    bad = {**tree, name: masked(2, tree[name].dtype)}
    flatten = layout.flatten if name == "w" else lambda tree, _: layout.flatten_buffers(tree)
    for call in (lambda: Layout.of(bad), lambda: flatten(bad, out), lambda: layout.load(bad, np.ones(2), np.ones(2))):
        check_error(rf"^\[layout\] {name} {REFUSED}", call)
    assert not out.any()
    server = Server(fedasync(), tree)
    check_error(rf"client 1's (model|buffers): .*{name} {REFUSED}", server.push, client=1, model=bad, version=0)
    assert server.version == 0


def test_a_layout_refuses_a_flat_one():
    tree = [np.ones(D), np.array(1)]
    layout = Layout.of(tree)
    for call in (lambda v: layout.flatten(tree, v), layout.views, lambda v: layout.load(tree, v)):
        check_error(r"^\[layout\] (out|flat) is a MaskedArray, expected a NumPy array of", call, masked())
    check_error(r"^\[layout\] buffers is a MaskedArray, expected", layout.views, np.ones(D), masked(1, np.float64))
    server = Server(fedbuff(), tree)
    with pytest.raises(AffluxError, match=r"^\[push\] client 1's buffers: it " + REFUSED):
        server.push(client=1, update=np.ones(D, np.float32), version=0, buffers=masked(1, np.float64))


def test_params_states_and_targets_may_not_be_masked():
    check_error(r"^\[Server\] params.* " + REFUSED, Server, fedbuff(), masked())
    server = Server(zenopp(), np.zeros(D))
    check_error(r"^\[set_rule_vector\] validation: .*" + REFUSED, server.set_rule_vector, "validation", masked())
    out = masked()
    check_error(r"^\[pull\] out: \[layout\] it " + REFUSED, server.pull, out=out)
    assert bits(out.data) == bits(np.ones(D, np.float32))
    state = server.state_dict()
    state["arrays"]["params"] = masked()
    check_error(r"^\[load_state_dict\] params is a masked array$", server.load_state_dict, state)
