"""What FLGo's options say for the adapter: the rule, what has no meaning here, and what a checkpoint keeps."""

import json
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal, get_args

import msgspec

from afflux.ops.errors import AffluxError
from afflux.ops.validation import brief
from afflux.rules.presets.framework_names import in_our_names
from afflux.rules.rule import Rule
from afflux.rules.serialization import from_config, make

#: Of FLGo, that the adapter is tested with. (`flgo.__version__` of 0.4.4 is v0.4.3.)
_TESTED = "0.4.4"
#: What FLGo's loggers keep of early stopping.
_EarlyStop = Literal["_es_best_score", "_es_best_round", "_es_patience", "_es_counter"]


class Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint keeps of a run, beside the server."""

    round: int = -1  #: the last one that was logged; -1: there is no checkpoint
    begun: int = 0  #: the last one that had begun, with this learning rate
    time: float = 0.0
    learning_rate: float = 0.0
    early_stop: dict[_EarlyStop, float | None] = {}
    output: dict[str, list[Any] | dict[str, Any]] = {}  #: the logger's, but for FLGo's options


def notes_of(logged: int, begun: int, time: float, learning_rate: float, logger: Any) -> dict[str, Any]:
    """The notes of a checkpoint as plain data."""
    stop = {name: getattr(logger, name) for name in get_args(_EarlyStop)}
    return {
        "round": logged,
        "begun": begun,
        "time": time,
        "learning_rate": float(learning_rate),
        "early_stop": {name: None if value is None else float(value) for name, value in stop.items()},
        "output": {name: value for name, value in logger.output.items() if name != "option" and _is_kept(value)},
    }


def _is_kept(value: object) -> bool:
    """Whether a logger's variable is a list or a dict that JSON can hold."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, list | dict)


def warn_of_version() -> None:
    """Warns of a version of FLGo that the adapter is not tested with."""
    found = version("flgo")
    if found != _TESTED:
        warnings.warn(
            f"afflux.integrations.flgo is tested with flgo {_TESTED}; {found} is installed", RuntimeWarning, 3
        )


def refuse_options(option: Mapping[str, Any]) -> None:
    """Raises AffluxError for options of FLGo that have no meaning for the adapter."""
    for name in ("save_checkpoint", "load_checkpoint"):
        if option.get(name):
            raise AffluxError(f"[flgo] {name} keeps the model alone: give algorithm(rule, store=...) instead")
    if option.get("algo_para"):
        raise AffluxError("[flgo] algo_para holds numbers by their place: give the options of the rule by name")
    if option["num_parallels"] > 1 and option.get("parallel_type") != "t":
        raise AffluxError("[flgo] clients may train in threads only: give parallel_type='t' with num_parallels")


def rule_of(given: Any, num_clients: int) -> Rule:
    """The rule itself, or the one of a configuration: {"name": ..., ...options}, or what `Rule.to_config` gives.

    Raises:
        AffluxError: it is neither, or an option is unknown or has a wrong type or value.
    """
    if isinstance(given, Rule):
        return given
    if not isinstance(given, Mapping) or not ("name" in given or "part" in given):
        raise AffluxError(f"[flgo] rule is {brief(given)}, must be a Rule or a mapping with its name")
    if "part" in given:
        return from_config(given)
    options = {name: value for name, value in given.items() if name != "name"}
    if "buffer_ratio" in options:
        options.setdefault("num_clients", num_clients)
    return make(given["name"], **in_our_names("flgo", options))
