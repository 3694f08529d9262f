"""The state of a torch module by name: its parts, their arrays and plain attributes, as they were at the start."""

from collections import deque
from operator import is_
from typing import Any

import numpy as np
import torch

from afflux.ops.errors import ConfigError


class NamedTensor:
    """A parameter or buffer by name, and the places that hold it: modules, each with a name. Most have one place."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Make it without a place; `name` is its first dotted name."""
        self.name, self.tensor = name, tensor
        self.places: list[tuple[torch.nn.Module, str]] = []
        self._memory = tensor.detach()
        self._place = tensor.data_ptr()

    def move(self, memory: torch.Tensor) -> None:
        """Put the tensor into other memory, from now on."""
        self.tensor.data = self._memory = memory
        self._place = memory.data_ptr()

    def restored(self) -> torch.Tensor:
        """Return the tensor's elements, in its own memory; a tensor that was put into other memory gets it back."""
        if not self.is_in_place() or self.tensor.shape != self._memory.shape:
            self.tensor.data = self._memory
        return self._memory

    def is_in_place(self) -> bool:
        """Return whether the tensor is in the memory that it had at the start."""
        return self.tensor.data_ptr() == self._place

    def current(self) -> torch.Tensor:
        """Return the tensor that has this name now.

        Raises:
            ConfigError: it has another shape or dtype than at the start, or the places hold different values.
        """
        tensors: list[torch.Tensor] = []
        for module, name in self.places:
            tensor = getattr(module, name, None)
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"buffer {self.name} is a {type(tensor).__name__} after training, must be a tensor")
            if (tensor.shape, tensor.dtype) != (self._memory.shape, self._memory.dtype):
                then, now = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (self._memory, tensor))
                raise ConfigError(
                    f"buffer {self.name} was {then} before training, and is {now} after it: the server cannot average "
                    "it; register what grows with persistent=False, so that each training begins with its first value"
                )
            tensors.append(tensor)
            if tensor is not tensors[0] and not torch.equal(tensor, tensors[0]):
                raise ConfigError(
                    f"buffer {self.name} has other values after training in another module that shares it"
                )
        return tensors[0].detach()

    def checksum(self) -> int:
        """Return the sum of the elements' bits, which reads the tensor once."""
        content = self.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return int((content.view(torch.int32) if content.numel() % 4 == 0 else content).sum(dtype=torch.int64))


class _Content:
    """A dict, list, deque or set that a module holds, and its content at the start."""

    __slots__ = ("_content", "_names", "_values")

    def __init__(self, content: Any) -> None:
        self._content, self._names = content, list(content)
        self._values = list(content.values()) if isinstance(content, dict) else self._names

    def differ(self) -> bool:
        """Return whether an object, its name or its place is another one. Objects are compared by identity.

        The order of a set matters, which is that of the start if nothing has changed.
        """
        content, values = self._content, self._values
        if len(content) != len(values) or not content:
            return len(content) != len(values)
        if not isinstance(content, dict):
            return not all(map(is_, content, values))
        return not all(map(is_, content.values(), values)) or list(content) != self._names

    def restore(self) -> None:
        content = self._content
        content.clear()
        if isinstance(content, dict):
            content.update(zip(self._names, self._values, strict=True))
        else:
            (content.update if isinstance(content, set) else content.extend)(self._values)


class ModuleState:
    """The submodules, arrays and plain attributes of a module, by name.

    `restore` sets back every name, the content of lists, dicts and sets, and the elements of arrays that are neither
    parameters nor buffers, so that only values of these pass from one training to the next. It does not follow objects
    of other classes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Record the state of the module and its submodules."""
        self._module = module
        self.parameters: dict[str, NamedTensor] = {}  #: by their first dotted names
        self.buffers: dict[str, NamedTensor] = {}
        self._contents: list[_Content] = []
        self._empty: list[Any] = []  # lists, dicts and sets without content
        self._plain: list[tuple[NamedTensor | np.ndarray, Any]] = []  # other arrays, and their first elements
        self._parameter_dicts: list[_Content] = []  # those in which parameters are found
        self._scripted: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        seen: dict[int, NamedTensor] = {}
        for prefix, part in module.named_modules():
            scripted = isinstance(part, torch.jit.ScriptModule)  # its members are not in dicts
            if not scripted:
                self._parameter_dicts += [_Content(part.__dict__[name]) for name in ("_parameters", "_modules")]
            for tensors, members in (
                (self.parameters, part.named_parameters(recurse=False, remove_duplicate=False)),
                (self.buffers, part.named_buffers(recurse=False, remove_duplicate=False)),
            ):
                for name, tensor in members:
                    dotted = f"{prefix}.{name}" if prefix else name
                    if id(tensor) not in seen:
                        tensors[dotted] = seen[id(tensor)] = NamedTensor(dotted, tensor)
                    seen[id(tensor)].places.append((part, name))
                    if scripted:
                        self._scripted.append((part, name, tensor))
        self._follow(module, set(seen))

    def _follow(self, value: Any, seen: set[int]) -> None:
        """Record what can be changed in place in `value`: a module, list, dict, set, tuple or array.

        `seen` are the ids of the objects that are recorded already.
        """
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if _is_writable(value):
                self._plain.append((NamedTensor("", value), value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._plain.append((value, value.copy()))
        elif isinstance(value, torch.nn.Module):
            if not isinstance(value, torch.jit.ScriptModule):
                self._follow(value.__dict__, seen)
        elif isinstance(value, dict | list | deque | set | tuple):
            if not isinstance(value, tuple) and not value:
                self._empty.append(value)
            elif not isinstance(value, tuple):
                self._contents.append(_Content(value))
            for each in value.values() if isinstance(value, dict) else value:
                self._follow(each, seen)

    def replaced_parameter(self) -> str | None:
        """Return the name of a parameter that has come, gone or been replaced since the start; None: there is none."""
        for members in self._parameter_dicts:
            if members.differ():
                break
        else:
            return None
        now = dict(self._module.named_parameters())
        names = [name for name, named in self.parameters.items() if now.get(name) is not named.tensor]
        return next(iter([*names, *(name for name in now if name not in self.parameters)]), None)

    def restore(self) -> None:
        """Set every name back to the object that it had at the start, and what the objects hold."""
        if any(self._empty):
            for content in self._empty:
                content.clear()
        for content in self._contents:
            if content.differ():
                content.restore()
        for array, first in self._plain:
            if isinstance(array, NamedTensor):
                array.restored().copy_(first)
            else:
                array[...] = first
        for module, name, tensor in self._scripted:
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has elements of its own, into which others can be copied."""
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_inference())
        and all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    )
