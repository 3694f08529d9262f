"""A rule by name with its options, as plain data: read from text, and written as text."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from math import isfinite
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.rules import RULES, make
from afflux.rules.files import imports_beside, rule_function, split_rule_name
from afflux.rules.registry import registered_parts
from afflux.rules.rule import Rule
from afflux.rules.staleness import StalenessLaw

JsonScalar = int | float | str | bool | None
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class RuleSpec:
    """A rule by name with options, as plain data that can be sent to another process."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    label: str = ""  #: Name of the rule in tables and figures.

    def build(self) -> Rule:
        """Make the rule; raise ConfigError for an unknown name, option or impossible value."""
        options = dict(self.options)
        for option in options:
            known(f"option of {self.name}:", option, rule_parameters(self.name))
        try:
            with imports_beside(self.name):
                rule = make(self.name, **options) if self.name in RULES else rule_function(self.name)(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rule {self.label or self.name}: {error}") from error
        if not isinstance(rule, Rule):
            raise ConfigError(f"rule {self.label or self.name}: it returns {rule!r}, not an afflux.Rule")
        return rule

    @property
    def text(self) -> str:
        """The rule with all its options, as `parse_rule` reads it."""
        return self.name + "".join(f":{name}={format_option(value)}" for name, value in self.options)

    @property
    def identity(self) -> str:
        """The label, and the rule's name if the label does not begin with it: `ours=fedbuff`."""
        return self.label if split_rule_name(self.label)[0] == self.name else f"{self.label}={self.name}"

    def plain_options(self) -> dict[str, JsonScalar]:
        """Return the options as JSON scalars: a staleness law, or inf, as the text that `parse_rule` reads."""
        return _plain(self.options)

    def all_options(self) -> dict[str, JsonScalar]:
        """Return all options of the rule as `plain_options` does: those that are not set, with their defaults.

        >>> parse_rule("fedasync:alpha=0.3").all_options()
        {'alpha': 0.3, 'staleness': 'polynomial(0.5)'}
        """
        parameters = rule_parameters(self.name).values()
        defaults = {option.name: option.default for option in parameters if option.default is not option.empty}
        return _plain((defaults | dict(self.options)).items())


#: Arrivals per server step of presets with a buffer that do not set it: the same for all, so that rules are comparable.
BUFFER_SIZE = 10


def rule_parameters(rule: str) -> Mapping[str, inspect.Parameter]:
    """Return the options that a rule takes; raise ConfigError for an unknown rule."""
    return inspect.signature(rule_function(rule), eval_str=True).parameters


def parse_rule(text: str, common: Mapping[str, Any] | None = None) -> RuleSpec:
    """Read `[label=]name[:option=value...]`.

    Args:
        text: the name is a preset's, or `path/to/file.py:function`; then that file is executed.
        common: options that apply if the rule takes them and the text does not set them; None: not given. A buffer_size
            of None is `BUFFER_SIZE`, but a function in a file keeps its own default.

    Returns:
        The rule with its options; without a label, the label is the text.

    Raises:
        ConfigError: an unknown rule or option, or a bad value.

    >>> parse_rule("fedbuff:server_lr=0.5", {"buffer_size": 4}).options
    (('buffer_size', 4), ('server_lr', 0.5))
    >>> parse_rule("ours=fedbuff:server_lr=0.5").label
    'ours'
    """
    label, text = _split_label(text.strip())
    name, assignments = split_rule_name(text)
    _refuse_commas(text, name)
    parameters = rule_parameters(name)
    common = dict(common or {})
    size = parameters.get("buffer_size")
    if size and common.get("buffer_size", 0) is None and (name in RULES or size.default is size.empty):
        common["buffer_size"] = BUFFER_SIZE
    options = {key: value for key, value in common.items() if key in parameters and value is not None}
    annotations = {option: parameter.annotation for option, parameter in parameters.items()}
    options |= read_options(f"rule {text}", assignments, name, annotations)
    return RuleSpec(name, tuple(sorted(options.items())), label)


def read_rules(rules: Iterable[str | RuleSpec], common: Mapping[str, Any] | None = None) -> list[RuleSpec]:
    """Return the rules by name, each of which can be built; see `parse_rule`.

    Raises:
        ConfigError: an unknown rule or option, a bad value, or a rule that is given twice.
    """
    specs = [parse_rule(rule, common) if isinstance(rule, str) else rule for rule in rules]
    labels = [spec.label for spec in specs]
    if len(set(labels)) != len(labels):
        raise ConfigError(f"a rule is given twice: {', '.join(labels)}")
    for spec in specs:
        spec.build()
    return specs


def read_options(owner: str, assignments: Iterable[str], name: str, annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `option=value` texts, by option.

    Args:
        owner: what has these options, for errors.
        assignments: the texts.
        name: the name that has these options, for errors.
        annotations: those of the options that there are.

    Raises:
        ConfigError: a text without "=", an unknown option, an option that is given twice, or a bad value.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        option, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{owner}: {assignment!r} is not option=value")
        known(f"option of {name}:", option, annotations)
        if option in values:
            raise ConfigError(f"{owner}: {option} is given twice")
        try:
            values[option] = option_value(value, annotations[option])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{owner}: {option}: {error}") from None
    return values


def _split_label(text: str) -> tuple[str, str]:
    """Return the label and the rule of `label=rule`; without a label, the text twice."""
    label, equals, rule = text.partition("=")
    if equals and re.fullmatch(r"\w[\w.+ -]*", label):
        name, _ = split_rule_name(rule)
        if name in RULES or name.partition(":")[0].endswith(".py"):
            return label, rule
    return text, text


def _refuse_commas(label: str, name: str) -> None:
    """Raise ConfigError, with the right separators, for options separated by commas."""
    start = len(name) if ".py" in name else 0
    meant = label[:start] + re.sub(r",\s*(?=\w+=)", ":", label[start:])
    if re.match(r"\w+=", name):
        meant = f"NAME:{meant}"
    if meant != label:
        raise ConfigError(f"rule {label}: options are separated by ':', as in {meant}")


def format_option(value: Any) -> str:
    """Return the text of an option's value, as `parse_rule` reads it.

    >>> from afflux.rules.staleness import Hinge
    >>> format_option(Hinge(10.0, 4.0)), format_option(None), format_option(0.5)
    ('hinge(10.0,4.0)', 'none', '0.5')
    """
    for name, law in registered_parts("staleness").items():
        if type(value) is law.cls:
            arguments = ",".join(map(repr, astuple(value)))
            return f"{name}({arguments})" if arguments else name
    return value if isinstance(value, str) else str(value).lower()


def _plain(options: Iterable[tuple[str, Any]]) -> dict[str, JsonScalar]:
    return {name: value if _is_json_scalar(value) else format_option(value) for name, value in options}


def _is_json_scalar(value: Any) -> bool:
    return isinstance(value, JsonScalar) and not (isinstance(value, float) and not isfinite(value))


def option_value(text: str, annotation: Any) -> Any:
    """Return the value of an option with this annotation; raise ValueError for invalid text."""
    choices = {format_option(choice): choice for choice in literal_choices(annotation)}
    if text in choices:
        return choices[text]
    if annotation is str:
        return text
    if StalenessLaw in (annotation, *get_args(annotation)):
        return _law(text)
    for number in (int, float):
        if number is annotation or number in get_args(annotation):
            return _number(number, text)
    if not choices:
        kind = "no annotation" if annotation is inspect.Parameter.empty else f"the annotation {annotation}"
        readable = "int, float, str, bool or a Literal can be"
        raise ValueError(f"{text!r} cannot be read: the parameter has {kind}; {readable}")
    raise ValueError(f"{text!r} is not one of {', '.join(choices)}")


def literal_choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation lists: ["a", "b", None] of Literal["a", "b"] | None."""
    if annotation in (None, NoneType):
        return [None]
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in literal_choices(part)]


def _number(kind: Callable[[str], _Number], text: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'an int' if kind is int else 'a number'}") from None


def _law(text: str) -> StalenessLaw:
    name, bracket, listed = text.partition("(")
    laws = registered_parts("staleness")
    known("staleness function", name, laws)
    if bracket and not listed.endswith(")"):
        raise ValueError(f"{text!r} has no closing bracket")
    numbers = listed.removesuffix(")")
    arguments = [_number(float, number) for number in numbers.split(",") if numbers]
    signature = inspect.signature(laws[name].cls)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(f"{text!r}: {name} takes {', '.join(signature.parameters) or 'no arguments'}") from None
    return cast(StalenessLaw, laws[name].cls(*arguments))
