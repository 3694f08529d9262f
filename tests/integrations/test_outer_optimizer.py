"""`OuterOptimizer`: the bits of a server, the results of torch's optimizers, and errors that change nothing."""

import copy
import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from afflux import AffluxError, Server, ops
from afflux.integrations.torch import OuterOptimizer
from afflux.rules.optimizers import Adam, AmsGrad, Momentum, Sgd, Yogi
from afflux.rules.rule import Calibrate, Rule
from afflux.rules.schedules import DelayAdaptive
from afflux.rules.weights import Uniform
from conftest import check_error, check_raises
from steps import STEPS

SHAPES = [(70, 60), (), (0, 3), (2049,)]
CORRECTED = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "bias_correction": True}


def rule(step, nesterov=False):
    step = replace(step, nesterov=True) if nesterov else step
    return Rule("outer", "gradient", 1, Uniform(), Calibrate(cached=False), step)


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def params(dtype=torch.float32):
    return [tensor.requires_grad_() for tensor in tensors(0, dtype)]


def flat(arrays):
    return np.concatenate([array.detach().numpy().ravel() for array in arrays])


def steps(model, optimizer, seeds):
    for seed in seeds:
        for param, gradient in zip(model, tensors(seed, model[0].dtype), strict=True):
            param.grad = gradient
        optimizer.step()


def bits(optimizer):
    """All params and states, as bytes."""
    state = optimizer.state_dict()["state"]
    values = {(i, name): torch.as_tensor(value).numpy().tobytes() for i in state for name, value in state[i].items()}
    return [param.detach().numpy().tobytes() for group in optimizer.param_groups for param in group["params"]], values


PARTS = [
    *((step(0.1), False) for step in STEPS.values()),
    (Momentum(0.7, 0.9), True),
    (Adam(**CORRECTED), False),
    (AmsGrad(0.01, initial_v=1e-3), False),
    (Yogi(0.01, initial_v=1e-6), False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("step", "nesterov"), PARTS, ids=lambda each: type(each).__name__)
def test_bits_of_a_server(step, nesterov, dtype):
    model = params(dtype)
    optimizer = OuterOptimizer(model, step, nesterov=nesterov)
    server = Server(rule(step, nesterov), flat(model), dtype=dtype)
    for seed in (1, 2, 3):
        steps(model, optimizer, [seed])
        server.step([("loop", server.version, flat(tensors(seed, dtype)))])
    assert flat(model).tobytes() == server.params.tobytes()
    for name in rule(step, nesterov).rule_vectors:
        assert (
            flat(optimizer.state[param][name] for param in model).tobytes()
            == np.asarray(server.rule_vectors[name]).tobytes()
        )


TORCH = [
    (Sgd(0.5), False, torch.optim.SGD, {"lr": 0.5}),
    (Momentum(0.7, 0.9), False, torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    (Momentum(0.7, 0.9), True, torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    (Adam(**CORRECTED), False, torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99)}),
    (AmsGrad(**CORRECTED), False, torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99), "amsgrad": True}),
]


@pytest.mark.parametrize(("step", "nesterov", "theirs", "options"), TORCH, ids=lambda x: getattr(x, "__name__", ""))
def test_results_of_torch(step, nesterov, theirs, options):
    """Also of a parameter whose gradient is missing at first: it has made fewer steps than the others."""
    models = params(), params()
    optimizers = OuterOptimizer(models[0], step, nesterov=nesterov), theirs(models[1], **options)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in optimizers]
    for seed in range(1, 5):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            for i, (param, gradient) in enumerate(zip(model, tensors(seed), strict=True)):
                param.grad = None if seed == 1 and i == 0 else gradient
            optimizer.step()
            scheduler.step()
        if seed == 1:
            assert torch.equal(models[0][0], params()[0])
    assert optimizers[0].param_groups[0]["lr"] == options["lr"] / 16
    for ours, other, before in zip(*models, params(), strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=2e-6)
        assert not ours.numel() or not torch.equal(ours, before)


def test_groups_have_their_own_numbers():
    model, alone = params(), [params(), params()]
    optimizer = OuterOptimizer([{"params": model[:2]}, {"params": model[2:], "lr": 0.25, "beta": 0.5}], Momentum(1.0))
    steps(model, optimizer, [1, 2])
    for step, each in zip([Momentum(1.0), Momentum(0.25, 0.5)], alone, strict=True):
        steps(each, OuterOptimizer(each, step), [1, 2])
    for param, other in zip(model, [*alone[0][:2], *alone[1][2:]], strict=True):
        assert torch.equal(param, other)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("step", "nesterov"), PARTS, ids=lambda each: type(each).__name__)
