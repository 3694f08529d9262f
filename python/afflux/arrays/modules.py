"""The parameters and buffers of a torch module, by name."""

import sys
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from afflux.ops.validation import raise_if_from_signal, result_or_none

#: Methods of torch.nn.Module that decide which arrays a module has, and under which names.
_METHODS = frozenset(
    {"named_parameters", "named_buffers", "_named_members", "named_modules", "state_dict", "_save_to_state_dict"}
)
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_DICTS = frozenset({dict, OrderedDict})


def has_attribute(value: object, name: str) -> bool:
    """Return whether an object has this attribute; no, if it has one of any name, such as Rngs of flax."""
    return hasattr(value, name) and (hasattr(type(value), name) or not hasattr(value, "no name of an attribute"))


def is_module(tree: object) -> bool:
    """Return whether the tree is a torch module. A method of modules identifies them, so that torch stays optional."""
    if type(tree) is dict or type(tree) is list:
        return False
    try:
        return has_attribute(tree, "named_parameters")
    except Exception as error:  # a property of the object raises; reading the tree reports the error
        raise_if_from_signal(error)
        return False


#: What messages say about `is_quantised` modules, and about their state_dicts.
QUANTISED = "; weights of quantised modules are packed, and no arrays: give the float model"


def is_quantised(tree: object) -> bool:
    """Return whether the tree is a torch module with weights that are packed for integer arithmetic."""
    return (
        is_module(tree) and hasattr(tree, "modules") and any("quantized" in type(p).__module__ for p in tree.modules())
    )


def is_state_dict(tree: object) -> bool:
    """Return whether the tree is a state_dict of a torch.nn.Module, or its copy by `copy.deepcopy` or torch.load."""
    return type(tree) is OrderedDict and hasattr(tree, "_metadata")


def members(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the persistent buffers, as torch's methods give them. Tied arrays count once, under the
    first name.

    Args:
        module: a torch.nn.Module, or something with its methods.

    Cost: no array is read. Modules that override none of torch's methods are walked without calls of these methods,
    which is several times as fast.
    """
    base = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    if base is not None and isinstance(module, base):
        walk = _Walk(base)
        if walk.visit(module, ""):
            return walk.parameters, walk.buffers
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    if not parameters and is_read_by_state_dict(module):
        return dict(module.state_dict()), {}
    if buffers:
        persistent = module.state_dict(keep_vars=True)
        buffers = {name: array for name, array in buffers.items() if name in persistent}
    return parameters, buffers


def is_read_by_state_dict(module: Any) -> bool:
    """Return whether a torch module has no parameters and a state_dict of its own, which then is the model, as of a
    wrapper of a model of another library.
    """
    base = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    if base is None or not isinstance(module, base) or type(module).state_dict is base.state_dict:
        return False
    return next(iter(module.named_parameters()), None) is None


def adapter_names(module: Any) -> dict[str, str]:
    """Return the names of a PEFT model's adapters in `peft.get_peft_model_state_dict`, with those in the module."""
    cls = getattr(sys.modules.get("peft"), "PeftModel", None)
    if cls is None or not isinstance(module, cls):
        return {}
    parameters, buffers = members(module)
    first = {array.data_ptr(): name for name, array in (parameters | buffers).items() if array.numel()}
    state = sys.modules["peft"].get_peft_model_state_dict(module)
    places = {name: array.data_ptr() for name, array in state.items() if name not in parameters.keys() | buffers.keys()}
    return {name: first[place] for name, place in places.items() if place in first}


def further(module: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a torch module's state_dict holds beside `members`: further names of its arrays, with the first name
    of each, and the objects of `get_extra_state` by name.

    Modules whose state_dict is another one than torch's, or fails, have none.

    Cost: no array is read; `get_extra_state` is called.
    """
    base = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    if base is None or not isinstance(module, base):
        return {}, {}
    if any(getattr(type(part), name, None) is not getattr(base, name) for part in module.modules() for name in _OWN):
        return {}, {}
    states = result_or_none(lambda: module.state_dict(keep_vars=True))
    if states is None:  # a hook, or get_extra_state, has failed
        return {}, {}
    parameters, buffers = members(module)
    first = {id(array): name for name, array in (parameters | buffers).items()}
    names = parameters.keys() | buffers.keys()
    extras = {name: array for name, array in states.items() if isinstance(name, str) and name not in names}
    aliases = {name: first[id(array)] for name, array in extras.items() if id(array) in first}
    return aliases, {name: state for name, state in extras.items() if is_extra_state(name)}


#: Methods of modules with which a state_dict may hold anything.
_OWN = ("state_dict", "_save_to_state_dict")


def is_extra_state(name: str) -> bool:
    """Return whether a state_dict holds the result of a module's `get_extra_state` under this name."""
    return name == "_extra_state" or name.endswith("._extra_state")


class _Walk:
    """The arrays of a module and of its submodules, collected in the order of torch's methods."""

    def __init__(self, base: type) -> None:
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self._base = base
        self._plain: set[type] = set()  # classes that override nothing
        # By id: a tied array or module counts once.
        self._seen: set[int] = set()
        self._seen_parameters: set[int] = set()
        self._seen_buffers: set[int] = set()

    def visit(self, module: Any, prefix: str) -> bool:
        """Add a module's arrays. Return False if the module or a submodule overrides torch's methods or has hooks."""
        if id(module) in self._seen:
            return True
        self._seen.add(id(module))
        fields = module.__dict__
        if not self._is_plain(type(module)) or not _METHODS.isdisjoint(fields):
            return False
        parameters, buffers, modules = fields.get("_parameters"), fields.get("_buffers"), fields.get("_modules")
        if not (type(parameters) in _DICTS and type(buffers) in _DICTS and type(modules) in _DICTS):
            return False
        if fields["_state_dict_hooks"] or fields["_state_dict_pre_hooks"]:
            return False
        _add(parameters, prefix, self._seen_parameters, self.parameters)
        if buffers:
            _add(buffers, prefix, self._seen_buffers, self.buffers, fields["_non_persistent_buffers_set"])
        for name, child in modules.items():
            if child is not None and not self.visit(child, f"{prefix}{name}."):
                return False
        return True

    def _is_plain(self, cls: type) -> bool:
        if cls not in self._plain:
            names = (*_METHODS, *_PARTS)
            if any(getattr(cls, name, None) is not getattr(self._base, name, None) for name in names):
                return False
            self._plain.add(cls)
        return True


def _add(
    arrays: dict[str, Any], prefix: str, seen_ids: set[int], by_name: dict[str, Any], left_out: Collection[str] = ()
) -> None:
    """Add a module's own arrays. Arrays in `left_out` are only recorded as seen."""
    for name, array in arrays.items():
        if array is not None and id(array) not in seen_ids:
            seen_ids.add(id(array))
            if name not in left_out:
                by_name[prefix + name] = array
