"""The role of each array of a model: as the caller declares it by patterns, else by its module, its name and dtype."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from logging import getLogger
from math import prod
from typing import Any, cast

import numpy as np

from afflux.arrays.fields import ROLES, Role
from afflux.arrays.interop import FLOATS, REAL, Array, is_parameter, is_torch, kind_of, label, on_host, type_of, widened
from afflux.arrays.modules import is_extra_state
from afflux.arrays.selection import close_names
from afflux.arrays.trees import Branch, Walk
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_text, brief, one_of

_log = getLogger("afflux")

#: Roles by patterns of names: "bn.*" is all names that begin with "bn.", see `fnmatch`. The first match counts.
Roles = Mapping[str, Role]

#: The names of statistics in normalisation layers: torch's, and Keras'.
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance"})
#: Words of the names of arrays, and of what holds them, that each client has for itself.
_OWN_WORDS: dict[str, Role] = dict.fromkeys(("queue", "queues", "rng", "rngs", "prng"), "local")
#: Roles by a word of the array's name: the mean of such arrays has no meaning.
_ROLES_OF_WORDS: dict[str, Role] = {
    **_OWN_WORDS,
    **dict.fromkeys(("perm", "perms", "permutation", "permutations", "rotation", "rotations"), "constant"),
}
#: The same of buffers, and of other arrays that are no floats: a layer of attention has trained keys.
_ROLES_OF_BUFFERS: dict[str, Role] = {**_ROLES_OF_WORDS, **dict.fromkeys(("key", "keys"), "local")}
#: Collections of flax.linen that each client has for itself.
_OWN_COLLECTIONS = frozenset({"cache", "intermediates"})
#: The largest magnitude of an integer up to which float64 holds all integers.
_EXACT = 2**53


def roles_of(walk: Walk, roles: Roles | None = None) -> dict[str, Role]:
    """Return the role of each array of a tree by name, before any value is read; see `Layout.of`.

    Raises:
        AffluxError: an unknown role, or a pattern that matches no name.
    """
    patterns = _checked(roles, walk)
    role_of: dict[str, Role] = {}
    for name, array in walk.leaves.items():
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if pattern is not None and patterns[pattern] == "alias" and name not in walk.aliases:
            raise AffluxError(f"[layout] roles: {label(name)} shares its memory with no array before it: no alias")
        role_of[name] = _default(walk, name, array) if pattern is None else patterns[pattern]
    return role_of


def require_averages(
    arrays: Mapping[str, Array], roles: dict[str, Role], declared: Collection[str], most: float
) -> None:
    """Make constants of those statistics that are not `declared` so, have no name of a known statistic, and have values
    that cannot be averaged.

    Args:
        arrays: the arrays of the layout by name.
        roles: changed.
        declared: the names of arrays whose role the caller has declared.
        most: the largest magnitude of a value.
    """
    for name, array in arrays.items():
        is_declared = name in declared or is_known_statistic(name)
        if roles[name] == "statistic" and not is_declared and not can_be_averaged(name, array, most):
            roles[name] = "constant"


def is_known_statistic(name: str) -> bool:
    """Return whether an array has the name of a statistic of torch or Keras, whose values need not be looked at."""
    return name.rpartition(".")[2] in STATISTICS


def can_be_averaged(name: str, array: Array, most: float) -> bool:
    """Return whether float64 holds all values of the array, and none is beyond `most`."""
    kind = type_of(name, array)
    if kind not in REAL:
        return False
    kind_of(name, array)  # raises for an array without memory
    if kind == "bool":
        return True
    values = on_host(array)
    if not values.size:
        return True
    if kind in FLOATS:
        if kind == "bfloat16":
            values = widened(values.view(np.uint16))
        return bool(np.abs(values).max() <= most)  # False for NaN
    low, high = int(values.min()), int(values.max())
    return max(-low, high) <= min(_EXACT, most)


def declared_names(names: Collection[str], roles: Roles | None) -> set[str]:
    """Return the names of the arrays whose role the caller has declared."""
    patterns = roles or {}
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def unknown_statistics(arrays: Collection[str], roles: Mapping[str, Role], declared: Collection[str]) -> list[str]:
    """Return the names of statistics that are not `declared`, and are not the names of known statistics."""
    names = [name for name in arrays if roles[name] == "statistic" and name not in declared]
    return [name for name in names if not _is_mean(name.split("."))]


def warn_of_means(names: Collection[str]) -> None:
    """Log a warning, in one line, about statistics of unknown names, if there are any."""
    if names:
        line = ", ".join(f'"{name}": "statistic"' for name in names)
        _log.warning(
            "averaged as statistics: %s; Layout.of(model, roles={%s}) says so without this warning; for arrays without "
            'a mean write "local", "constant" or "copied"',
            ", ".join(names),
            line,
        )


def _checked(roles: Any, walk: Walk) -> dict[str, Role]:
    """Return the patterns of `roles`, checked against the names of the tree."""
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise AffluxError(f"[layout] roles is {brief(roles)}, must be a dict of roles by patterns of names")
    checked: dict[str, Role] = {}
    for pattern, role in roles.items():
        text = as_text(pattern)
        if text is None or not any(fnmatchcase(name, text) for name in walk.leaves):
            raise AffluxError(
                f"[layout] roles has {brief(pattern)}, which matches no array{close_names(pattern, walk.leaves)}"
            )
        checked[text] = cast(Role, one_of(*ROLES)("layout", f"roles[{text!r}]", role))
    return checked


def _default(walk: Walk, name: str, array: Array) -> Role:
    """Return the role of an array that no pattern matches."""
    if name in walk.aliases:
        return "alias"
    if is_extra_state(name):
        return "local"
    if name in walk.kinds:
        return walk.kinds[name]
    path = name.split(".")
    collections = walk.node.keys if isinstance(walk.node, Branch) else ()
    if path[-1] == "seed_generator_state" or (path[0] in _OWN_COLLECTIONS and "params" in collections):
        return "local"
    is_float = type_of(name, array) in FLOATS
    declared = walk.declared.get(name)
    if declared is None and not is_float and is_parameter(array):
        declared = False  # in a dict of parameters
    if declared is False:
        trains = is_float or (is_torch(array) and array.requires_grad)
        return "trained" if trains else "constant"
    if _is_of_spectral_norm(walk, path):
        return "copied"
    if _is_mean(path):
        return "statistic"
    is_trained = not declared and (is_float or type_of(name, array) not in REAL)
    known_roles = _ROLES_OF_WORDS if is_trained else _ROLES_OF_BUFFERS
    role = next((known_roles[word] for word in _words(path[-1]) if word in known_roles), None)
    role = role or next((_OWN_WORDS[word] for part in path[:-1] for word in _words(part) if word in _OWN_WORDS), None)
    if role is not None or is_trained:
        return role or "trained"
    return "constant" if _is_table(name, array, declared=bool(declared)) else "statistic"


@lru_cache(4096)
def _words(name: str) -> list[str]:
    """Return the words of a name in snake case or in camel case."""
    return re.split("[^a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _is_mean(path: list[str]) -> bool:
    """Return whether an array is a known statistic: of torch, of Keras, of flax.linen, or a moving mean of haiku."""
    return path[-1] in STATISTICS or "batch_stats" in path or any(part.endswith("_ema") for part in path[:-1])


def _is_table(name: str, array: Array, *, declared: bool) -> bool:
    """Return whether an array of a module or of another tree has codes, indices, bytes or a mask rather than a counter:
    bytes, uint32, and integers of more than one element; outside of modules also integers and bools of two dimensions
    or more, and torch's integers of one dimension and another dtype than int64, the dtype of its counters.
    """
    kind, shape = type_of(name, array), array.shape
    if not declared and (len(shape) > 1 or (is_torch(array) and len(shape) == 1 and kind not in ("bool", "int64"))):
        return True
    return kind in ("uint8", "uint32") or (kind not in FLOATS and kind != "bool" and prod(shape) > 1)


def _is_of_spectral_norm(walk: Walk, path: list[str]) -> bool:
    """Return whether a vector is that of a power iteration: torch's spectral_norm, in both of its forms, or flax's.

    The mean of two unit vectors is no unit vector.
    """
    last = path[-1]
    if last in ("_u", "_v"):
        return "parametrizations" in path
    if last.rpartition("/")[2] in ("u", "sigma"):
        return "batch_stats" in path
    return last.endswith(("_u", "_v")) and ".".join((*path[:-1], f"{last[:-2]}_orig")) in walk.leaves