def test_a_loaded_state_gives_the_same_bits(step, nesterov):
    model, other = params(), params()
    optimizer = OuterOptimizer(model, step, nesterov=nesterov)
    steps(model, optimizer, [1, 2])
    for param, value in zip(other, model, strict=True):
        param.data.copy_(value.detach())
    loaded = OuterOptimizer(other, replace(step, lr=9.0), nesterov=nesterov)
    loaded.load_state_dict(saved(optimizer))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    steps(model, optimizer, [3, 4])
    steps(other, loaded, [3, 4])
    steps(copied.param_groups[0]["params"], copied, [3, 4])
    assert bits(optimizer) == bits(loaded) == bits(copied)


def test_a_state_dict_shares_nothing():
    """Neither with the optimizer that gave it nor with those that load it."""
    model, others = params(), [params(), params()]
    optimizer = OuterOptimizer(model, Adam(**CORRECTED))
    steps(model, optimizer, [1])
    checkpoint, first = optimizer.state_dict(), bits(optimizer)[1]
    loaded = [OuterOptimizer(other, Adam(lr=9.0)) for other in others]
    for other, each in zip(others, loaded, strict=True):
        each.load_state_dict(checkpoint)
        assert bits(each)[1] == first
        steps(model, optimizer, [2])
        steps(other, each, [3, 4])
    assert bits(loaded[0])[1] == bits(loaded[1])[1]
    checkpoint["state"][0]["m"].fill_(7)
    checkpoint["param_groups"][0]["lr"] = 7.0
    assert bits(loaded[0])[1] == bits(loaded[1])[1]
    optimizer.load_state_dict(loaded[0].state_dict())
    assert bits(optimizer)[1] == bits(loaded[0])[1]


NOT_DONE = [("weight_decay", 0.1), ("momentum", 0.9), ("maximize", True), ("betas", (0.9, 0.99)), ("beta1", 0.5)]


@pytest.mark.parametrize(("option", "value"), NOT_DONE, ids=lambda each: each if isinstance(each, str) else "")
def test_options_that_the_step_does_not_have(option, value):
    """In a new group, in a loaded one, and in one that was changed by hand."""
    model, message = params(), f"a group of params has {option}=.*, which Momentum does not do"
    optimizer = OuterOptimizer([{"params": model[:2], "name": "body", "initial_lr": 1.0}], Momentum(0.7))
    check_error(message, optimizer.add_param_group, {"params": model[2:], option: value})
    loaded = optimizer.state_dict()
    loaded["param_groups"][0][option] = value
    check_error(message, optimizer.load_state_dict, loaded)
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.param_groups[0][option] = value
    check_error(message, optimizer.step)


def without(entries, name):
    return {key: value for key, value in entries.items() if key != name}


SGD = torch.optim.SGD([torch.zeros(1)]).state_dict()["param_groups"][0]
MOMENTUM = {"part": "momentum", "lr": 0.1, "beta": 0.5, "nesterov": False}
NO_STATES = [  # of a step of Adam: what replaces the group, what replaces the state of the last parameter, the error
    (lambda group: SGD | {"params": group["params"]}, None, "part is None"),
    (lambda group: without(group, "part"), None, "part is None"),
    (lambda group: group | {"part": []}, None, r"part is \[\]"),
    (lambda group: MOMENTUM | {"params": group["params"]}, None, r"the state of params\[0\] is not one of Momentum"),
    (lambda group: without(group, "lr"), None, "lr is None"),
    (lambda group: group | {"lr": "x"}, None, "lr is 'x'"),
    (lambda group: without(group, "nesterov"), None, "nesterov is None"),
    (None, lambda state: without(state, "step"), r"the state of params\[3\] is not one of Adam"),
    (None, lambda state: without(state, "m"), r"the state of params\[3\] is not one of Adam"),
    (None, lambda state: [], r"the state of params\[3\] is not one of Adam"),
    (None, lambda state: state | {"step": -1}, r"step of params\[3\] is -1"),
    (None, lambda state: state | {"step": float("nan")}, r"step of params\[3\] is nan"),
    (None, lambda state: state | {"m": None}, r"m of params\[3\] is None"),
    (None, lambda state: state | {"m": [0.0]}, r"m of params\[3\] is \[0\.0\]"),
    (None, lambda state: state | {"m": torch.zeros(2)}, r"m of params\[3\] is torch.float32 \[2\]"),
    (None, lambda state: state | {"m": torch.zeros(2049).to_sparse()}, "expected a dense tensor"),
    (None, lambda state: state | {"m": torch.zeros(1).expand(2049)}, "strided"),
    (None, lambda state: state | {"m": state["m"] * float("nan")}, r"m of params\[3\] has a non-finite"),
    (None, lambda state: state | {"v": state["v"] - 1e6}, r"v of params\[3\] has a non-finite or negative"),
]


