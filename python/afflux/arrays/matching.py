"""The search for a layout's arrays, by name, in the trees that callers pass."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from afflux._engine import ArrayTable, all_own, unready
from afflux.arrays import interop, trees
from afflux.arrays.fields import Alias, Field, Places
from afflux.arrays.interop import Array
from afflux.arrays.libraries import is_keras
from afflux.arrays.modules import (
    QUANTISED,
    adapter_names,
    has_attribute,
    is_extra_state,
    is_module,
    is_quantised,
    members,
)
from afflux.ops.errors import AffluxError
from afflux.ops.validation import reads


class Matcher:
    """A finder of given arrays of a layout, in their order.

    A module, or a flat dict or list of arrays, is not walked: its arrays are looked up by name or by index. No state is
    kept from one tree to the next.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        all_names: Sequence[str],
        aliases: Sequence[Alias],
        *,
        partial: bool,
        in_order: bool = False,
    ) -> None:
        """Prepare to find the arrays of `fields`, whose names are among `all_names` of the layout. A tree may also
        hold the names of `aliases`, extra states of torch modules and, if `partial`, any other names. With `in_order` a
        flat list of exactly these arrays, known by their shapes, needs no names.
        """
        self.places = Places(fields)
        self._buffers = frozenset(field.name for field in self.places.fields if field.role != "trained")
        self.names = names = tuple(field.name for field in self.places.fields)
        self._shapes = self.places.shapes
        self._known = frozenset((*all_names, *(alias.name for alias in aliases)))
        index = {name: place for place, name in enumerate(names)}
        self._copies = [(alias, index[alias.of]) for alias in aliases if alias.of in index]
        self._partial = partial
        self._wanted = _Wanted(self._known) if partial else None
        places = [int(name) for name in names if name.isdecimal()]
        in_list = [str(place) for place in places] == [*names]
        self._may_be_bare = in_order and not (in_list and names)
        is_list = set(all_names) == {str(place) for place in range(len(all_names))}
        longest = len(all_names) if is_list else 0  # length of a flat list without unknown arrays
        allowed = None if partial else self._known
        self.table = ArrayTable(names, self._shapes, allowed, places if in_list else [], longest, in_order)

    def is_bare(self, tree: Any) -> bool:
        """Return whether a tree is a flat list of the wanted arrays alone, in their order, for a layout with names."""
        return self.table.is_bare(tree)

    def _named(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a tree by the layout's names: exact names, or else names without those of wrappers.

        Raises:
            AffluxError: two names are the same without the names of wrappers, or an array is a flat parameter of FSDP.
        """
        if all(name in leaves for name in self.names) and (self._partial or not self._unknown(leaves)):
            return leaves
        places = {name.partition(".")[0]: name for name in self._known}
        if leaves and len(places) == len(self._known) and all(name.isdecimal() and name in places for name in leaves):
            return {places[name]: array for name, array in leaves.items()}  # a list, for a layout of a Keras model
        flat = [name for name in leaves if name.rpartition(".")[2] in _FLAT]
        if flat:
            raise AffluxError(
                f"[layout] {flat[0]} is a flat parameter of FSDP: give the full state_dict, as "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict returns it with full_state_dict=True"
            )
        expected, actual = _unwrapped(self._known), _unwrapped(leaves)
        if all(expected.get(short) == [short] for short in actual) and all(names == [s] for s, names in actual.items()):
            return leaves  # no wrappers: errors are about the tree's own names
        renamed: dict[str, Any] = {}
        for short, names in actual.items():
            layout_names = expected.get(short, [])
            for group in (names, layout_names) if layout_names else ():
                if len(group) > 1:
                    raise AffluxError(f"[layout] {group[0]} and {group[1]} are both called {short} without wrappers")
            renamed[layout_names[0] if layout_names else names[0]] = leaves[names[0]]
        return renamed

    @reads("[layout] tree")
    def find(self, tree: Any, *, equal: bool = False) -> list[Array]:
        """Return the wanted arrays.

        Raises:
            AffluxError: the tree lacks a wanted array, holds an unknown array or an element that is not an array, or a
                wanted array has another shape; or `equal`, and a further copy of one in the tree has other bytes.
        """
        arrays, leaves = self.located(tree)
        for name, array, shape in zip(self.names, arrays, self._shapes, strict=True):
            interop.check_shape(name, array, shape)
        return self._equal(tree, arrays, leaves) if equal and self._copies else arrays

    @reads("[layout] tree")
    def ready(self, tree: Any, *, floats: bool = False, originals: list[Array] | None = None) -> list[Array]:
        """Return the wanted arrays as the engine reads them, see `interop.ready`. `originals` gets the tree's own.

        Raises:
            AffluxError: as `find` with `equal`; an array has a wrong dtype (with `floats` also that of integers or
                bools), or no memory.
        """
        arrays, leaves = self._quick(tree)
        if arrays is None:
            arrays, leaves = self._walked(tree)
        if originals is not None:
            originals += arrays
        unready_indices = unready(arrays, self._shapes)
        for index in unready_indices:
            interop.check_shape(self.names[index], arrays[index], self._shapes[index])
        for index in unready_indices:
            name = self.names[index]
            if floats and (kind := interop.kind_of(name, arrays[index])) not in interop.FLOATS:
                expected = "float32, float64, float16 or bfloat16"
                raise AffluxError(f"[layout] {interop.label(name)} is {kind}, expected {expected}")
            arrays[index] = interop.ready(name, arrays[index])
        return self._equal(tree, arrays, leaves) if self._copies else arrays

    @reads("[layout] tree")
    def located(self, tree: Any) -> tuple[list[Array], Mapping[str, Any] | None]:
        """Return the wanted arrays, of any shape; and all arrays by name, None for a flat list.

        Raises:
            AffluxError: the tree lacks a wanted array, holds an unknown array or an element that is not an array.
        """
        arrays, leaves = self._quick(tree)
        return self._walked(tree) if arrays is None else (arrays, leaves)

    def _quick(self, tree: Any) -> tuple[list[Array] | None, Mapping[str, Any] | None]:
        """Return the wanted arrays of a torch module, or of a flat dict or list of NumPy's or torch's own arrays; and
        all arrays by name, None for a list. The wanted arrays are None for any other tree, and if the tree lacks one or
        holds an unknown array.
        """
        if is_module(tree) and not is_keras(tree):
            parameters, buffers = members(tree)
            tree = parameters | buffers
        arrays, leaves = self.table.find(tree), tree if type(tree) in (dict, OrderedDict) else None
        if arrays is None and self._copies and leaves is not None:
            arrays = self.table.find(self._with_first_names(leaves))
        return arrays, leaves

    def _require_bare(self, tree: Sequence[Any]) -> None:
        """Raise AffluxError with the reason why a flat list is none of the wanted arrays."""
        if len(tree) != len(self.names):
            raise AffluxError(
                f"[layout] a list of {len(tree)} arrays without names, the layout has {len(self.names)} parameters: "
                "give these alone, in their order, or all arrays by name"
            )
        for i, (name, array, shape) in enumerate(zip(self.names, tree, self._shapes, strict=True)):
            if array is None or tuple(array.shape) != shape:
                problem = "is None" if array is None else f"has shape {tuple(array.shape)}"
                raise AffluxError(f"[layout] array {i} of the list {problem}, {interop.label(name)} has shape {shape}")

    def _with_first_names(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays by name; those that the tree has only under further names also by the layout's names."""
        return {**{alias.of: leaves[alias.name] for alias, _ in self._copies if alias.name in leaves}, **leaves}

    def _walked(self, tree: Any) -> tuple[list[Array], Mapping[str, Any]]:
        leaves = self._with_first_names(self._all(tree))
        missing = [name for name in self.names if name not in leaves]
        unknown = self._unknown(leaves)
        surplus = f"the tree holds {listed(unknown)}, which the layout does not"
        advice = self._advice(tree, missing, unknown) if missing or unknown else ""
        nameless = type(tree) in (list, tuple) and self._may_be_bare
        if missing and nameless and all(array is None or hasattr(array, "shape") for array in tree):
            self._require_bare(tree)
        if missing:
            raise AffluxError(f"[layout] the tree lacks {listed(missing)}{f'; {surplus}' if unknown else ''}{advice}")
        if unknown:
            raise AffluxError(f"[layout] {surplus}{advice}")
        return [leaves[name] for name in self.names], leaves

    def _advice(self, tree: Any, missing: Sequence[str], unknown: Sequence[str]) -> str:
        """Return, for messages, what to write in the place of a tree of a known kind."""
        text = ""
        if any(name.rpartition(".")[2] == "n_averaged" for name in (*missing, *unknown)):
            text = "; n_averaged is of an AveragedModel: give its .module"
        elif not isinstance(tree, Mapping) and has_attribute(tree, "opt_state") and has_attribute(tree, "params"):
            text = f"; give the .params of the {type(tree).__name__}"
        elif is_quantised(tree):
            text = QUANTISED
        buffers = [name for name in missing if name in self._buffers]
        return text + (f"; {with_local(buffers)} makes a server that needs none" if buffers else "")

    def _unknown(self, leaves: Iterable[str]) -> list[str]:
        return sorted(name for name in leaves if name not in self._known and not is_extra_state(name))

    def leaves(self, tree: Any) -> Mapping[str, Any]:
        """Return the arrays of a tree by the layout's names; it may hold others, too."""
        flat = type(tree) in (dict, OrderedDict) and all_own(tree.values())
        return self._named(tree) if flat and all(type(name) is str for name in tree) else self._all(tree)

    def _all(self, tree: Any) -> Mapping[str, Any]:
        walk = trees.Walk(tree, self._wanted)
        leaves = self._with_first_names(self._named(walk.leaves))
        if all(name in leaves for name in self.names) and not self._unknown(leaves):
            return leaves
        if is_module(tree) and (firsts := adapter_names(tree)):
            adapters = {name: leaves[first] for name in self.names if (first := firsts.get(name, name)) in leaves}
            if len(adapters) == len(self.names):
                return adapters  # of a PEFT model, for a layout of its adapters' state_dict
        if walk.declared:  # of torch modules, whose further names only a whole walk has
            walk = trees.Walk(tree, self._wanted, whole=True)
        return self._named(self._without_further_names(walk))

    def _without_further_names(self, walk: trees.Walk) -> dict[str, Any]:
        """Return the arrays of a tree by name; one that has several names only by those that the layout has, if any."""
        short = set(map(_short, self._known))
        names = {name for name in walk.leaves if _short(name) in short}
        firsts = {walk.aliases.get(name, name) for name in names}
        return {n: array for n, array in walk.leaves.items() if n in names or walk.aliases.get(n, n) not in firsts}

    @reads("[layout] tree")
    def _equal(self, tree: Any, arrays: list[Array], leaves: Mapping[str, Any] | None) -> list[Array]:
        """Return `arrays`, the wanted arrays of a tree. `leaves` has all of its arrays by name, if it is no flat list.

        Raises:
            AffluxError: a further copy of an array in the tree has other bytes.
        """
        leaves = self.leaves(tree) if leaves is None else leaves
        for alias, place in self._copies:
            copy, array = leaves.get(alias.name), leaves.get(self.names[place], arrays[place])
            if copy is None or _are_equal(alias.name, copy, array):
                continue
            name, first = interop.label(alias.name), interop.label(self.names[place])
            raise AffluxError(
                f"[layout] {name} differs from {first}, with which the server's model shares it: tie the two in "
                f'the client\'s model, push one of them, or train them apart (Layout.of(roles={{"{name}": "trained"}}))'
            )
        return arrays


#: Names that wrappers of torch add to a path: DataParallel, torch.compile, Opacus, FSDP1, activation checkpoints.
_WRAPPERS = frozenset({"module", "_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: Names of FSDP's flat parameters.
_FLAT = frozenset({"_flat_param", "flat_param"})


def _short(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Wanted:
    """The names that a partial layout has, with and without wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {*names, *map(_short, names)}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._names or _short(name) in self._names)


def _unwrapped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by their form without the names of wrappers."""
    full_names: dict[str, list[str]] = {}
    for name in names:
        full_names.setdefault(_short(name), []).append(name)
    return full_names


def _are_equal(name: str, copy: Array, array: Array) -> bool:
    """Return whether two arrays of one type and shape have the same bytes; arrays of one memory are not read."""
    if interop.is_same(copy, array):
        return True
    if tuple(copy.shape) != tuple(array.shape):
        return False
    first, second = interop.raw_bytes(name, copy), interop.raw_bytes(name, array)
    return first.size == second.size and (first.ctypes.data == second.ctypes.data or bool((first == second).all()))


def with_local(names: Sequence[str]) -> str:
    """Return the call that gives arrays the role local, for messages; for many by the last parts of their names."""
    patterns = names if len(names) <= 3 else dict.fromkeys(f"*{name.rpartition('.')[2]}" for name in names)
    roles = ", ".join(f'"{pattern}": "local"' for pattern in patterns)
    return f"Layout.of(model, roles={{{roles}}})"


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, for messages."""
    return ", ".join(map(interop.label, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
