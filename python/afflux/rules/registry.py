"""The parts of rules, by the names that configurations and stores use.

A name is looked up only in this table: reading data never imports a module or runs a file.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import inf, isfinite, nan
from typing import Any, Literal, TypeVar, get_args

from afflux.ops.codecs import Codec
from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief, one_of

#: The role of a part: a slot of a rule, a law of a learning rate, or a law of staleness.
PartRole = Literal["rule", "weigh", "calibrate", "step", "schedule", "staleness"]
T = TypeVar("T")

#: The largest depth of parts within parts.
MAX_DEPTH = 32
#: Keys of a configuration that are not options: the part's name, and the name of the class of an unregistered part.
PART, OWN = "part", "own"
#: Text for the values of options that JSON or TOML lack.
WORDS: Mapping[str, float | None] = {"none": None, "inf": inf, "-inf": -inf, "nan": nan}


@dataclass(frozen=True, slots=True)
class Part:
    """A class of parts, and the role of its objects in a rule."""

    name: str
    role: PartRole
    cls: type[Any]


_BY_NAME: dict[str, Part] = {}
_BY_CLASS: dict[type[Any], Part] = {}


def register(name: str, role: PartRole) -> Callable[[type[T]], type[T]]:
    """Register a class of parts, so that rules with it can be written to and read from configurations and stores.

    Args:
        name: in snake_case; unique among all parts. A class of the same source file and qualified name is replaced, so
            that a file may be both imported and named as FILE.py:FUNCTION.
        role: "weigh", "calibrate", "step", "schedule" (of a learning rate), "staleness" (a law) or "rule".

    Returns:
        The decorator of a dataclass, whose fields are the options. A field holds None, a bool, an int, a float, a str,
        a codec, a part, or numbers by version (`Mapping[int, float]`), according to its annotation.

    Raises:
        AffluxError: the name is taken or invalid, the role is unknown, or the class is not a dataclass.

    >>> from dataclasses import dataclass
    >>> from afflux import rules
    >>> @rules.register("linear_law", "staleness")
    ... @dataclass(frozen=True)
    ... class Linear:
    ...     limit: float = 10.0
    ...     def __call__(self, staleness: int, /) -> float:
    ...         return max(1.0 - staleness / self.limit, 0.0)
    >>> rules.make("fedbuff", staleness={"part": "linear_law", "limit": 5}).weigh.law
    Linear(limit=5.0)
    """
    if type(name) is not str or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
        raise AffluxError(f"[register] name is {brief(name)}, must be in snake_case, such as 'clipped_mean'")
    one_of(*get_args(PartRole))("register", "role", role)

    def add(cls: type[T]) -> type[T]:
        if not isinstance(cls, type) or not is_dataclass(cls):
            raise AffluxError(f"[register] {name!r} is {brief(cls)}, must be a dataclass")
        if reserved := {PART, OWN} & {field.name for field in fields(cls)}:
            raise AffluxError(f"[register] {name!r} has a field {reserved.pop()!r}, which configurations reserve")
        before = _BY_NAME.get(name)
        if before is not None and _source(before.cls) != _source(cls):
            raise AffluxError(f"[register] name is {name!r}, which {before.cls!r} has already")
        if before is not None and before.cls.__module__ == cls.__module__:
            del _BY_CLASS[before.cls]
        _BY_NAME[name] = _BY_CLASS[cls] = Part(name, role, cls)
        return cls

    return add


def _source(cls: type[Any]) -> tuple[str, str]:
    """Return the file, or without one the module, and the qualified name of a class."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def registered_parts(role: PartRole | None = None) -> dict[str, Part]:
    """Return the parts of a role, or all parts, by name."""
    return {name: part for name, part in _BY_NAME.items() if role in (None, part.role)}


def to_plain(value: object, depth: int = 0) -> Any:
    """Return a part, or a value of an option, as data for JSON, YAML and TOML. See `Rule.to_config`.

    Raises:
        AffluxError: parts are nested more than `MAX_DEPTH` levels deep, or a text would be read as another value, or a
            field that is annotated `str` holds no text.
    """
    if depth > MAX_DEPTH:
        raise AffluxError(f"[to_config] the rule has more than {MAX_DEPTH} levels of parts within parts")
    if isinstance(value, float):
        return float(value) if isfinite(value) else str(float(value))  # JSON has no inf
    if value is None:
        return "none"  # TOML has no null
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, Codec):
        return value.name
    if isinstance(value, Mapping) and all(type(key) is int for key in value):
        return {str(key): to_plain(entry, depth + 1) for key, entry in value.items()}
    part = _BY_CLASS.get(type(value))
    if part is None:
        kind = type(value)
        return {OWN: getattr(value, "__qualname__", f"{kind.__module__}.{kind.__qualname__}")}
    options = {field.name: getattr(value, field.name) for field in fields(part.cls) if field.init}
    for field in fields(part.cls):
        entry, is_text = options.get(field.name), field.type in (str, "str")
        if isinstance(entry, str) and entry in WORDS and not is_text:
            raise AffluxError(f"[to_config] {part.name}.{field.name} is {entry!r}, which is read as {WORDS[entry]}")
        if is_text and not isinstance(entry, str):
            raise AffluxError(f"[to_config] {part.name}.{field.name} is {brief(entry)}, must be a str")
    return {PART: part.name} | {name: to_plain(entry, depth + 1) for name, entry in options.items()}
