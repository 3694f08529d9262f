"""The replacement of the rule of a running server."""

from typing import Protocol

from afflux.aggregation.options import ServerOptions, slots_of
from afflux.ops.errors import AffluxError
from afflux.rules.rule import Rule, a_rule
from afflux.server import persistence
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter
from afflux.server.tracebacks import clears_tracebacks


class RuleHolder(Protocol):
    """The parts of a server that the replacement of its rule needs."""

    options: ServerOptions
    _aggregator: Aggregator
    _adapter: InputAdapter

    def _enter(self, op: str) -> None: ...


@clears_tracebacks
def replace_rule(self: RuleHolder, rule: Rule) -> bool:  # noqa: D417
    """Replace the rule, for example by the same rule with another server_lr, buffer_size or law of staleness.

    Arrivals in the buffer keep the rule under which they joined. The new rule is in force from the next empty buffer
    on. The state that the server keeps for its rule (moments, cached rows, numbers) does not change. The log gets an
    entry `Replaced`. The next commit to a store contains the new rule, even if the rule is not yet in force. Other
    threads may push at the same time.

    Args:
        rule: a rule with the name, the kind and the codec of the previous rule, and the same names of rule vectors,
            scalars and vectors that the user sets. The new rule must need norms, need inner products, and take each
            client once per pass, each if and only if the previous rule does.

    Returns:
        Whether the new rule is already in force, because the buffer was empty.

    Raises:
        AffluxError: the rule differs in one of these properties, or an option of the server (max_slots, num_clients,
            memory_budget) cannot be combined with it; nothing has changed.

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
