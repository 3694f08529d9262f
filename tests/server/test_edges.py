"""Values at the edge that once gave another library's error, or none: each is refused by name, or taken."""

import numpy as np
import pytest
import torch

import afflux
from afflux import Calibrate, Layout, Server, codecs, ops, rules
from conftest import bits, check_error


def test_buffers_may_require_grad():
    tree = {"w": np.ones(2, np.float32), "running_mean": np.zeros(2)}
    server = Server(rules.fedbuff(buffer_size=1), tree)
    flat = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    receipt = server.push(client=1, version=0, update={"w": np.ones(2, np.float32)}, buffers=flat)
    assert (receipt.status, server.pull().buffers.tolist()) == ("joined", [0.5, 2.0])


@pytest.mark.parametrize("kind", [list, dict])
def test_a_tree_that_holds_itself(kind):
    tree = kind()
    tree.append(tree) if kind is list else tree.update(own=tree)
    layout = Layout.of({"w": np.ones(2, np.float32)})
    for call in (Layout.of, layout.parts, layout.flatten, lambda it: Server(rules.fedbuff(), it)):
        check_error(r"^\[layout\] tree cannot be read: RecursionError", call, tree)


def test_options_of_a_wrong_type():
    for call, message in (
        (lambda: Calibrate(cached=True, codec=codecs.affine(4), quantize_direction=""), "quantize_direction is ''"),
        (lambda: Server(rules.fedbuff(), np.zeros(2), push_threads=2**31), "push_threads is 2147483648, must be"),
        (lambda: Server(rules.fedbuff(), np.zeros(2), max_slots=2**60), "max_slots is 1152921504606846976, must be at"),
        (lambda: codecs.affine(4, scope=np.array(["block", "vector"])), "scope is array"),
        (lambda: rules.make("fedbuff", normalise=np.zeros(2)), "normalise is array"),
        (lambda: ops.row_bytes(2**70, codec="affine-4"), "size is 1180591620717411303424, must be at most"),
        (lambda: ops.encode(np.zeros(2, "f4"), np.zeros(2, "f4"), facts=3), "facts cannot be read: TypeError"),
        (lambda: ops.gram(3), "vectors cannot be read: TypeError"),
        (lambda: ops.apply("round"), "params cannot be read: AttributeError"),
        (lambda: afflux.exp("1"), "x is '1', must be a number"),
        (lambda: afflux.pow(2.0, 10**400), "y is of type int, must be one that float64 holds"),
    ):
        check_error(message, call)


@pytest.mark.parametrize("name", ["version", "joins"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**53 + 1])
def test_a_state_without_room_for_more_steps(name, value):
    """One more step would not fit into 64 bits, or into the float64 that steps compute with."""
    server = Server(rules.fedbuff(buffer_size=1), np.zeros(2, np.float32))
    server.push(client=1, version=0, update=np.ones(2))
    state = server.state_dict()
    state["meta"][name] = value
    check_error(rf"^\[load_state_dict\] {value} is not a count", server.load_state_dict, state)
    assert (server.version, bits(server.params)) == (1, bits(np.ones(2, np.float32)))
    state["meta"][name] = 2**53
    server.load_state_dict(state)
    assert server.push(client=1, version=server.version, update=np.ones(2)).report.stepped
