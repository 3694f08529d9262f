"""The rule of a store, which is stored as its configuration."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afflux.aggregation.options import codec_of
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


class StoredRule:
    """The rule of a store.

    Args:
        path: the store's folder, for messages.
        config: the configuration of the rule of the last commit.
        facts: the facts with which a server must agree.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._path = path
        self._config = config
        self._facts = facts
        self._newest: tuple[Rule, dict[str, Any]] | None = None
        self.was_given = False  #: whether `resolve` was given a rule

    def resolve(self, rule: Rule | None) -> Rule:
        """Return the rule of the opened server: `rule`, or else that of the last commit.

        Raises:
            StoreError: the rule does not fit the store, or the stored one has a part that must be given.
        """
        self.was_given = rule is not None
        try:
            rule = from_config(self._config) if rule is None else rule
        except AffluxError as error:
            raise StoreError(
                f"[open] {self._path} holds a server whose rule must be given: {error}. A part that is registered is "
                "known after the import of the module that registers it"
            ) from None
        codec = codec_of(rule, self._facts["slot_dtype"])
        expected = {
            "rule": rule.name,
            "kind": rule.kind,
            "rule_vectors": list(rule.rule_vectors),
            "codec": None if codec is None else codec.name,
        }
        for name, value in expected.items():
            if self._facts[name] != value:
                raise StoreError(
                    f"[open] {self._path} holds a server whose {name} is {self._facts[name]!r}, not {value!r}"
                )
        changes = [*_changes(self._config, rule.to_config())] if self.was_given else []
        if changes:
            _LOGGER.warning("[open] %s: the rule that was given changes %s", self._path, "; ".join(changes))
        return rule

    def config(self, rule: Rule) -> dict[str, Any]:
        """Return the configuration of a rule, which is made once for all commits with this rule."""
        if self._newest is None or self._newest[0] is not rule:
            self._newest = rule, rule.to_config()
        return self._newest[1]
