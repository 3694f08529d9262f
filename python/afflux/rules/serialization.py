"""Rules from configurations, as JSON, YAML and TOML represent them. `Rule.to_config` is the inverse.

Names are looked up in tables of this package: presets, registered parts, codecs, dialects. The annotations of presets
and parts give the types of options, so that every value is checked before any part is made.
"""

import inspect
from collections import abc
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from afflux.ops.codecs import Codec, named
from afflux.ops.errors import AffluxError
from afflux.ops.validation import as_int, as_text, brief, is_function, known_names, reads
from afflux.rules.presets import RULES
from afflux.rules.presets.dialects import DIALECTS, Dialect
from afflux.rules.presets.framework_names import FRAMEWORK_NAMES, RULES_OF_FLOWER, in_our_names
from afflux.rules.registry import MAX_DEPTH, OWN, PART, WORDS, PartRole, registered_parts
from afflux.rules.rule import Calibrate, Optimizer, Rule, Weigh
from afflux.rules.schedules import LearningRate
from afflux.rules.staleness import StalenessLaw

#: The annotations of options that are parts: the role of the part, and its name in errors.
PARTS: Mapping[object, tuple[PartRole, str]] = {
    Rule: ("rule", "a rule"),
    Weigh: ("weigh", "a weigh part"),
    Calibrate: ("calibrate", "a calibrate part"),
    Optimizer: ("step", "a step part"),
    LearningRate: ("schedule", "a schedule of learning rates"),
    StalenessLaw: ("staleness", "a staleness function"),
}
#: The other annotations, and the names of their values in errors. Any is for all annotations that are not listed.
PLAIN: Mapping[object, str] = {
    Codec: "the name of a codec",
    Dialect: "a dialect",
    bool: "True or False",
    int: "an int",
    float: "a number",
    str: "a str",
    NoneType: "None",
    Any: "a plain value or a part",
}
#: Ints must be smaller than this, so that they can be converted to float and to text.
MAX_INT = 10**300


@reads("[make] an option")
def make(name: str, /, **options: object) -> Rule:
    """Make a preset from its name and hyper-parameters, as in a configuration file.

    Args:
        name: a name in `RULES`.
        options: hyper-parameters of the preset: numbers, strings, booleans, None; a codec by its name; a
            staleness function or a schedule of learning rates by its name, or as {"part": name, ...its options}; None
            also as "none", inf as "inf". Objects are also accepted. With `dialect=`, the options of that dialect, and
            the names that its framework uses, are also accepted (docs/reference/dialects.md).

    Returns:
        The rule.

    Raises:
        AffluxError: a name or an option is unknown, has a wrong type or value, or is given twice.

    >>> make("ca2fl", buffer_size=5, codec="affine-4").calibrate.codec
    codecs.affine(4)
    >>> make("fedbuff", staleness={"part": "hinge", "a": 10, "b": 4}).weigh.law
    Hinge(a=10.0, b=4.0)
    >>> make("fedbuff", dialect="nvflare", num_updates_for_model=5, global_lr=0.5).buffer_size
    5
    """
    preset = as_text(name)
    if preset not in RULES:
        raise AffluxError(f"[make] name is {brief(name)}, must be a rule; {known_names(name, RULES)}")
    parameters = _parameters(RULES[preset])
    is_flowers = preset in RULES_OF_FLOWER
    if "dialect" in parameters:
        options = _with_dialect(options)
    elif is_flowers and "dialect" in options:
        if as_text(dialect := options.pop("dialect")) != "flower":
            raise AffluxError(f"[make] dialect is {brief(dialect)}, must be 'flower' for {preset}")
        options = in_our_names("flower", options, parameters)
    for option in options:
        frameworks = [
            framework
            for framework, names in FRAMEWORK_NAMES.items()
            if option in names and (framework == "flower") == is_flowers
        ]
        if option not in parameters and frameworks:
            raise AffluxError(f"[make] {option} is a name of {frameworks[0]}: only for dialect={frameworks[0]!r}")
    rule: Rule = _Reader("make", objects=True).call(RULES[preset], preset, options, "", 0)
    return rule


