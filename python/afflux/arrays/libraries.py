"""Models of JAX's libraries and of Keras: their arrays by name, and the roles that the libraries themselves declare.

No library is imported here: an object of a library exists only if its library is imported.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from afflux.arrays.fields import Role
from afflux.arrays.modules import has_attribute, is_module

_PLAIN = frozenset({dict, list, tuple})


def is_keras(tree: object) -> bool:
    """Return whether the object is a model or a layer of Keras."""
    layer = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", None)
    return layer is not None and isinstance(tree, layer)


def keras_variables(model: Any) -> dict[str, Any]:
    """Return the variables of a Keras model by place and name, as "0.kernel", in the order of `get_weights`; then the
    others, such as seeds. Keras numbers the names of layers on, so that two models of one kind have other names.
    """
    variables = {id(variable): variable for variable in (*model.weights, *model.variables)}
    return {f"{place}.{variable.name}": variable for place, variable in enumerate(variables.values())}


def variable_of_flax(tree: object) -> tuple[Any, Role | None] | None:
    """Return the value of a Variable of flax.nnx, and the role that its type declares; None for other objects.

    A BatchStat is a statistic; states of random numbers, caches and intermediates are local; a Param has the role of
    its dtype; others are constants.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(tree, nnx.Variable):
        return None
    value = tree.get_value()
    if isinstance(tree, nnx.Param):
        return value, None
    if isinstance(tree, nnx.BatchStat):
        return value, "statistic"
    return value, "local" if isinstance(tree, (nnx.RngState, nnx.Cache, nnx.Intermediate)) else "constant"


def children(tree: object) -> list[tuple[str, Any]] | None:
    """Return the children of a node that is registered with JAX, by name; None for leaves and for plain containers."""
    jax = sys.modules.get("jax")
    if jax is None or tree is None or type(tree) in _PLAIN or has_attribute(tree, "shape"):
        return None
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if len(flat) == 1 and not flat[0][0]:
        return None  # a leaf
    return [(_name_of(path), child) for path, child in flat]


def is_static(node: object) -> bool:
    """Return whether a child of such a node is no part of the model: neither an array nor a container of arrays."""
    if node is None or has_attribute(node, "shape") or variable_of_flax(node) is not None:
        return False
    return not isinstance(node, Mapping | list | tuple) and children(node) is None


def _name_of(path: Iterable[Any]) -> str:
    """Return the dotted name of a path of JAX's keys."""
    parts = []
    for key in path:
        part = next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), key)
        parts.append(str(part))
    return ".".join(parts)


def rebuilder(tree: object, first_names: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Any] | None:
    """Return a function that makes an object like `tree` from arrays by name; None if `tree` is no node that is
    registered with JAX, or a plain container.

    The function keeps the leaves that are no arrays, such as functions, but no array. `first_names` are those of arrays
    with further names: a new module of flax.nnx has one Variable under all of them. A module that it has twice becomes
    two modules if one of its arrays is not among them.
    """
    jax = sys.modules.get("jax")
    if jax is None or type(tree) in _PLAIN or is_module(tree) or is_keras(tree):
        return None

    def leaves_of(tree: object) -> Any:
        return jax.tree_util.tree_flatten_with_path(tree, lambda node: variable_of_flax(node) is not None)

    flat, structure = leaves_of(tree)
    if len(flat) == 1 and not flat[0][0]:
        return None
    nnx = sys.modules.get("flax.nnx")
    if first_names and nnx is not None and isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)  # the graph knows which variables and modules the module has twice
        build_state = rebuilder(state, {})
        if build_state is not None and len(jax.tree.leaves(state)) + len(first_names) == len(flat):
            return lambda arrays: nnx.merge(graph, build_state(arrays))
    nodes = []
    for (path, _), (_, leaf) in zip(leaves_of(_unnamed(tree))[0], flat, strict=True):
        name, node = _name_of(path), jax.tree_util.tree_structure(leaf)
        nodes.append((first_names.get(name, name), node, leaf if is_static(leaf) else None))

    def build(arrays: Mapping[str, Any]) -> Any:
        leaves = {name: node.unflatten([arrays.get(name, static)]) for name, node, static in nodes}
        return structure.unflatten([leaves[name] for name, *_ in nodes])

    return build


def _unnamed(tree: Any) -> Any:
    """Return a tree with a tuple in the place of each named one, whose arrays a layout names by their places."""

    def is_named(node: object) -> bool:
        return isinstance(node, tuple) and hasattr(node, "_fields")

    tree_map = sys.modules["jax"].tree_util.tree_map
    return tree_map(lambda node: _unnamed(tuple(node)) if is_named(node) else node, tree, is_leaf=is_named)
