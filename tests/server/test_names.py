"""Names of wrappers and of libraries, tensors without memory of their own, and vectors that must be copied."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from afflux import AffluxError, Layout, Server, rules
from afflux.rules import fedbuff
from conftest import bits, check_error


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))


class Wrapper(torch.nn.Module):
    """A module under the name that a wrapper gives it."""

    def __init__(self, name, module):
        super().__init__()
        self.add_module(name, module)


def wrapped(name, part=None):
    """The model within a wrapper, or one part of it."""
    if part is None:
        return Wrapper(name, net())
    model = net()
    model[part] = Wrapper(name, model[part])
    return model


@pytest.mark.parametrize(
    "name", ["module", "_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
)
@pytest.mark.parametrize("part", [None, 0, 1])
def test_wrappers_have_no_names(name, part):
    """Server and client, anywhere in a path; a push, and a load."""
    for start, client in (
        (net(), wrapped(name, part)),
        (wrapped(name, part), net()),
        (wrapped(name), wrapped(name, 2)),
    ):
        server = Server(fedbuff(buffer_size=1), start)
        for form in (client, client.state_dict(), {n: a.numpy() for n, a in client.state_dict().items()}):
            assert server.push(client=0, version=server.version, model=form).status == "joined"
        with torch.no_grad():
            for parameter in client.parameters():
                parameter.zero_()
        server.pull(out=client)
        assert bits(server.layout.flatten(client)) == bits(server.params)


def test_exact_names_come_first():
    """A model that has a part called module, and none of that name outside."""
    start = {"module.w": np.ones(2), "w": np.zeros(2)}
    layout = Layout.of(start)
    assert layout.flatten(start).tolist() == [1, 1, 0, 0]
    check_error("both called w", layout.flatten, {"_orig_mod.module.w": np.ones(2), "_orig_mod.w": np.zeros(2)})


def test_flat_parameters_of_fsdp_are_refused():
    with pytest.raises(AffluxError, match=r"_fsdp_wrapped_module\._flat_param is a flat parameter of FSDP: give"):
        Layout.of(net()).flatten({"_fsdp_wrapped_module._flat_param": torch.zeros(13)})


class Sharded(torch.Tensor):
    """A tensor that holds no memory of its own, as DTensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def full_tensor(self):
        return torch.ones(self.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


class Packed(torch.Tensor):
    """As torchao's tensors."""

    __new__ = Sharded.__new__
    __torch_dispatch__ = Sharded.__torch_dispatch__

    def __tensor_flatten__(self):
        return [], None


@pytest.mark.parametrize(("cls", "call"), [(Sharded, "full_tensor"), (Packed, "dequantize")])
def test_tensors_without_memory_name_the_call(cls, call):
    message = rf"w is a {cls.__name__}, which holds no memory of its own: give the result of its {call}\(\)"
    check_error(message, Server, fedbuff(), {"w": cls(torch.ones(2))})
    server = Server(fedbuff(), {"w": torch.ones(2)})
    check_error(rf"client 0's model: .*{message}", server.push, client=0, version=0, model={"w": cls(torch.ones(2))})
    vector, message = cls(torch.ones(2)), message.removeprefix("w ")
    check_error(rf"\[Server\] params {message}", Server, fedbuff(), vector)
    server = Server(fedbuff(buffer_size=1), start := torch.ones(2))
    check_error(rf"client 0's update {message}", server.push, client=0, version=0, update=vector)
    check_error(rf"\[pull\] out: out {message}", server.pull, out=vector)
    server = Server(fedbuff(buffer_size=1), {"w": start, "running_mean": start + 1})
    check_error(rf"client 0's buffers: it {message}", server.push, client=0, version=0, update=start, buffers=vector)


def unaligned(values):
    return np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1)


COPIES = {
    "unaligned": unaligned,
    "byte-swapped": lambda values: values.astype(values.dtype.newbyteorder()),
    "strided": lambda values: np.repeat(values, 2)[::2],
    "reversed": lambda values: values[::-1].copy()[::-1],
    "torch": lambda values: torch.from_numpy(np.repeat(values, 2))[::2],
    "negative": lambda values: torch._neg_view(torch.from_numpy(-values)),
}


@pytest.mark.parametrize("params", [np.zeros(3), {"a": np.zeros(3)}], ids=["flat", "tree"])
def test_an_object_with_an_attribute_of_every_name_is_no_model(params):
    check_error("update is a Mock", Server(fedbuff(buffer_size=1), params).push, client=0, version=0, update=Mock())


@pytest.mark.parametrize("form", COPIES)
def test_vectors_that_cannot_be_read_in_place_are_copied(form):
    """At every entrance, as leaves of trees are."""
    values = np.array([1.5, -2.0, 3.25], np.float32)
    odd = COPIES[form](values)
    server = Server(rules.zenopp(server_lr=0.5), odd)
    assert bits(server.params) == bits(values)
    server.set_rule_vector("validation", odd)
    assert bits(server.rule_vectors["validation"]) == bits(values)
    for kind in ("model", "update", "gradient"):
        server = Server(fedbuff(buffer_size=1), np.zeros(3, np.float32))
        server.push(client=0, version=0, **{kind: odd}, client_lr=1.0, local_steps=1)
        assert bits(server.params) == bits(-values if kind == "gradient" else values)
    server = Server(fedbuff(buffer_size=1), {"w": np.zeros(3, np.float32)})
    if form != "negative":
        server.push(client=0, version=0, model={"w": odd})
        assert bits(server.params) == bits(values)


class Scikit(torch.nn.Module):
    """A module without parameters whose state_dict is the model, as APPFL's SklearnModelWrapper."""

    def __init__(self):
        super().__init__()
        self.coefficients = np.ones(3, np.float32)

    def state_dict(self, *arguments, **options):
        return {"coef_": torch.from_numpy(self.coefficients.copy())}

    def load_state_dict(self, state, *arguments, **options):
        self.coefficients = state["coef_"].numpy().copy()


def test_a_module_without_parameters_is_read_by_its_state_dict():
    server = Server(fedbuff(buffer_size=1), Scikit())
    assert server.layout.roles == {"coef_": "trained"}
    mine = Scikit()
    mine.coefficients += 2
    server.push(client=0, version=0, model=mine)
    assert server.params.tolist() == [3, 3, 3]
    mine.coefficients[:] = 0
    server.pull(out=mine)
    assert mine.coefficients.tolist() == [3, 3, 3]
