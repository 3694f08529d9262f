"""FLGo's options for the adapter: the rule, and options without a meaning here."""

from collections.abc import Mapping
from typing import Any

from afflux.integrations._settings import rule_of
from afflux.ops.errors import AffluxError
from afflux.rules.rule import Rule


def refuse_flgo_options(option: Mapping[str, Any]) -> None:
    """Raise AffluxError for options of FLGo that have no meaning for the adapter."""
    for name in ("save_checkpoint", "load_checkpoint"):
        if option.get(name):
            raise AffluxError(f"[flgo] {name} keeps the model alone: give algorithm(rule, store=...) instead")
    if option.get("algo_para"):
        raise AffluxError("[flgo] algo_para holds numbers by their place: give the options of the rule by name")
    if option["num_parallels"] > 1 and option.get("parallel_type") != "t":
        raise AffluxError("[flgo] clients may train in threads only: give parallel_type='t' with num_parallels")


def rule_of_option(given: Any, num_clients: int) -> Rule:
    """Return a rule, or make that of a configuration: {"name": ..., ...options}, or the result of `Rule.to_config`.

    Raises:
        AffluxError: it is neither, an option is unknown or has a wrong type or value, or no step could be made.
    """
    if isinstance(given, Mapping) and "name" in given and "part" not in given:
        options = dict(given)
        rule = rule_of("flgo", options.pop("name"), options, num_clients)
    else:
        rule = rule_of("flgo", given, {})
    if rule.buffer_size > num_clients:
        raise AffluxError(
            f"[flgo] buffer_size is {rule.buffer_size} of {num_clients} clients, and would never be reached: "
            "FLGo draws no client whose model is in the buffer"
        )
    return rule