def test_a_state_that_is_not_valid_is_refused():
    """By `load_state_dict`, of which nothing remains: the steps go on with the same bits."""
    models = params(), params()
    optimizer, undisturbed = (OuterOptimizer(model, Adam(**CORRECTED)) for model in models)
    steps(models[0], optimizer, [1])
    for new_group, new_state, message in NO_STATES:
        saved_state = saved(optimizer)
        if new_group:
            saved_state["param_groups"] = [new_group(saved_state["param_groups"][0])]
        if new_state:
            saved_state["state"][3] = new_state(saved_state["state"][3])
        before = bits(optimizer)
        check_error(message, optimizer.load_state_dict, saved_state)
        assert bits(optimizer) == before
    steps(models[0], optimizer, [2])
    steps(models[1], undisturbed, [1, 2])
    assert bits(optimizer) == bits(undisturbed)
    optimizer.state[models[0][3]]["step"] = -1  # by hand: the step itself refuses it
    before = bits(optimizer)
    check_error(r"step of params\[3\] is -1", optimizer.step)
    assert bits(optimizer) == before


@pytest.mark.parametrize("seed", [1, 2], ids=["without states", "with states"])
@pytest.mark.parametrize("is_swept", [True, False], ids=["after the sweep", "before the sweep"])
def test_an_interrupted_step_is_made_or_not(is_swept, seed, monkeypatch):
    models = params(), params()
    optimizer, undisturbed = (OuterOptimizer(model, Adam(**CORRECTED)) for model in models)
    apply = ops.apply

    def interrupted(*args, **options):
        if is_swept:
            apply(*args, **options)
        raise KeyboardInterrupt

    steps(models[0], optimizer, range(1, seed))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ops, "apply", interrupted)
        steps(models[0], optimizer, [seed])
    steps(models[0], optimizer, range(seed + is_swept, 4))
    steps(models[1], undisturbed, [1, 2, 3])
    assert bits(optimizer) == bits(undisturbed)


def spoil(model):
    """Gradients of the last parameter that no step may use, and the beginning of the error."""
    for value in (float("nan"), float("inf"), 2e15):
        gradient = torch.ones(2049)
        gradient[-1] = value
        yield gradient, "has a non-finite or too large value"
    yield torch.full((2049,), 9e14), "gradients have the norm"
    yield torch.ones(2049).to_sparse(), "expected a dense tensor"


def test_an_error_changes_nothing():
    """In any group: none has made its step."""
    model = params()
    optimizer = OuterOptimizer([{"params": model[:3]}, {"params": model[3:]}], AmsGrad(0.1))
    for seeds in ([1], [2]):  # with and without states
        for gradient, message in spoil(model):
            before = bits(optimizer)
            for param, other in zip(model, tensors(5), strict=True):
                param.grad = other
            model[3].grad = gradient
            check_error(message, optimizer.step)
            assert bits(optimizer) == before
        steps(model, optimizer, seeds)
        assert bits(optimizer) != before
    optimizer.param_groups[1]["lr"] = float("nan")
    before = bits(optimizer)
    check_error("lr", optimizer.step)
    assert bits(optimizer) == before


def test_a_result_that_overflows_is_an_error():
    weight = torch.full((3,), 3e38, requires_grad=True)
    optimizer = OuterOptimizer([weight], Sgd(1e30))
    weight.grad = -torch.full((3,), 1e8)
    check_error("overflows", optimizer.step)


UNFIT = [torch.zeros(2, dtype=dtype) for dtype in (torch.complex64, torch.float16, torch.bfloat16)]
UNFIT += [torch.zeros(2, 3).T, torch.zeros(4)[::2], torch.zeros(2, device="meta")]


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda each: f"{each.dtype} {each.stride()} {each.device}")
def test_params_that_cannot_be_updated_where_they_are(unfit):
    optimizer = OuterOptimizer(params(), Sgd())
    check_raises(AffluxError, optimizer.add_param_group, {"params": [unfit.requires_grad_()]})
    assert len(optimizer.param_groups) == 1


def test_a_param_whose_dtype_has_changed_is_named():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OuterOptimizer([("body.weight", weight)], Sgd())
    weight.data = weight.data.half()
    weight.grad = torch.ones(2, dtype=torch.float16)
    check_error(r"body\.weight is float16 on cpu, must be contiguous float32 or float64", optimizer.step)


@pytest.mark.parametrize("step", [0.1, Sgd, Sgd(DelayAdaptive(0.1)), None])
def test_steps_that_are_no_steps_of_an_optimizer(step):
    check_error("with a number as lr: Sgd, ", OuterOptimizer, params(), step)


def test_nesterov_is_for_momentum():
    check_error("nesterov is True, which is for Momentum", OuterOptimizer, params(), Sgd(), nesterov=True)


def test_a_closure_and_the_version_counter_of_autograd():
    weight = torch.ones(3, requires_grad=True)
    optimizer = OuterOptimizer([weight], Sgd(0.5))
    stale = (weight * weight).sum()

    def closure():
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert weight.tolist() == [0.0, 0.0, 0.0]
    check_error("modified by an inplace operation", stale.backward, error=RuntimeError)


def test_a_strided_gradient():
    weight = torch.zeros(2, 3, requires_grad=True)
    weight.grad = torch.arange(6.0).reshape(3, 2).T
    OuterOptimizer([("weight", weight)], Sgd(1.0)).step()
    assert torch.equal(-weight, weight.grad)
