"""A torch module whose trained parameters are one flat vector: a pull is one copy, a local step is one axpy."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from typing import Any

import numpy as np
import torch

from afflux.arrays.fields import Role, from_words, to_words
from afflux.arrays.layout import Layout
from afflux.arrays.roles import Roles
from afflux.sim.errors import ConfigError, note_on_errors
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.task import positional_parameters


@contextmanager
def reproducible_torch() -> Iterator[None]:
    """Run torch on one thread in the block, and restore torch's random state after the block.

    The bits of a sum may depend on the number of threads.
    """
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def make_module(model: torch.nn.Module | Callable[..., torch.nn.Module], seed: int) -> torch.nn.Module:
    """Return a new module with the initial params of `seed`: a copy, or what the function `model` returns."""
    if isinstance(model, torch.nn.Module):
        return copy.deepcopy(model)
    stream = random_stream(seed, StreamPurpose.MODEL)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(int(random_stream(seed, StreamPurpose.TORCH).integers(2**63)))
        with note_on_errors("while the model was made"):
            module = model(stream) if positional_parameters(model) else model()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model returns {type(module).__name__}, must return a torch.nn.Module")
    return module


class FlatModel:
    """A module on the CPU; its trained parameters and their gradients are views into two flat float32 vectors.

    Parameters that require no gradient do not change. Buffers of modules with trained parameters are part of the
    model; every `load` restores all other buffers.
    """

    def __init__(self, module: torch.nn.Module, roles: Roles | None = None) -> None:
        """Bind the module's parameters; raise ConfigError if one is not float32 on the CPU.

        `roles` are those of `Layout.of`. No array may be local, because one module serves all clients.
        """
        self.module = module
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
                kind = f"{parameter.dtype} on {parameter.device.type}"
                raise ConfigError(f"parameter {name} is {kind}, must be float32 on the CPU")
        self.layout = layout = Layout.of(module, "trainable", roles=roles)
        self.params = np.zeros(layout.size, dtype=np.float32)
        """(d,) the trained parameters, which the module reads and writes."""
        self.initial_params = np.asarray(layout.flatten(module))
        gradient = np.zeros(layout.size, dtype=np.float32)
        self.flat, self.gradient = torch.from_numpy(self.params), torch.from_numpy(gradient)
        self._bound = []
        for field in layout.fields:
            own, slope = (flat[field.start : field.stop].reshape(field.shape) for flat in (self.params, gradient))
            parameter = named[field.name]
            parameter.data, parameter.grad = torch.from_numpy(own), torch.from_numpy(slope)
            self._bound.append((field.name, parameter, parameter.data.data_ptr(), parameter.grad))
        tensors = dict(module.named_buffers())
        held = {**named, **tensors}
        for field in layout.locals:
            if field.name in held:
                raise ConfigError(f"roles: {field.name} is local, and a simulation keeps no arrays of single clients")
        tensors |= {field.name: named[field.name] for field in layout.constants if field.name in named}
        self._buffers = [(field, held[field.name].detach()) for field in layout.buffers]
        self._copied = [(field, held[field.name].detach()) for field in layout.copied]
        for field in (*layout.buffers, *layout.copied):
            tensors.pop(field.name, None)
        self._fixed = [(tensor, tensor.clone()) for tensor in tensors.values()]
        self._modes = [(part, part.training) for part in module.modules()]
        self.initial_buffers = self.buffers()
        np.copyto(self.params, self.initial_params)

    def load(self, params: np.ndarray, buffers: np.ndarray | None = None) -> None:
        """Set the parameters (d,) and buffers of the module."""
        np.copyto(self.params, params)
        for tensor, value in self._fixed:
            tensor.detach().copy_(value)
        if buffers is not None:
            values = torch.from_numpy(np.array(buffers))
            for field, tensor in self._buffers:
                own = values[field.start : field.stop].view(field.shape)
                tensor.copy_(own if tensor.is_floating_point() else own.round())
            for field, tensor in self._copied:
                tensor.copy_(torch.from_numpy(from_words(field, buffers)))

    def buffers(self) -> np.ndarray | None:
        """Return a copy of the buffers, float64; None if the model has none."""
        if not self.layout.buffers_size:
            return None
        values = torch.empty(self.layout.buffers_size, dtype=torch.float64)
        for field, tensor in self._buffers:
            values[field.start : field.stop].view(field.shape).copy_(tensor)
        out = np.asarray(values.numpy())
        for field, tensor in self._copied:
            out[field.start : field.stop] = to_words(field, tensor)
        return out

    def zero_gradient(self) -> None:
        """Set the gradients to zero, after code that may have put others in their place."""
        for _, parameter, _, slope in self._bound:
            if parameter.grad is not slope:
                parameter.grad = slope
        self.gradient.zero_()

    def check_bound(self) -> None:
        """Raise ConfigError if a training function has replaced a parameter by another tensor."""
        for name, parameter, place, _ in self._bound:
            if parameter.data_ptr() != place:
                raise ConfigError(f"the training function replaced parameter {name}: it must change it in place")

    @contextmanager
    def evaluated(self) -> Iterator[torch.nn.Module]:
        """Yield the module in evaluation mode, without gradients."""
        for part, _ in self._modes:
            part.training = False
        try:
            with torch.inference_mode():
                yield self.module
        finally:
            for part, training in self._modes:
                part.training = training


def tree_of(flat: FlatModel) -> tuple[dict[str, Any], Layout]:
    """Return the model's parameters and buffers by name, and their layout, for a server of a model with buffers."""
    layout = flat.layout
    tensors = dict(flat.module.named_parameters()) | dict(flat.module.named_buffers())
    fields = (*layout.fields, *layout.buffers, *layout.copied)
    arrays = {field.name: tensors[field.name].detach().numpy().copy() for field in fields}
    copied: dict[str, Role] = {escape(field.name): "copied" for field in layout.copied}
    return arrays, Layout.of(arrays, buffers=[field.name for field in layout.buffers], roles=copied)
