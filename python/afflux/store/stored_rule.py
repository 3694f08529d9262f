"""The rule of a store, which is stored as its configuration."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afflux.aggregation.options import ABSENT, lasting_facts
from afflux.ops.errors import AffluxError, StoreError
from afflux.ops.validation import brief
from afflux.rules.rule import Rule
from afflux.rules.serialization import from_config

_LOGGER = logging.getLogger("afflux")


def _changes(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Describe the options that differ between two configurations of a rule."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _changes(before.get(name), now.get(name), f"{path}.{name}" if path else str(name))
    elif before != now and (before, now) != (None, "none"):  # an option that has no value, or did not exist
        yield f"{path} from {brief(before)} to {brief(now)}"


def warn_of_own_parts(path: Path, config: Mapping[str, Any]) -> None:
    """Warn if `Server.open` cannot make the rule of a new store from its configuration."""
    try:
        from_config(config)
    except AffluxError as error:
        why = str(error).removeprefix("[from_config] ")
        _LOGGER.warning("[Server] store: %s: Server.open(path, rule) will need the rule: %s", path, why)


def resolved_rule(path: Path, rule: Rule | None, config: Mapping[str, Any], facts: Mapping[str, Any]) -> Rule:
    """Return the rule of an opened server: `rule`, or else that of the last commit, which has this configuration.

    Args:
        path: the store's folder, for messages.
        rule: the argument of `Server.open`.
        config: the configuration of the rule of the last commit.
        facts: the facts with which a server must agree.

    Raises:
        StoreError: the rule does not fit the store, or the stored one has a part that must be given.
    """
    try:
        opened_rule = from_config(config) if rule is None else rule
    except AffluxError as error:
        raise StoreError(
            f"[open] {path} holds a server whose rule must be given: {error}. A part that is registered is "
            "known after the import of the module that registers it"
        ) from None
    lasting = lasting_facts(opened_rule, facts["slot_dtype"])
    expected = {"rule": lasting["name"]} | {name: lasting[name] for name in ("kind", "rule_vectors", "codec", *ABSENT)}
    stored = {**ABSENT, **facts}
    for name, value in expected.items():
        if stored[name] != value:
            raise StoreError(f"[open] {path} holds a server whose {name} is {stored[name]!r}, not {value!r}")
    changes = [*_changes(config, rule.to_config())] if rule is not None else []
    if changes:
        _LOGGER.warning("[open] %s: the rule that was given changes %s", path, "; ".join(changes))
    return opened_rule
