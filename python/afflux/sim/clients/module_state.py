"""The state of a torch module by name: its parts, their arrays and plain attributes, as they were at the start."""

from operator import is_
from typing import Any

import torch

from afflux.sim.errors import ConfigError


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


class _Names:
    """A dict of a module, and its content at the start."""

    __slots__ = ("_content", "_names", "_values")

    def __init__(self, content: dict[str, Any]) -> None:
        self._content, self._names, self._values = content, list(content), list(content.values())

    def differ(self) -> bool:
        """Return whether a name, its place or its object is another one. Objects are compared by identity."""
        content, values = self._content, self._values
        if not content:
            return bool(values)
        return (
            len(content) != len(values) or not all(map(is_, content.values(), values)) or list(content) != self._names
        )

    def restore(self) -> None:
        self._content.clear()
        self._content.update(zip(self._names, self._values, strict=True))


class ModuleState:
    """The submodules, arrays and plain attributes of a module, by name.

    `restore` sets the names back, so that only values of arrays pass from one training to the next. It does not undo
    what is changed in place in the values: in an array, or in a list or dict.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Record the state of the module and its submodules."""
        self._module = module
        self.parameters: dict[str, NamedTensor] = {}  #: by their first dotted names
        self.buffers: dict[str, NamedTensor] = {}
        self._dicts: list[_Names] = []
        self._parameter_dicts: list[_Names] = []  # those in which parameters are found
        self._scripted: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        seen: dict[int, NamedTensor] = {}
        for prefix, part in module.named_modules():
            scripted = isinstance(part, torch.jit.ScriptModule)  # its members are not in dicts
            if not scripted:
                own = part.__dict__
                parameters, buffers, modules = (_Names(own[name]) for name in ("_parameters", "_buffers", "_modules"))
                self._dicts += [_Names(own), parameters, buffers, modules]
                self._parameter_dicts += [parameters, modules]
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
        """Set every name back to the object that it had at the start."""
        for names in self._dicts:
            if names.differ():
                names.restore()
        for module, name, tensor in self._scripted:
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor)
