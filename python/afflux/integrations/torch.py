"""The step of a rule as an optimizer of torch, for a training loop that computes its pseudo-gradients itself."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import cache
from inspect import isclass, signature
from itertools import accumulate
from typing import Any, Protocol, overload

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.optim.optimizer import ParamsT

from afflux import ops
from afflux.aggregation.limits import MAX_ABS
from afflux.arrays.interop import count_writes, first_beyond, kind_of, ready
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief, count_of, finite, flag
from afflux.rules import optimizers
from afflux.rules.optimizers import Momentum, Sgd
from afflux.rules.registry import registered_parts, to_plain
from afflux.rules.rule import Arrivals, Optimizer
from afflux.rules.schedules import Rate


class StepPart(Optimizer, Protocol):
    """A part of afflux.rules.optimizers: its learning rate, and the vectors that it keeps with their initial values."""

    @property
    def lr(self) -> Rate:
        """A number, or a law."""
        ...

    @property
    def states(self) -> Mapping[str, float]:
        """The vectors, in the order of the engine's step."""
        ...


class OuterOptimizer(torch.optim.Optimizer):
    """The outer step of a loop such as DiLoCo's: params change by the step of a rule, with `p.grad` as the gradient.

    The step is bit-identical to a `Server`'s round of this one gradient: float64 inside, each result rounded once,
    equal on any number of threads and any instruction set. Up to rounding to float32 it is, by step,

        Sgd                torch.optim.SGD
        Momentum           SGD(momentum=beta), and with nesterov=True SGD(momentum=beta, nesterov=True)
        Adam, AmsGrad      with bias_correction=True: Adam, and Adam(amsgrad=True)

    and Yogi and Adagrad as in afflux.rules.optimizers. A group of params may have its own `lr` and other fields of the
    step; an option that the step does not have, such as `weight_decay` or `maximize`, is an error. `state_dict` returns
    a copy of the groups and the moments, and `load_state_dict` copies them again: one dict can be loaded any number of
    times. After it, the steps are bit-identical. For a state that is not valid, such as one with a NaN,
    `load_state_dict` raises AffluxError and changes nothing.

    A parameter is a contiguous float32 or float64 tensor on the CPU. A parameter without a gradient does not change,
    as in torch. Tensors are read and written where they are; only gradients that are not contiguous are copied.

    >>> from afflux.rules.optimizers import Momentum
    >>> weight = torch.ones(2, requires_grad=True)
    >>> optimizer = OuterOptimizer([weight], Momentum(lr=0.5, beta=0.9), nesterov=True)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> weight.tolist()
    [0.05000000074505806, 0.05000000074505806]
    """

    def __init__(self, params: ParamsT, step: StepPart, *, nesterov: bool = False) -> None:
        """Keep no state before the first step.

        Args:
            params: tensors, named tensors or groups, as for any optimizer of torch.
            step: a part of afflux.rules.optimizers whose `lr` is a number.
            nesterov: another way to write Momentum(nesterov=True).

        Raises:
            AffluxError: the step is no such part, or a parameter cannot be updated where it is.
        """
        if type(step) not in _optimizers().values() or callable(step.lr):
            raise AffluxError(
                f"[OuterOptimizer] step is {brief(step)}, must be a part of afflux.rules.optimizers "
                f"with a number as lr: {', '.join(cls.__name__ for cls in _optimizers().values())}"
            )
        super().__init__(params, {**to_plain(step), "nesterov": nesterov or getattr(step, "nesterov", False)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params, as in torch.

        Raises:
            AffluxError: as the constructor; no group was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        _part_of(group)
        for i, param in enumerate(group["params"]):
            _require_updatable(_label(group, i), param)
        self.param_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the groups and the moments: later steps do not change it, as they change that of torch."""
        return deepcopy(super().state_dict())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check the groups and states of a state_dict or a copy, then keep copies of the moments.

        Raises:
            AffluxError: a group or a state is not one of this class, or a moment is not finite, or a second moment is
                negative; nothing has changed.
        """
        states = defaultdict(dict, state["state"])
        for group in state["param_groups"]:
            part = _part_of(group)
            for i, param in enumerate(group["params"]):
                moments, label = states.get(param, {}), _label(group, i)
                _steps_of(label, param, part, moments)
                for name in part.states if moments else ():
                    _require_updatable(f"{name} of {label}", moments[name])
                    if not moments[name].isfinite().all() or (name in ("v", "v_hat") and (moments[name] < 0).any()):
                        raise AffluxError(f"[OuterOptimizer] {name} of {label} has a non-finite or negative value")
                    states[param] = moments = {**moments, name: moments[name].detach().clone()}
        super().__setstate__({**state, "state": states})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step with the gradients of all params that have one.

        Args:
            closure: computes the gradients and returns the loss, before the step.

        Returns:
            The closure's result.

        Raises:
            AffluxError: a gradient has a value that is not finite, or a norm beyond 1e15 (float64: 1e150), or is
                sparse or complex; a field of a group or a state is not valid: nothing has changed. Or a result
                overflows, because params or lr are near the largest number of the dtype: params have been written.
            KeyboardInterrupt: each parameter, its moments and its number of steps are those before the step or those
                after it.

        Cost: each gradient is read twice, params and states once; params and states are written once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        threads, sound = torch.get_num_threads(), list[bool]()
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        sweeps = [batch.sweep(threads) for batch in batches]
        checked = [ops.check(sweep) for sweep in sweeps]
        for batch, sweep, prepared in zip(batches, sweeps, checked, strict=True):
            states = {param: state for param, state in zip(batch.params, batch.states, strict=True) if state}
            before, swept = {param: self.state.get(param, {}) for param in states}, len(sound)
            try:
                self.state.update(states)  # before the sweep: an interrupt may come before `apply` returns
                count_writes([*batch.params, *(state[name] for state in batch.states for name in batch.part.states)])
                ops.apply(sweep, num_threads=threads, done=sound, checked=prepared)
            except BaseException:
                if len(sound) == swept:
                    self.state.update(before)
                raise
        if not all(sound):
            raise AffluxError("[OuterOptimizer] the step overflows: params or states have values that are not finite")
        return loss

    def _batches(self, group: dict[str, Any]) -> "list[_Batch]":
        """Return the params of a group that have a gradient, by dtype and by the number of steps that they have made.

        A state that is returned may be new; the optimizer keeps it after the step.
        """
        part = _part_of(group)
        batches: dict[tuple[int, torch.dtype], _Batch] = {}
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            label = _label(group, i)
            steps, state = self._state(param, part, label)
            if param.dtype not in (torch.float32, torch.float64):  # it has changed
                _require_updatable(label, param)
            if (batch := batches.get((steps, param.dtype))) is None:
                batches[steps, param.dtype] = batch = _Batch(part, steps)
            batch.labels.append(label)
            batch.params.append(param)
            batch.gradients.append(ready(f"the gradient of {label}", param.grad))
            batch.states.append(state)
        return list(batches.values())

    def _state(self, param: torch.Tensor, part: StepPart, label: str) -> tuple[int, dict[str, Any]]:
        """Return the number of steps of a parameter, and its state after one more."""
        state = self.state.get(param, {})
        steps = _steps_of(label, param, part, state)
        state = state or {name: torch.full_like(param, first) for name, first in part.states.items()}
        return steps, {**state, "step": steps + 1} if _counts(part) else state


class _Batch(Struct):
    """Params that one sweep changes, with their gradients and states."""

    part: StepPart
    steps: int
    labels: list[str] = []
    params: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    states: list[dict[str, Any]] = []

    def sweep(self, threads: int) -> ops.Pass:
        """Return the sweep, once all gradients are checked."""
        borders = np.array([0, *accumulate(param.numel() for param in self.params)])
        dtype = str(self.params[0].dtype).removeprefix("torch.")
        params = ops.Parts([param.detach() for param in self.params], borders)
        gradient = ops.Parts(self.gradients, borders, dtype=dtype)
        norm = ops.inner([gradient], num_threads=threads).squares[0] ** 0.5
        if not norm <= MAX_ABS[dtype]:
            for label, array in zip(self.labels, self.gradients, strict=True):
                if first_beyond(array, MAX_ABS[dtype]) is not None:
                    raise AffluxError(f"[OuterOptimizer] the gradient of {label} has a non-finite or too large value")
            raise AffluxError(
                f"[OuterOptimizer] gradients have the norm {norm:.3g}, at most {MAX_ABS[dtype]:g} is served"
            )
        step = self.part(Arrivals(self.steps, (), _INTS, _INTS, _INTS, _FLOATS, _FLOATS))
        step = replace(step, lr=-step.lr)
        states = [ops.Parts([state[name] for state in self.states], borders) for name in self.part.states]
        return ops.Pass(params, params, ops.Combine([gradient], np.ones(1)), step=step, states=states)


_INTS, _FLOATS = np.zeros(0, np.int64), np.zeros(0)


def _optimizers() -> dict[str, type[Any]]:
    """Return the classes of afflux.rules.optimizers, by the names of the parts: their fields are numbers."""
    classes = {name: part.cls for name, part in registered_parts("step").items()}
    return {name: cls for name, cls in classes.items() if cls.__module__ == optimizers.__name__}


@cache
def _step_options() -> frozenset[str]:
    """Return the names of the options of all steps, torch's and ours."""
    steps = [*filter(isclass, vars(torch.optim).values()), *_optimizers().values()]
    return frozenset(name for step in steps for name in signature(step).parameters)


def _counts(part: StepPart) -> bool:
    """Return whether the state of a parameter has its number of steps, as in torch: the part may read it."""
    return not isinstance(part, Sgd | Momentum)


def _part_of(group: dict[str, Any]) -> StepPart:
    """Return the step part of a group, with the group's own numbers."""
    name, lr = group.get("part"), group.get("lr")
    cls = _optimizers().get(as_text(name) or "")
    if cls is None:
        raise AffluxError(f"[OuterOptimizer] part is {brief(name)}, must be one of {', '.join(_optimizers())}")
    # A state of an earlier version may lack an option that has come since, but no other.
    numbers: dict[str, Any] = {
        field.name: group.get(field.name, field.default if field.name == "dampening" else None) for field in fields(cls)
    }
    for option in sorted(_step_options() & group.keys() - numbers.keys() - {"params", "nesterov"}):
        raise AffluxError(
            f"[OuterOptimizer] a group of params has {option}={brief(group[option])}, which {cls.__name__} does not "
            f"do: remove it; a group may have {', '.join(numbers)} and nesterov"
        )
    # torch's schedulers may give a tensor
    numbers["lr"] = finite("OuterOptimizer", "lr", lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
    part: StepPart = cls(**numbers)
    if flag("OuterOptimizer", "nesterov", group.get("nesterov")) and not isinstance(part, Momentum):
        raise AffluxError(f"[OuterOptimizer] nesterov is True, which is for Momentum, not for {type(part).__name__}")
    return part


def _steps_of(label: str, param: torch.Tensor, part: StepPart, state: object) -> int:
    """Return the number of steps that a parameter with this state has made; its moments' values are not read."""
    names = [*part.states, "step"] if _counts(part) else [*part.states]
    if not isinstance(state, dict) or (state and {*state} != {*names}):
        raise AffluxError(f"[OuterOptimizer] the state of {label} is not one of {type(part).__name__}")
    if not state:
        return 0
    for name in part.states:
        moment = state[name]
        if not isinstance(moment, torch.Tensor) or (moment.shape, moment.dtype) != (param.shape, param.dtype):
            kind = f"{moment.dtype} {[*moment.shape]}" if isinstance(moment, torch.Tensor) else brief(moment)
            raise AffluxError(
                f"[OuterOptimizer] {name} of {label} is {kind}, must be a tensor, {param.dtype} {[*param.shape]}"
            )
    return count_of(0)("OuterOptimizer", f"step of {label}", state.get("step", 0))


def _require_updatable(label: str, tensor: torch.Tensor) -> None:
    """Raise AffluxError for a tensor that cannot be updated where it is."""
    kind, layout = kind_of(label, tensor), "" if tensor.is_contiguous() else "strided "
    if layout or kind not in MAX_ABS or tensor.device.type != "cpu" or tensor.is_neg():
        raise AffluxError(
            f"[OuterOptimizer] {label} is {layout}{kind} on {tensor.device}, must be contiguous float32 or float64 on "
            "the CPU"
        )


def _label(group: dict[str, Any], i: int) -> str:
    names = group.get("param_names")
    return str(names[i]) if isinstance(names, list) and i < len(names) else f"params[{i}]"
