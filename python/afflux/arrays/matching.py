"""The search for a layout's arrays, by name, in the trees that callers pass."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from afflux._engine import unready
from afflux.arrays import interop, trees
from afflux.arrays.interop import Array
from afflux.arrays.modules import is_module, members
from afflux.ops.errors import AffluxError
from afflux.ops.validation import reads


class Found(NamedTuple):
    """Arrays of a tree, in a layout's order. The engine checks their types and shapes in the pass in which it reads
    them. If the engine refuses them, `Matcher.ready` converts them, or raises an error with the reason.
    """

    arrays: list[Array]
    shapes: tuple[tuple[int, ...], ...]
    tree: Any


class Matcher:
    """A finder of given arrays of a layout, in their order.

    A module, or a flat dict or list of arrays, is not walked: its arrays are looked up by name or by index. No state is
    kept from one tree to the next.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        known: Sequence[str],
        tied: Sequence[str],
        *,
        partial: bool,
    ) -> None:
        """Prepare to find the arrays `names`, which are among the `known` ones of the layout. A tree may also hold the
        names in `tied` and, if `partial`, any other names.
        """
        self.names = tuple(names)
        self._shapes = tuple(shapes)
        self._known = frozenset((*known, *tied))
        self._partial = partial
        places = [int(name) for name in names if name.isdecimal()]
        in_list = [str(place) for place in places] == list(names)
        self._places = places if in_list else []  # indices in a flat list
        whole = set(known) == {str(place) for place in range(len(known))}
        self._longest = len(known) if whole else 0  # length of a flat list without unknown arrays

    @reads("[layout] tree")
    def find(self, tree: Any) -> list[Array]:
        """Return the wanted arrays.

        Raises:
            AffluxError: the tree lacks a wanted array, holds an unknown array or an element that is not an array, or a
                wanted array has another shape.
        """
        arrays = self._found(tree)
        for name, array, shape in zip(self.names, arrays, self._shapes, strict=True):
            _check_shape(name, array, shape)
        return arrays

    def found(self, tree: Any) -> Found | list[Array]:
        """Return the wanted arrays: unchecked if `_quick` finds them, else the result of `ready`."""
        found = self._quick(tree)
        return self.ready(tree) if found is None else Found(found, self._shapes, tree)

    @reads("[layout] tree")
    def ready(self, tree: Any) -> list[Array]:
        """Return the wanted arrays as the engine reads them, see `interop.ready`.

        Raises:
            AffluxError: as `find`; an array has a wrong dtype, or no memory.
        """
        arrays = self._found(tree)
        others = unready(arrays, self._shapes)
        for index in others:
            _check_shape(self.names[index], arrays[index], self._shapes[index])
        for index in others:
            arrays[index] = interop.ready(self.names[index], arrays[index])
        return arrays

    def _found(self, tree: Any) -> list[Array]:
        found = self._quick(tree)
        return self._walked(tree) if found is None else found

    def _quick(self, tree: Any) -> list[Array] | None:
        """Return the wanted arrays of a module, or of a flat dict or list of NumPy's or torch's own arrays. Return None
        for any other tree, and if the tree lacks a wanted array or holds an unknown one.
        """
        kind = type(tree)
        # No other types: a defaultdict, for example, creates missing entries.
        if kind is dict or kind is OrderedDict:
            return self._looked_up(tree)
        if kind is list or kind is tuple:
            return self._listed(tree)
        if is_module(tree):
            parameters, buffers = members(tree)
            return self._looked_up(parameters | buffers)
        return None

    def _looked_up(self, tree: dict[Any, Any]) -> list[Array] | None:
        """Return the wanted arrays of a flat dict; None as in `_quick`."""
        if not interop.all_own(tree.values()):
            return None
        try:
            found = [tree[name] for name in self.names]
        except KeyError:
            return None
        return found if self._partial or len(tree) == len(found) or tree.keys() <= self._known else None

    def _listed(self, tree: Sequence[Any]) -> list[Array] | None:
        """Return the wanted arrays of a flat list; None as in `_quick`."""
        if not self._places or not interop.all_own(tree):
            return None
        if not self._partial and len(tree) > self._longest:
            return None
        try:
            return [tree[place] for place in self._places]
        except IndexError:
            return None

    def _walked(self, tree: Any) -> list[Array]:
        leaves = trees.Walk(tree, self._known if self._partial else None).leaves
        missing = [name for name in self.names if name not in leaves]
        unknown = sorted(leaves.keys() - self._known)
        others = f"the tree holds {listed(unknown)}, which the layout does not"
        if missing:
            hint = _unwrapped(unknown) if len(missing) == len(self.names) else ""
            raise AffluxError(f"[layout] the tree lacks {listed(missing)}{f'; {others}' if unknown else ''}{hint}")
        if unknown:
            raise AffluxError(f"[layout] {others}")
        return [leaves[name] for name in self.names]


def _unwrapped(unknown: Sequence[str]) -> str:
    """Return a hint for messages: the module to push in place of one that torch.compile or DataParallel has wrapped."""
    wrapper = unknown[0].partition(".")[0] if unknown else ""
    wrapped = wrapper in ("_orig_mod", "module") and all(name.startswith(f"{wrapper}.") for name in unknown)
    return f": give the module that is wrapped, its attribute {wrapper}" if wrapped else ""


def _check_shape(name: str, array: Array, expected: tuple[int, ...]) -> None:
    shape = tuple(array.shape)
    if shape != expected:
        raise AffluxError(f"[layout] {interop.label(name)} has shape {shape}, the layout has {expected}")


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for messages."""
    return ", ".join(map(interop.label, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