@reads("[from_config] config")
def from_config(config: Mapping[str, Any]) -> Rule:
    """Make the rule that `Rule.to_config` has written, or that a user has written in the same form.

    Args:
        config: {"part": "rule", "name": ..., "kind": ..., "buffer_size": ..., "weigh": ..., "calibrate": ...,
            "step": ...}. A part is {"part": its registered name, ...its options} or its name alone. Options that have a
            default may be left out.

    Returns:
        The rule. It is equal to the rule that `to_config` was called on.

    Raises:
        AffluxError: a key is unknown or missing, a value has a wrong type or value, or a part is not registered.

    >>> from afflux.rules import fedbuff
    >>> from_config(fedbuff(buffer_size=2).to_config()) == fedbuff(buffer_size=2)
    True
    """
    if not isinstance(config, Mapping):
        raise AffluxError(f"[from_config] config is {brief(config)}, must be a mapping")
    rule: Rule = _Reader("from_config", objects=False).value(config, Rule, "", 0)
    return rule


def _with_dialect(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `fedbuff` under afflux's names, with the options of the dialect inside `dialect`."""
    preset_options = dict(options)
    dialect = preset_options.get("dialect", "paper")
    content = dict(dialect) if isinstance(dialect, Mapping) else {PART: dialect}
    name = content.get(PART)
    if not isinstance(name, str):
        return preset_options  # a Dialect, or a value that `call` refuses
    if name not in DIALECTS:
        raise AffluxError(f"[make] dialect is {brief(name)}, unknown; {known_names(name, DIALECTS)}")
    preset_options = in_our_names(name, preset_options)
    for option in _parameters(DIALECTS[name]):
        if option in preset_options:
            if option in content:
                raise AffluxError(f"[make] {option} is given twice: inside dialect and outside")
            content[option] = preset_options.pop(option)
    return preset_options | {"dialect": content}


@cache
def _parameters(maker: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the options of a preset, a part or a dialect."""
    try:
        return inspect.signature(maker, eval_str=True).parameters
    except Exception:  # the annotations of a user's part cannot be evaluated: its values are not checked here
        return inspect.signature(maker).parameters


def _kinds(annotation: object) -> list[Any]:
    """Return the alternatives of an annotation: keys of PARTS and PLAIN, Literals, and mappings."""
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        kinds = [kind for argument in get_args(annotation) for kind in _kinds(argument)]
        names = Codec in kinds or Dialect in kinds  # a Literal beside these lists the same names
        return [kind for kind in kinds if not (names and get_origin(kind) is Literal)]
    if annotation is None:
        return [NoneType]
    is_kind = isinstance(annotation, abc.Hashable) and (annotation in PARTS or annotation in PLAIN)
    if is_kind or get_origin(annotation) in (Literal, abc.Mapping, dict):
        return [annotation]
    return [Any]


def _roles(kinds: list[Any]) -> list[PartRole]:
    parts = [kind for kind in PARTS if kind is not Rule] if Any in kinds else [kind for kind in kinds if kind in PARTS]
    return [PARTS[kind][0] for kind in parts]


def _choices(kinds: list[Any]) -> list[Any]:
    return [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def _takes(value: float | None, kinds: list[Any]) -> bool:
    """Return whether an option of these kinds may be this number, bool or None."""
    kind = next(kind for kind in (NoneType, bool, int, float) if isinstance(value, kind))
    return kind in kinds or Any in kinds or any(kind is type(choice) and value == choice for choice in _choices(kinds))


def _words(kinds: list[Any]) -> str:
    """Return a description of the values of an option, for errors."""
    words = [PARTS[kind][1] if kind in PARTS else PLAIN[kind] for kind in kinds if kind in PARTS or kind in PLAIN]
    words += ["a mapping from versions" for kind in kinds if get_origin(kind) in (abc.Mapping, dict)]
    return " or ".join([*map(repr, _choices(kinds)), *words])


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _Reader:
    """A reader of values according to annotations. Errors name the operation and the path of keys to the value."""

    def __init__(self, operation: str, *, objects: bool) -> None:
        self._operation = operation
        self._objects = objects  # whether made parts, codecs and dialects, and NumPy's numbers, are accepted

    def call(self, maker: Callable[..., Any], name: str, options: Mapping[Any, object], path: str, depth: int) -> Any:
        """Call the preset, part or dialect of this name with its options."""
        parameters = _parameters(maker)
        where = f"{path} ({name!r})" if path else name
        for option in options:
            if not isinstance(option, str) or option not in parameters:
                raise self._error(f"{where} has no option {brief(option)}; {known_names(option, parameters)}")
        for option, parameter in parameters.items():
            if parameter.default is parameter.empty and option not in options:
                raise self._error(f"{_join(path, option)} is missing")
        arguments = {
            option: self.value(value, parameters[option].annotation, _join(path, option), depth + 1)
            for option, value in options.items()
        }
        try:
            return maker(**arguments)
        except AffluxError as error:
            if not path:
                raise
            raise self._error(f"{path}: {error}") from None
        except (TypeError, ValueError, ArithmeticError) as error:  # of a user's part
            raise self._error(f"{where} cannot be made: {error}") from error

    def value(self, value: object, annotation: object, path: str, depth: int) -> Any:
        """Read the value of an option that has this annotation."""
        if depth > MAX_DEPTH:
            raise self._error(f"{path} is nested more than {MAX_DEPTH} levels deep")
        kinds = _kinds(annotation)
        if self._objects:
            takes_objects = _roles(kinds) or Codec in kinds or Dialect in kinds
            if takes_objects and (isinstance(value, Codec | Dialect) or is_function(value)):
                return value
            value = value.item() if isinstance(value, np.generic) else value
            if not isinstance(value, float) and (number := as_int(value)) is not None:
                value = number
        if isinstance(value, str):
            return self._text(value, kinds, path, depth)
        if isinstance(value, Mapping):
            return self._mapping(value, kinds, path, depth)
        if value is None or isinstance(value, bool | int | float):
            return self._number(value, kinds, path)
        raise self._wrong(value, kinds, path)

    def _text(self, text: str, kinds: list[Any], path: str, depth: int) -> Any:
        if text in WORDS and _takes(WORDS[text], kinds):
            return WORDS[text]
        if str in kinds or Any in kinds or text in _choices(kinds):
            return text
        if Codec in kinds:
            try:
                return named(text)
            except AffluxError as error:
                raise self._error(f"{path}: {error}") from None
        if Dialect in kinds or _roles(kinds):
            return self._part(text, {}, kinds, path, depth)
        raise self._wrong(text, kinds, path)

    def _mapping(self, value: Mapping[Any, object], kinds: list[Any], path: str, depth: int) -> Any:
        for kind in kinds:
            if get_origin(kind) in (abc.Mapping, dict):
                return self._by_version(value, get_args(kind)[1], path, depth)
        if not (Dialect in kinds or _roles(kinds)):
            raise self._wrong(value, kinds, path)
        if OWN in value:
            raise self._error(f"{path or PART} is {brief(value[OWN])}, a part that is not registered")
        if PART not in value:
            raise self._error(f"{_join(path, PART)} is missing: the name of {_words(kinds)}")
        options = {key: entry for key, entry in value.items() if key != PART}
        return self._part(value[PART], options, kinds, path, depth)

    def _part(self, name: object, options: Mapping[Any, object], kinds: list[Any], path: str, depth: int) -> Any:
        choices: dict[str, Callable[..., Any]] = dict(DIALECTS) if Dialect in kinds else {}
        for role in _roles(kinds):
            choices |= {part.name: part.cls for part in registered_parts(role).values()}
        if not isinstance(name, str) or name not in choices:
            raise self._error(f"{path or PART} is {brief(name)}, must be {_words(kinds)}; {known_names(name, choices)}")
        return self.call(choices[name], name, options, path, depth)

    def _by_version(self, value: Mapping[Any, object], kind: object, path: str, depth: int) -> dict[int, Any]:
        """Read numbers by version. In JSON, versions are text."""
        entries: dict[int, Any] = {}
        for key, entry in value.items():
            digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 300
            version = int(key) if digits else key
            if type(version) is not int or not 0 <= version < MAX_INT or version in entries:
                raise self._error(f"{path} has the key {brief(key)}, must be a version that is there once")
            entries[version] = self.value(entry, kind, f"{path}.{version}", depth + 1)
        return entries

    def _number(self, value: float | None, kinds: list[Any], path: str) -> float | None:
        if isinstance(value, int) and abs(value) >= MAX_INT:
            raise self._error(f"{path} is an int of more than 300 digits")
        if _takes(value, kinds):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
            return float(value)
        if isinstance(value, float) and int in kinds and (int_value := as_int(value)) is not None:  # as in YAML or TOML
            return int_value
        raise self._wrong(value, kinds, path)

    def _wrong(self, value: object, kinds: list[Any], path: str) -> AffluxError:
        return self._error(f"{path} is {brief(value)}, must be {_words(kinds)}")

    def _error(self, text: str) -> AffluxError:
        return AffluxError(f"[{self._operation}] {text}")
