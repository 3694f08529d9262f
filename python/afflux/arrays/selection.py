"""The selection of a layout's arrays: the trainable ones, those of given names, or those that a function chooses."""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from afflux.arrays.interop import Array, is_parameter, is_torch
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief, reads

Select = Literal["trainable"] | Collection[str] | Callable[[str, Array], bool]


@reads("[layout] select")
def selected(arrays: Mapping[str, Array], buffers: Collection[str], select: Select) -> frozenset[str]:
    """Return the names of the arrays that `select` chooses, see `Layout.of`.

    Args:
        arrays: all arrays of the model by dotted name.
        buffers: the names of its buffers.
        select: the choice.

    Raises:
        AffluxError: `select` has another type, holds an unknown name, or selects no parameter.
    """
    trainable = as_text(select) == "trainable"
    if trainable:
        names = _trainable(arrays, buffers)
    elif callable(select):
        names = frozenset(name for name, array in arrays.items() if select(name, array))
    elif isinstance(select, Collection) and not isinstance(select, str | bytes):
        for name in select:
            if as_text(name) not in arrays:
                raise AffluxError(
                    f"[layout] select has {brief(name)}, which the tree does not{close_names(name, arrays)}"
                )
        names = frozenset(map(str.__str__, select))
    else:
        raise AffluxError(f"[layout] select is {brief(select)}, expected 'trainable', names or a function")
    if names <= frozenset(buffers):
        hint = ": none requires grad (in a state_dict none does: give the module)" if trainable else ""
        raise AffluxError(f"[layout] select chooses no parameter{hint}")
    return names


def _trainable(arrays: Mapping[str, Array], buffers: Collection[str]) -> frozenset[str]:
    """Return torch's tensors that require grad, all arrays of other libraries, and the buffers.

    Without the buffers of modules all of whose own parameters are frozen.
    """
    trained = {name for name, array in arrays.items() if not is_torch(array) or array.requires_grad}
    buffers = {name for name in buffers if name in trained or not is_parameter(arrays[name])}  # others are integers
    frozen = {_owner(name) for name in arrays.keys() - buffers} - {_owner(name) for name in trained - buffers}
    return frozenset(trained | {name for name in buffers if _owner(name) not in frozen})


def _owner(name: str) -> str:
    """Return the name of the module that holds the array."""
    return name.rpartition(".")[0]


def close_names(name: Any, arrays: Collection[str]) -> str:
    """Return a hint with the known names that are most similar to an unknown one."""
    close = get_close_matches(name, arrays, n=3) if isinstance(name, str) else []
    if not close and isinstance(name, str):
        close = [candidate for candidate in arrays if candidate.startswith(f"{name}.")][:3]
    return f"; did you mean {', '.join(close)}?" if close else ""
