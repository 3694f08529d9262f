"""Replacing the rule of a running server."""

from typing import Protocol

from afflux.aggregation.options import ServerOptions, slots_of
from afflux.ops.errors import AffluxError
from afflux.rules.rule import Rule, a_rule
from afflux.server import persistence
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter


class RuleHolder(Protocol):
    """What replacing a rule needs of a server."""

    options: ServerOptions
    _aggregator: Aggregator
    _adapter: InputAdapter

    def _enter(self, op: str) -> None: ...


def replace_rule(self: RuleHolder, rule: Rule) -> bool:  # noqa: D417
    """Goes on with another rule: the same with another server_lr, buffer_size or law of staleness, for example.

    Arrivals that wait in the buffer keep the rule that they joined under: the new one is in force from the next empty
    buffer on. What the server keeps for its rule (moments, cached rows, numbers) stays. The log has a `Replaced`; a
    store keeps the rule with its next commit, also while it waits. Other threads may push meanwhile.

    Args:
        rule: with the name, the kind and the codec of the rule before, and the same names of rule vectors, scalars and
            vectors that are handed in; it needs inner products, or takes each client once per pass, if and only if
            the one before does.

    Returns:
        Whether it is in force already, because the buffer was empty.

    Raises:
        AffluxError: the rule differs in one of these, or an option of the server (max_slots, num_clients,
            memory_budget) does not go with it; nothing has changed.

    Without `max_slots` the number of slots grows with buffer_size, but is never reduced.

    >>> import numpy as np
    >>> from afflux import Server, rules
    >>> server = Server(rules.fedbuff(buffer_size=2), np.zeros(2, np.float32))
    >>> receipt = server.push(client=1, version=0, update=np.ones(2))
    >>> server.replace_rule(rules.fedbuff(buffer_size=1, server_lr=0.5)), server.rule.buffer_size
    (False, 2)
    >>> receipt = server.push(client=2, version=0, update=np.ones(2))
    >>> server.rule.buffer_size, server.params.tolist()
    (1, [1.0, 1.0])
    """
    self._enter("replace_rule")
    a_rule("replace_rule", "rule", rule)
    aggregator = self._aggregator
    try:
        options = self.options.for_replacement(aggregator.rule, rule)
        folder = None if aggregator.storage is None else aggregator.storage.path
        persistence.for_place(rule, self._adapter, options, folder)
    except AffluxError as error:
        raise AffluxError(f"[replace_rule] {str(error).removeprefix('[Server] ')}") from None
    return aggregator.replace_rule(rule, slots_of(rule, options.max_slots, accumulate=options.accumulate))
