"""Trees of arrays, any nesting of modules, mappings and sequences: their parts, their rebuilding, and their JSON."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from afflux.arrays.fields import Role
from afflux.arrays.interop import is_torch, label, memory_of
from afflux.arrays.libraries import children, is_keras, is_static, keras_variables, variable_of_flax
from afflux.arrays.modules import (
    QUANTISED,
    adapter_names,
    further,
    has_attribute,
    is_extra_state,
    is_module,
    is_read_by_state_dict,
    members,
)
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief

_GONE = object()


@dataclass(frozen=True, slots=True)
class Branch:
    """One level of nesting; the keys of a list or tuple are its indices."""

    kind: Literal["dict", "list", "tuple"]
    keys: tuple[str | int, ...]
    nodes: tuple["Node", ...]


#: A branch, an array's full name, or None where the tree itself holds None.
Node = Branch | str | None


class Walk:
    """The parts of a tree: its arrays by dotted name, in the order of the tree, and its nesting.

    With `wanted`, values under other names are left out, even if they are not arrays. A `whole` tree also has further
    names of its arrays, and the extra states of torch modules.
    """

    def __init__(self, tree: Any, wanted: Container[str] | None = None, *, whole: bool = False) -> None:
        self._wanted, self._whole = wanted, whole
        self.leaves: dict[str, Any] = {}
        self.kinds: dict[str, Role] = {}  # roles that libraries declare
        self.declared: dict[str, bool] = {}  # whether a torch module declares it as a buffer
        self.aliases: dict[str, str] = {}  # further names of arrays, and the first name of each
        self.synonyms: dict[str, str] = {}  # names that only trees which are passed later use, and those of the arrays
        #: First names by the memory of torch tensors, and by the id of variables, which stand beside them.
        self._first: dict[Any, tuple[str, object]] = {}
        self.node = self._visit(tree, ())

    def _visit(self, tree: Any, path: tuple[str, ...]) -> Node:
        if tree is None and path:
            return None  # as in JAX: no array
        if path and is_extra_state(path[-1]):
            return self._leaf(tree, path)
        if is_keras(tree):
            values = {name: variable.value for name, variable in keras_variables(tree).items()}
            for name, value in values.items():
                if is_torch(value) and not value.is_floating_point():  # a counter, which Keras makes a Parameter
                    values[name] = value.detach()
            return self._branch("dict", values.items(), path)
        if is_module(tree):
            return self._module(tree, path)
        if (variable := variable_of_flax(tree)) is not None:
            if variable[1] is not None:
                self.kinds[".".join(path)] = variable[1]
            return self._leaf(variable[0], path, tree)
        if has_attribute(tree, "shape"):
            return self._leaf(tree, path)
        if isinstance(tree, Mapping):
            return self._branch("dict", tree.items(), path)
        if isinstance(tree, Sequence) and not isinstance(tree, str | bytes | bytearray):
            return self._branch("tuple" if isinstance(tree, tuple) else "list", enumerate(tree), path)
        nodes = children(tree)
        if nodes is not None:
            return self._branch("dict", [(name, child) for name, child in nodes if not is_static(child)], path)
        if self._wanted is not None and ".".join(path) not in self._wanted:
            return None
        raise AffluxError(
            f"[layout] {label('.'.join(path))} is a {type(tree).__name__}, expected an array, a torch module, or a "
            f"mapping or sequence of these{QUANTISED if '_packed_params' in '.'.join(path) else ''}"
        )

    def _branch(
        self, kind: Literal["dict", "list", "tuple"], items: Iterable[tuple[Any, Any]], path: tuple[str, ...]
    ) -> Branch:
        keys, nodes = [], []
        for key, child in items:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise AffluxError(
                    f"[layout] {label('.'.join(path))} has the key {brief(key)}, expected a str or an int"
                )
            name = str.__str__(key) if isinstance(key, str) else str(int(key))
            keys.append(key)
            nodes.append(self._visit(child, (*path, name)))
        return Branch(kind, tuple(keys), tuple(nodes))

    def _module(self, module: Any, path: tuple[str, ...]) -> Branch:
        parameters, buffers = members(module)
        arrays = parameters | buffers
        if self._whole:
            for name, first in adapter_names(module).items():
                self.synonyms[".".join((*path, name))] = ".".join((*path, first))
            aliases, states = further(module)
            arrays |= {name: arrays[first] for name, first in aliases.items()} | states
            for name, first in aliases.items():
                self.aliases[".".join((*path, name))] = ".".join((*path, first))
        for name in () if is_read_by_state_dict(module) else parameters | buffers:
            self.declared[".".join((*path, name))] = name in buffers
        return self._branch("dict", arrays.items(), path)

    def _leaf(self, array: Any, path: tuple[str, ...], variable: object = None) -> str | None:
        """Add an array; `variable` is the object that holds it, if there is one."""
        name = ".".join(path)
        if self._wanted is not None and name not in self._wanted:
            return None
        if name in self.leaves:
            raise AffluxError(f"[layout] two arrays are called {label(name)}")
        self.leaves[name] = array
        memory = (memory_of(array) if is_torch(array) else None) if variable is None else id(variable)
        if name not in self.aliases and memory is not None:
            first, _ = self._first.setdefault(memory, (name, variable))  # a variable that lives keeps its id
            if first is not name:
                self.aliases[name] = first
        return name


def pruned(node: Node, names: Container[Any]) -> Node:
    """Return the tree of the arrays `names`. In the place of others, a dict has no key and a sequence holds None."""
    if not isinstance(node, Branch):
        return node if node in names else None
    nodes = [pruned(child, names) for child in node.nodes]
    pairs = list(zip(node.keys, nodes, strict=True))
    if node.kind == "dict":
        pairs = [(key, child) for key, child in pairs if child is not None]
    if not any(child is not None for _, child in pairs):
        return None
    return Branch(node.kind, tuple(key for key, _ in pairs), tuple(child for _, child in pairs))


def build(node: Node, arrays: Mapping[str, Any]) -> Any:
    """Return a tree of this nesting with `arrays`. For a missing name, a dict has no key and a sequence holds None."""
    tree = _build(node, arrays)
    return {} if tree is _GONE else tree


def _build(node: Node, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(node, Branch):
        return None if node is None else arrays.get(node, _GONE)
    children = [arrays.get(child, _GONE) if type(child) is str else _build(child, arrays) for child in node.nodes]
    if children and all(child is _GONE for child in children):
        return _GONE
    if node.kind == "dict":
        return {key: child for key, child in zip(node.keys, children, strict=True) if child is not _GONE}
    filled = [None if child is _GONE else child for child in children]
    return filled if node.kind == "list" else tuple(filled)


def to_json(node: Node) -> Any:
    """Return a node as plain lists and dicts."""
    if not isinstance(node, Branch):
        return node
    nodes = [to_json(child) for child in node.nodes]
    return {node.kind: [list(pair) for pair in zip(node.keys, nodes, strict=True)] if node.kind == "dict" else nodes}


def from_json(data: Any) -> Node:
    """Return the node that `to_json` has converted.

    Raises:
        ValueError, TypeError, AttributeError: `data` does not come from `to_json`.
    """
    if data is None or isinstance(data, str):
        return data
    ((kind, children),) = data.items()
    if kind not in ("dict", "list", "tuple"):
        raise ValueError(f"unknown kind of branch {kind!r}")
    pairs = list(children) if kind == "dict" else list(enumerate(children))
    if not all(isinstance(key, str | int) and not isinstance(key, bool) for key, _ in pairs):
        raise ValueError("a key is neither a str nor an int")
    return Branch(kind, tuple(key for key, _ in pairs), tuple(from_json(child) for _, child in pairs))


def names(node: Node) -> list[str]:
    """Return the arrays' names in order."""
    if isinstance(node, Branch):
        return [name for child in node.nodes for name in names(child)]
    return [] if node is None else [node]


def comparable(layout: Any) -> Any:
    """Return the JSON of a layout without the names that depend on the model's source: aliases and local arrays."""
    if not isinstance(layout, Mapping):
        return layout
    others = [entry for entry in layout.get("others", []) if entry[3] != "local"]
    names = {entry[0] for entry in (*layout["fields"], *layout["buffers"], *others)}
    try:
        nesting = to_json(pruned(from_json(layout["nesting"]), names))
    except (AttributeError, TypeError, ValueError) as error:
        raise AffluxError(f"[layout] the data describes no layout: {brief(error)}") from None
    return {**{name: layout[name] for name in ("fields", "buffers", "partial")}, "others": others, "nesting": nesting}
