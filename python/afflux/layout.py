"""A model's many arrays as one flat float32 vector, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.errors import AffluxError

Float32 = npt.NDArray[np.float32]

#: A torch module (its parameters), a mapping of names to arrays, or a sequence of arrays.
Tree = Any


@dataclass(frozen=True, slots=True)
class Field:
    """Where one array lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and places of a model's arrays, in the model's own order, without gaps.

    >>> layout = Layout.of([np.ones((2, 2)), np.zeros(3)])
    >>> layout.flatten([np.ones((2, 2)), np.zeros(3)]).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """

    fields: tuple[Field, ...]
    is_mapping: bool  #: views come as a dict by name, not as a list

    @classmethod
    def of(cls, tree: Tree) -> "Layout":
        """The layout of a torch module's parameters, of a mapping, or of a sequence of arrays."""
        fields = []
        start = 0
        for name, array in _items(tree):
            fields.append(Field(name, tuple(int(n) for n in array.shape), start))
            start = fields[-1].stop
        return cls(tuple(fields), not _is_sequence(tree))

    @property
    def size(self) -> int:
        """Elements of the flat vector, d."""
        return self.fields[-1].stop if self.fields else 0

    def flatten(self, tree: Tree, out: Float32 | None = None) -> Float32:
        """Copies the arrays of `tree` into one flat vector (`out` if given), converting to float32.

        Raises:
            AffluxError: other names or shapes than the layout's, dtypes that are no real numbers, or a wrong
                `out`; nothing is written.

        Cost: one copy.
        """
        items = _items(tree)
        names = [name for name, _ in items]
        expected = [field.name for field in self.fields]
        if names != expected:
            odd = sorted(set(names) ^ set(expected)) or names
            raise AffluxError(f"[flatten] the arrays' names or order differ from the layout's: {', '.join(odd)}")
        for field, (name, array) in zip(self.fields, items, strict=True):
            if tuple(array.shape) != field.shape:
                raise AffluxError(f"[flatten] {name} has shape {tuple(array.shape)}, the layout says {field.shape}")
        if out is None:
            out = np.empty(self.size, np.float32)
        self._check(out, "out")
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise AffluxError("[flatten] out is strided or read-only")
        arrays = [_as_floats(name, array) for name, array in items]
        for field, array in zip(self.fields, arrays, strict=True):
            np.copyto(out[field.start : field.stop].reshape(field.shape), array)
        return out

    def views(self, flat: Float32) -> dict[str, Float32] | list[Float32]:
        """The arrays as views into `flat`, in a dict by name or, for sequences, in a list. Copies nothing."""
        self._check(flat, "flat")
        arrays = {field.name: flat[field.start : field.stop].reshape(field.shape) for field in self.fields}
        return arrays if self.is_mapping else list(arrays.values())

    def load(self, module: Any, flat: Float32) -> None:
        """Copies `flat` into a torch module's parameters, in place.

        Raises:
            AffluxError: other names or shapes than the layout's; nothing is written.

        Cost: one copy.
        """
        import torch

        self._check(flat, "flat")
        parameters = dict(module.named_parameters())
        theirs = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
        if theirs != [(field.name, field.shape) for field in self.fields]:
            raise AffluxError("[load] the module's parameters differ from the layout's in name or shape")
        for field in self.fields:
            source = flat[field.start : field.stop].reshape(field.shape)
            parameter = parameters[field.name].detach()
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64):
                np.copyto(parameter.numpy(), source)
            else:
                parameter.copy_(torch.tensor(source))

    def _check(self, flat: Float32, name: str) -> None:
        if flat.shape != (self.size,) or flat.dtype != np.float32:
            raise AffluxError(
                f"[layout] {name} is {flat.dtype} of shape {flat.shape}, expected float32 of shape ({self.size},)"
            )


def _is_sequence(tree: Tree) -> bool:
    return isinstance(tree, Sequence)


def _items(tree: Tree) -> list[tuple[str, Any]]:
    """Names and arrays of a tree. A torch module is known by its method, so that torch stays optional."""
    if hasattr(tree, "named_parameters"):
        items = list(tree.named_parameters())
    elif isinstance(tree, Mapping):
        items = list(tree.items())
    elif _is_sequence(tree):
        items = [(str(i), array) for i, array in enumerate(tree)]
    else:
        raise AffluxError(f"[layout] a {type(tree).__name__} is no torch module, mapping or sequence of arrays")
    for name, array in items:
        if not hasattr(array, "shape"):
            raise AffluxError(f"[layout] {name} is a {type(array).__name__}, expected an array")
    return items


def _as_floats(name: str, array: Any) -> npt.NDArray[Any]:
    """A view as a real NumPy array, without a torch tensor's gradient; bfloat16, which NumPy lacks, is widened."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = (array.float() if str(array.dtype) == "torch.bfloat16" else array).numpy()
    values: npt.NDArray[Any] = np.asarray(array)
    if not np.can_cast(values.dtype, np.float32, "same_kind"):
        raise AffluxError(f"[flatten] {name} is {values.dtype}, which is no real number")
    return values
