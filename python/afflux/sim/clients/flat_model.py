"""A torch module whose trained parameters are one flat vector: a pull is one copy, a local step is one axpy."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from typing import Any

import numpy as np
import torch

from afflux.arrays.fields import Role, from_words, to_words
from afflux.arrays.layout import Layout
from afflux.arrays.roles import Roles
from afflux.ops.errors import ConfigError
from afflux.sim.clients.module_state import ModuleState
from afflux.sim.errors import note_on_errors
from afflux.sim.workload.random_streams import StreamPurpose, random_stream, restored_globals, seed_globals
from afflux.sim.workload.task import positional_parameters


def has_device(device: str) -> bool:
    """Return whether torch finds the GPU, if `device` is one."""
    place = torch.device(device)
    return place.type != "cuda" or (place.index or 0) < torch.cuda.device_count()


@contextmanager
def reproducible_libraries() -> Iterator[None]:
    """Run torch on one thread in the block; restore the random states of torch, NumPy and Python after it.

    The bits of a sum may depend on the number of threads; on a GPU also on how cuDNN chooses its kernels.
    """
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with (
            restored_globals(),
            torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def make_module(model: torch.nn.Module | Callable[..., torch.nn.Module], seed: int) -> torch.nn.Module:
    """Return a new module with the initial params of `seed`: a copy, or what the function `model` returns.

    Raises:
        ConfigError: the module cannot be copied, or the function returns something else.
    """
    if isinstance(model, torch.nn.Module):
        try:
            return copy.deepcopy(model)
        except Exception as error:  # of torch, or of any object that the module holds
            name = _computed(model)
            why = str(error) if name is None else f"{name} is a result of a forward, with its gradients"
            raise ConfigError(f"the model cannot be copied: {why}; pass a function that makes the model") from error
    stream = random_stream(seed, StreamPurpose.MODEL)
    with torch.random.fork_rng(devices=()), restored_globals():
        own_seed = int(random_stream(seed, StreamPurpose.TORCH).integers(2**63))
        torch.manual_seed(own_seed)
        seed_globals(own_seed)
        with note_on_errors("while the model was made"):
            module = model(stream) if positional_parameters(model) else model()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model returns {type(module).__name__}, must return a torch.nn.Module")
    return module


def _computed(module: torch.nn.Module) -> str | None:
    """Return the name of a tensor in the module that a forward has computed; None if there is none."""
    for prefix, part in module.named_modules():
        for name, value in {**part.__dict__, **part._buffers}.items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                return f"{prefix}.{name}" if prefix else name
    return None


class FlatModel:
    """A module; its trained parameters and their gradients are views into two flat float32 vectors on its device.

    Parameters that require no gradient do not change. Buffers of the layout are part of the model; they are read by
    name, so that a buffer in whose place the module puts another tensor is followed. Every `load` sets all else back to
    its state at the start: other buffers, plain attributes, modes, gradients.
    """

    def __init__(self, module: torch.nn.Module, roles: Roles | None = None, device: str = "cpu") -> None:
        """Bind the module's parameters and buffers.

        `roles` are those of `Layout.of`. No array may be local, because one module serves all clients. The module is
        moved to the device.

        Raises:
            ConfigError: an array is local, not initialised or not on the CPU, or a trained parameter is not float32; or
                there is no such device.
        """
        self.module = module
        _check_arrays(module)
        self.layout = layout = Layout.of(module, "trainable", roles=roles)
        self.initial_params = np.asarray(layout.flatten(module))
        self.device = device
        if device != "cpu":
            if not has_device(device):
                raise ConfigError(f"device is {device}, but torch finds no such GPU, only {torch.cuda.device_count()}")
            module.to(device)
        self._state = state = ModuleState(module)
        self._params = np.zeros(layout.size, dtype=np.float32)  # on the CPU the memory of `flat`
        self.flat = torch.from_numpy(self._params).to(device)
        self.gradient = torch.zeros_like(self.flat)
        parameters, buffers = dict(state.parameters), dict(state.buffers)
        self._trained = []
        for field in layout.fields:
            values, slope = (flat[field.start : field.stop].view(field.shape) for flat in (self.flat, self.gradient))
            named = parameters.pop(field.name)
            named.move(values)
            self._trained.append((named, slope))
        held = parameters | buffers
        for field in layout.locals:
            if field.name in held:
                raise ConfigError(f"roles: {field.name} is local, and a simulation keeps no arrays of single clients")
        self._buffers = [(field, held.pop(field.name)) for field in layout.buffers]
        self._copied = [(field, held.pop(field.name)) for field in layout.copied]
        self._frozen = [(named, named.checksum()) for name, named in held.items() if name in parameters]
        self._fixed = [(named, named.tensor.clone()) for name, named in held.items() if name in buffers]
        self._modes = [(part, part.training) for part in module.modules()]
        self.initial_buffers = self.buffers()
        self._set_params(self.initial_params)

    @property
    def params(self) -> np.ndarray:
        """The trained parameters (d,), on the host: on the CPU those that the module reads and writes, else a copy."""
        return self._params if self.device == "cpu" else self.flat.numpy(force=True)

    def _set_params(self, params: np.ndarray) -> None:
        np.copyto(self._params, params)
        if self.device != "cpu":
            self.flat.copy_(torch.from_numpy(self._params))

    def load(self, params: np.ndarray, buffers: np.ndarray | None = None) -> None:
        """Set the parameters (d,) and buffers of the module, and all else as at the start."""
        self._state.restore()
        for named, _ in self._trained:
            named.restored()
            if not named.tensor.requires_grad:
                named.tensor.requires_grad = True
        self._set_params(params)
        for named, first in self._fixed:
            named.restored().copy_(first)
        if buffers is not None:
            loaded = torch.from_numpy(np.array(buffers))
            for field, named in self._buffers:
                values = loaded[field.start : field.stop].view(field.shape)
                named.restored().copy_(values if named.tensor.is_floating_point() else values.round())
            for field, named in self._copied:
                named.restored().copy_(torch.from_numpy(from_words(field, buffers)))

    def buffers(self) -> np.ndarray | None:
        """Return a copy of the buffers, float64; None if the model has none.

        Raises:
            ConfigError: the module has put something of another shape or dtype in the place of a buffer.
        """
        if not self.layout.buffers_size:
            return None
        values = torch.empty(self.layout.buffers_size, dtype=torch.float64)
        for field, named in self._buffers:
            values[field.start : field.stop].view(field.shape).copy_(named.current())
        out = np.asarray(values.numpy())
        for field, named in self._copied:
            out[field.start : field.stop] = to_words(field, named.current().cpu())
        return out

    def zero_gradient(self) -> None:
        """Set the gradients to zero, after code that may have put others in their place."""
        for named, slope in self._trained:
            if named.tensor.grad is not slope:
                named.tensor.grad = slope
        self.gradient.zero_()

    def clear_gradients(self) -> None:
        """Leave no gradient, as in a new module."""
        for named, _ in self._trained:
            named.tensor.grad = None

    def check_trained(self) -> None:
        """Raise ConfigError if a parameter is another tensor, or a trained one in other memory, than at the start."""
        moved = (named.name for named, _ in self._trained if not named.is_in_place())
        if name := self._state.replaced_parameter() or next(moved, None):
            raise ConfigError(f"the training replaced parameter {name}: it must change it in place")

    def check_frozen(self) -> None:
        """Raise ConfigError if a parameter that requires no gradient has other values than at the start."""
        for named, checksum in self._frozen:
            if named.checksum() != checksum:
                if named.tensor.requires_grad:
                    raise ConfigError(f"parameter {named.name} is constant by roles=, but the training has changed it")
                raise ConfigError(
                    f"parameter {named.name} requires no gradient, but has changed: the server would not get it; "
                    "register it as a buffer, which the server averages, or let it require gradients"
                )

    @contextmanager
    def evaluated(self) -> Iterator[torch.nn.Module]:
        """Yield the module in evaluation mode, without gradients."""
        for part, _ in self._modes:
            part.training = False
        try:
            with torch.no_grad():
                yield self.module
        finally:
            for part, training in self._modes:
                part.training = training


def _check_arrays(module: torch.nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} is not initialised: run one forward first, in a function that makes the model")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
            kind = f"{parameter.dtype} on {parameter.device.type}"
            raise ConfigError(f"parameter {name} is {kind}, must be float32 on the CPU")
    for name, tensor in module.named_buffers():
        if tensor.device.type != "cpu":
            raise ConfigError(f"buffer {name} is on {tensor.device.type}, must be on the CPU")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"{tensor.layout}"
            raise ConfigError(f"buffer {name} is {kind}, must be dense: if it is constant, make it a plain attribute")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.contiguous()  # made by expand: its elements share memory, and could not be written


def tree_of(flat: FlatModel) -> tuple[dict[str, Any], Layout]:
    """Return the model's parameters and buffers by name, and their layout, for a server of a model with buffers."""
    layout = flat.layout
    tensors = dict(flat.module.named_parameters()) | dict(flat.module.named_buffers())
    fields = (*layout.fields, *layout.buffers, *layout.copied)
    arrays = {field.name: tensors[field.name].detach().cpu().clone() for field in fields}
    roles: dict[str, Role] = {escape(field.name): field.role for field in (*layout.buffers, *layout.copied)}
    of_arrays = Layout.of(arrays, roles={**roles, "*": "trained"})
    return arrays, replace(of_arrays, unknown_statistics=layout.unknown_statistics)
